"""RunPod: on-demand pods in data centres (Secure) and with individual hosts (Community), through REST v2."""

"""spotd waits for the real price of GPU hosts, runs queued training jobs there, and carries them on."""

"""A marketplace of virtual hosts on this machine."""

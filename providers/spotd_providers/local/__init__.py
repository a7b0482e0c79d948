"""A marketplace of virtual hosts on this computer, as a provider like any other."""

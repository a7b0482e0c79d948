"""`spotd demo`: the whole of spotd on this machine in two minutes, with no account, config, root or leftovers."""

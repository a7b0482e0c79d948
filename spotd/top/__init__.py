"""`spotctl top`: a live view of one daemon on a terminal, as a client of its API like any other."""

"""Fake clouds: each speaks its provider's own HTTP API on loopback and really runs the start scripts."""

"""Policies: when a job waits, uses spot or pays for on-demand. Pure functions of one observation."""

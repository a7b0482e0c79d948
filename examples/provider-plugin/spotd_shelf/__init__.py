"""Machines on a shelf: an example provider for spotd."""

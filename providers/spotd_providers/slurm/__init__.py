"""Slurm clusters: one batch job for an attempt, queued, preempted and ended by the cluster's own rules."""

"""Kubernetes: a cluster of one's own, or one that is rented, as a place to run."""

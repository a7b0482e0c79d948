"""Stored checkpoints: reading manifests and chunks, garbage collection."""

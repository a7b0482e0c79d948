"""The thin shell around the core: pollers, brain, executor, grants and the life of the process."""

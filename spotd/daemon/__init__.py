"""Controllers around the core: pollers, control loop, executor, grants and the life of the process."""

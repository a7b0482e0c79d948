"""The job file: what a user may write, parsed into one frozen value."""

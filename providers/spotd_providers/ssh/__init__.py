"""Own machines over SSH: their GPUs, shared among jobs, until their owner wants them back."""

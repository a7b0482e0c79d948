"""Which checkpoints and outputs of a job are kept, and how often it should save."""

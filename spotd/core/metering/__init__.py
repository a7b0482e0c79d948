"""What machines have cost so far, and up to when they can bill."""

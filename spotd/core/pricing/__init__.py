"""What an hour of a machine really costs a job, and when a price is worth a launch or a restart."""

"""What the rules speak of: jobs, attempts, intents, offers, checkpoints, records, states and the world of them all."""

"""The commands `spotd` and `spotctl`. They know the API client and nothing of the daemon's inside."""

"""What an agent may see and do, over the Model Context Protocol: a client of the daemon's API like `spotctl`."""

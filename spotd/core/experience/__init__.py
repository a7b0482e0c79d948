"""What was learnt of providers, pools, hosts and images from attempts that are over, and what follows from it."""

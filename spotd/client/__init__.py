"""The client of the daemon's API: standard library only, since every spotctl command pays for its imports."""

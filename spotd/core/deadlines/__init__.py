"""Jobs with a deadline: how much time is left, when on-demand is needed, and when the job is over."""

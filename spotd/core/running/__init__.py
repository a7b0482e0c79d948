"""What is done to machines that run: one table of verdicts, and the one place that gives them."""

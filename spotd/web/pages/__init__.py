"""The pages: which parts of a view are live on which address, and what the user can do there."""

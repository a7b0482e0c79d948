"""The daemon's HTTP API: a Starlette application over the handlers of the running daemon."""

"""The daemon's HTTP API: a Starlette application over a `Backend`. It shows rows and passes wishes on."""

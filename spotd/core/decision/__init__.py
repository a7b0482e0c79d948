"""Which job gets which machine, which machine must stop, and which running job moves."""

"""The pure core: values in, values out. No clock, randomness, I/O, logging or await."""

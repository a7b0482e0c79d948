"""Prime Intellect: pods of many clouds behind one key, on demand and spot."""

"""Plans: what one decision or one observation is to write, in the making and done."""

"""What a person typed or wrote in a file, read into values or refused with a hint."""

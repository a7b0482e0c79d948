"""A list of prices that a file or a URL holds, with commands of your own that rent, list and end machines."""

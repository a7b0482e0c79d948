"""Offers of every provider: offer cache, pollers, provider supervisor, price recorder."""

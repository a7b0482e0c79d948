"""Sends notifications. Imported only where the config has a channel."""

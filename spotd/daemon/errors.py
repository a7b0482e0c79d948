"""Errors that end a start or a reload of the daemon, with a message for the user."""


class BadConfig(Exception):
    """A config cannot be used; the message is for the user, over several lines if need be."""

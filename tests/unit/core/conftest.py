"""The core does no I/O: a test of it that opens a socket fails."""

import pytest


@pytest.fixture(autouse=True)
def _no_sockets(socket_disabled: None) -> None:
    """`socket_disabled` is pytest-socket's."""

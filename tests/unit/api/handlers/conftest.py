"""The fixtures of the daemon's tests."""

from tests.unit.daemon.conftest import anyio_backend, rig

__all__ = ["anyio_backend", "rig"]

"""A host for the ssh provider: a folder, a fake `nvidia-smi`, and servers that run what they are sent for real."""

from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.server import SshFaults, classify, ssh_serving

__all__ = ["FakeHost", "Gpu", "SshFaults", "classify", "ssh_serving"]

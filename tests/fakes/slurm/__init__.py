"""A Slurm cluster: its commands as programs on the PATH of a login node, over one state that runs jobs for real."""

from tests.fakes.slurm.cluster import FakeJob, FakeNode, FakePartition, FakeSlurm, SlurmQuirks
from tests.fakes.slurm.login import LoginNode

__all__ = ["FakeJob", "FakeNode", "FakePartition", "FakeSlurm", "LoginNode", "SlurmQuirks"]

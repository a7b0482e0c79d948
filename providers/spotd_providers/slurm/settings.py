"""The settings under `[providers.slurm]`: the way to a login node, the partitions, and what an hour there counts as."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import Market, MicroUsdPerHour
from spotd_providers.kit.boundary import AdapterSettings, Dollars, Span

NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$"


class SlurmPartition(AdapterSettings):
    """One partition that jobs may be sent to."""

    name: str = Field(pattern=NAME, description="As `sinfo` shows it.")
    price: Dollars | None = Field(
        default=None, description="$ that an hour of one GPU counts as, of a node without GPUs an hour of it; may be 0."
    )
    gpu: str | None = Field(default=None, description="What its GPUs are, where their GRES has no type.")
    market: Market | None = Field(
        default=None, description='"spot" or "on-demand"; found out from PreemptMode and PriorityTier if unset.'
    )
    account: str | None = Field(default=None, pattern=NAME)
    qos: str | None = Field(default=None, pattern=NAME)
    reservation: str | None = Field(default=None, pattern=NAME)
    constraint: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_.,:&|()\[\]*-]{1,200}$", description="Features, as `sbatch` takes them."
    )
    time_limit: Span | None = Field(
        default=None,
        ge=timedelta(minutes=1),
        le=timedelta(days=365),
        description="Of one Slurm job, up to the partition's own. What is not done by then is queued again.",
    )
    queue: bool = Field(
        default=False, description="Offer it also while nothing is free there: a job then waits in Slurm's queue."
    )


class SlurmSettings(AdapterSettings):
    """One cluster, under `[providers.slurm]`."""

    host: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}$",
        description="A login node, as pinned by `spotctl hosts add`; unset: Slurm's commands run on this computer.",
    )
    port: int = Field(default=22, ge=1, le=65_535)
    user: str = Field(default="spotd", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$", description="Who logs in there.")
    key_file: Path | None = Field(default=None, description="spotd's private key; that of the ssh provider if unset.")
    known_hosts: Path | None = Field(default=None, description="Pinned keys; the file of `spotctl hosts add` if unset.")
    partitions: tuple[SlurmPartition, ...] = Field(
        default=(), max_length=64, description="Tables [[providers.slurm.partitions]]."
    )
    gpu_prices: dict[str, Dollars] = Field(
        default_factory=dict, max_length=256, description="$ per GPU-hour by GPU, where a partition states no price."
    )
    queue_wait: Span = Field(
        default=timedelta(minutes=30),
        ge=timedelta(seconds=30),
        le=timedelta(days=30),
        description="How long a job may wait in Slurm's queue before it is cancelled and another offer is taken.",
    )
    grace: Span = Field(
        default=timedelta(minutes=5),
        ge=timedelta(seconds=30),
        le=timedelta(hours=18),
        description="How long before its time limit a job is warned.",
    )
    folder: str = Field(
        default=".spotd/slurm",
        pattern=r"^[A-Za-z0-9._/-]{1,200}$",
        description="Where jobs work: a folder that login node and nodes share.",
    )
    path: str = Field(
        default="/opt/slurm/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
        pattern=r"^[A-Za-z0-9._/:+-]{1,4096}$",
        description="PATH of Slurm's commands and of jobs: what a login shell sets is not used.",
    )
    slurm_conf: str = Field(default="", pattern=r"^[A-Za-z0-9._/-]{0,4096}$", description="SLURM_CONF, if needed.")
    shares_files: bool = Field(
        default=False, description="Nodes see the folder of a file store at the same path, say over NFS."
    )

    @field_validator("partitions")
    @classmethod
    def _names_are_distinct(cls, partitions: tuple[SlurmPartition, ...]) -> tuple[SlurmPartition, ...]:
        if len({one.name for one in partitions}) != len(partitions):
            raise ValueError("two partitions have one name")
        return partitions

    @field_validator("gpu_prices")
    @classmethod
    def _gpus_are_canonical(cls, prices: dict[str, int]) -> dict[str, int]:
        return {canonical("", name): price for name, price in prices.items()}

    def price_of(self, partition: SlurmPartition, gpu: str, count: int) -> MicroUsdPerHour | None:
        """Return what this many GPUs count as per hour (0: a node without any); `None` where none is stated."""
        one = partition.price if partition.price is not None else self.gpu_prices.get(gpu)
        return None if one is None else MicroUsdPerHour(one * max(1, count))

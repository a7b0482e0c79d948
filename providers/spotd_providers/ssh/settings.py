"""The settings under `[providers.ssh]`: the hosts, what they cost, and when their owner wants them back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.kit.boundary import AdapterSettings, Dollars, Span, is_loopback
from spotd_providers.kit.hours import WeeklyHours, weekly_hours

HOST_NAME: Final = r"[a-z0-9][a-z0-9-]{0,30}"


class SshHost(AdapterSettings):
    """One machine of your own."""

    name: str = Field(pattern=rf"^{HOST_NAME}$", description="How spotd calls it.")
    address: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}$", description="Its name or IP address, as pinned by `hosts add`."
    )
    port: int = Field(default=22, ge=1, le=65_535)
    user: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$", description="An ordinary user without sudo.")
    price: Dollars = Field(default=0, description="$ per hour of the whole host while all of it is used; may be 0.")
    watts: int = Field(default=0, ge=0, le=100_000, description="Power under load, which `electricity` prices.")
    owner_hours: tuple[str, ...] = Field(
        default=(), max_length=32, description='When its owner has it, say ["Mon-Fri 08:00-18:00"].'
    )
    timezone: str = Field(default="UTC", description="Of owner_hours, say Europe/Kyiv.")
    container: Literal["none", "docker"] = Field(
        default="none", description='"docker" runs the job\'s image; "none" runs the job on the host itself.'
    )
    gpus: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")], ...] = Field(
        default=(), max_length=256, description="Only these GPUs, by UUID; empty: all."
    )
    pool: str | None = Field(
        default=None,
        pattern=rf"^{HOST_NAME}$",
        description="Hosts with one `pool` reach each other on every port: a job may run on several of them.",
    )
    pool_address: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$", description="Where they reach it, if not there."
    )
    cpu_jobs: int = Field(default=1, ge=1, le=64, description="Jobs at a time on a host without GPUs.")
    folder: str = Field(
        default=".spotd", pattern=r"^[A-Za-z0-9._/-]{1,200}$", description="Where machines live; one for all daemons."
    )
    path: str = Field(
        default="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        pattern=r"^[A-Za-z0-9._/:+-]{1,4096}$",
        description="PATH of jobs and probes: what a login shell sets is not used.",
    )

    @model_validator(mode="after")
    def _hours_are_written_well(self) -> SshHost:
        weekly_hours(self.owner_hours, self.timezone)
        return self

    @property
    def hours(self) -> WeeklyHours:
        return weekly_hours(self.owner_hours, self.timezone)


class SshSettings(AdapterSettings):
    """Hosts and keys, under `[providers.ssh]`."""

    hosts: tuple[SshHost, ...] = Field(default=(), max_length=64, description="Tables [[providers.ssh.hosts]].")
    electricity: Dollars = Field(default=0, description="$ per kWh; with a host's watts it is part of its price.")
    grace: Span = Field(
        default=timedelta(minutes=5),
        ge=timedelta(seconds=1),
        le=timedelta(days=1),
        description='How long before the owner\'s hours jobs are warned, say "5m".',
    )
    key_file: Path | None = Field(default=None, description="spotd's private key; one of its own is made if unset.")
    known_hosts: Path | None = Field(
        default=None, description="Pinned keys of hosts, as `spotctl hosts add` writes them; its file if unset."
    )
    shares_files: bool = Field(
        default=False, description="Hosts see the folder of a file store at the same path, say over NFS."
    )

    @field_validator("hosts")
    @classmethod
    def _names_are_distinct(cls, hosts: tuple[SshHost, ...]) -> tuple[SshHost, ...]:
        if len({host.name for host in hosts}) != len(hosts):
            raise ValueError("two hosts have one name")
        return hosts

    def pool_of(self, host: SshHost) -> tuple[SshHost, ...]:
        """Return the hosts that reach each other, this one among them."""
        return (host,) if host.pool is None else tuple(one for one in self.hosts if one.pool == host.pool)

    @property
    def nodes_max(self) -> int:
        """How many hosts the largest pool has."""
        return max((len(self.pool_of(one)) for one in self.hosts), default=1)

    @property
    def are_local(self) -> bool:
        """Whether jobs read the files of this computer."""
        return self.shares_files or (bool(self.hosts) and all(is_loopback(f"x://{one.address}") for one in self.hosts))

    def price_of(self, host: SshHost, part: int, whole: int) -> MicroUsdPerHour:
        """Return what a part of a host costs per hour: its share of price and electricity, rounded up."""
        milli = host.price * 1000 + host.watts * self.electricity
        return MicroUsdPerHour(-(-milli * part // (1000 * max(1, whole))))

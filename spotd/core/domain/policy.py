"""The user's limits, the daemon's own rules, and who acts through the API with which right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Final, get_type_hints

from spotd.core.domain.intents import JobId
from spotd.core.domain.market import FREE_EGRESS, StoreEgress
from spotd_providers.contract.values import AttemptKey, InstallId, MicroUsd, MicroUsdPerGpuHour, ProviderName

LIST_LAG_DEFAULT: Final = timedelta(minutes=3)
PROVISION_TIMEOUT_DEFAULT: Final = timedelta(minutes=20)
"""Of a provider that is not in the config any more, as the list lag above."""


DOCKER_HUB: Final = "docker.io"
_LOGIN_REFUSED: Final = re.compile(
    r"unauthorized|(?<!permission )denied|authentication required|basic auth credentials|docker login", re.IGNORECASE
)
"""What registries and docker say. `permission denied` is said of a program in the image, too."""


def registry_server(image: str) -> str:
    """Return the server of an image's registry, as docker finds it: Docker Hub, unless the first part names a host."""
    first, slash, _ = image.partition("/")
    return _canonical(first) if slash and (first == "localhost" or "." in first or ":" in first) else DOCKER_HUB


def _canonical(server: str) -> str:
    server = server.lower()
    return DOCKER_HUB if server in ("index.docker.io", "registry-1.docker.io") else server


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryRules:
    """One `[registries.NAME]`. `error`: why its password is not known, empty where it is."""

    name: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPolicy:
    """How the daemon treats one provider.

    Attributes:
        fee_ppm: fee multiplier in parts per million; 1.20 is 1_200_000.
        unusable: a sentence when nothing may be launched there (no key, the store cannot reach its hosts).
        free_if_taken_within: a machine that the provider takes back this soon after its launch costs nothing.
        bills_from_running: a machine that only starts costs its disk and nothing else.
        bills_from_script: it runs from the moment in which its start script begins.
        bills_at_least, bills_by: the least time that a start is billed for, and the unit to which it is rounded up.
        bill_open_for: how long after its end a machine's bill may still grow.
        runs_images: a machine there runs the job's container image.
        no_login: why a machine there cannot be given the login of a private image's registry; empty if it can.
        causes_within: how late a list may state that a machine had been taken back.
        ends_itself: the runner can end its own machine, so one without a lease is billed no longer than that takes.
        is_own: its machines are the user's own, and not rented.
        replaces_first: of several machines the first one is replaced as well, so the others may go on without it.
    """

    name: ProviderName
    fee_ppm: int
    quote_ttl: timedelta
    reconcile_window: timedelta
    provision_timeout: timedelta
    unusable: str = ""
    free_if_taken_within: timedelta = timedelta(0)
    bills_from_running: bool = False
    bills_from_script: bool = False
    bills_at_least: timedelta = timedelta(0)
    bills_by: timedelta = timedelta(0)
    bill_open_for: timedelta = timedelta(hours=2)
    causes_within: timedelta = timedelta(0)
    ends_itself: bool = True
    is_own: bool = False
    replaces_first: bool = False
    runs_images: bool = True
    no_login: str = ""
    account: str = ""
    """What names the account of the key in use; empty where the provider does not state it, or has not yet."""

    def billed_time(self, span: timedelta) -> timedelta:
        """Return for how long a machine is billed in full that ran for so long without a pause."""
        units = -(-span // self.bills_by) * self.bills_by if self.bills_by else span
        return max(units, self.bills_at_least)

    def is_other_account(self, account: str) -> bool:
        """Whether a machine of this account is out of the sight of the key in use."""
        return bool(account) and bool(self.account) and account != self.account


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """What the user allows, as the config states it. A reload of the config changes each of them at once.

    Each is annotated with its name in the config, by which it is read there and spoken of.
    """

    ceiling_default: Annotated[MicroUsdPerGpuHour | None, "[ceilings] default"] = None
    ceilings: Annotated[Mapping[str, MicroUsdPerGpuHour], "[ceilings]"] = field(default_factory=dict)
    """By canonical GPU name."""
    budget_day: Annotated[MicroUsd | None, "[budget] day"] = None
    budget_month: Annotated[MicroUsd | None, "[budget] month"] = None
    agent_job_budget: Annotated[MicroUsd | None, "[mcp] job_budget"] = None
    agent_day_budget: Annotated[MicroUsd | None, "[mcp] day_budget"] = None
    """What agents may queue; nothing unless both are set."""
    machines_max: Annotated[int, "[budget] machines"] = 8
    silence_limit: Annotated[timedelta, "[daemon] silence_limit"] = timedelta(minutes=35)
    """How long a silence alone is borne; a little longer than the lease, after which the host has ended itself."""
    save_limit: Annotated[timedelta, "[daemon] save_limit"] = timedelta(hours=1)
    """How long a stopping host may go on uploading after its stop_grace, as long as its upload advances."""
    raise_bids: Annotated[bool, "[bids] raise_running"] = False
    """Whether the bid of a running machine follows the lowest that wins."""
    hold_max: Annotated[timedelta, "[bids] hold"] = timedelta(0)
    """How long an outbid machine that is kept by its provider is waited for at most."""
    moves_max: Annotated[int, "[moves] most"] = 0
    """How often one job moves to a cheaper machine."""
    rent_after: Annotated[timedelta, "[own] rent_after"] = timedelta(0)
    """How long a job that says nothing else waits for an own machine before one is rented."""
    reuse_wait: Annotated[timedelta, "[reuse] wait"] = timedelta(0)
    """How long the machine of a job that is done waits for the next job at most; 0: it is ended at once."""
    canary: Annotated[timedelta, "[canary] time"] = timedelta(0)
    """How long a rented machine is measured at most before its job starts there; 0: not at all."""
    egress: Annotated[StoreEgress, "[store] egress_per_gb"] = FREE_EGRESS
    """What reading the checkpoint store costs."""
    registries: Annotated[Mapping[str, RegistryRules], "[registries]"] = field(default_factory=dict)
    """Which registries have a login, by server as `registry_server` returns it."""

    @property
    def machines_full(self) -> str:
        """Return why no more machines are launched where as many live as there may be."""
        if not self.machines_max:
            return "nothing is launched while [budget] machines is 0"
        return f"all {self.machines_max} machines of [budget] machines are in use"


def names_in_config() -> dict[str, str]:
    """Return the name in the config of each limit: `[table] key`, or `[table]`."""
    hints = get_type_hints(UserLimits, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if name in UserLimits.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(UserLimits):
    """The user's limits and the daemon's own rules.

    Attributes:
        identity: of this install, in the keys of the machines that it buys; empty before it has one.
        identities: of lost installs with the same label, whose machines are this one's by its user's word.
        identity_sure: no other daemon may be acting under this identity; until then no stray machine is ended.
    """

    install: InstallId
    identity: str = ""
    identities: frozenset[str] = frozenset()
    identity_sure: bool = True
    providers: Mapping[ProviderName, ProviderPolicy]
    launches_per_cycle_max: int = 16
    silence_max: timedelta = timedelta(seconds=45)
    """No sign of life from a running host for so long, and its provider lists it no more: then it is lost."""
    commit_horizon: timedelta = timedelta(minutes=5)
    """How much running cost is set aside for each machine: detecting, saving and ending take that long at most."""
    useful_run: timedelta = timedelta(minutes=5)
    """A launch that the budget would not let run for at least so long is not made."""
    save_allowance: timedelta = timedelta(minutes=2)
    """Time beyond stop_grace that a stopping host may take for uploading."""
    expected_stay: timedelta = timedelta(hours=6)
    host_cooldown: timedelta = timedelta(minutes=30)
    pool_cooldown: timedelta = timedelta(minutes=3)
    recheck_every: timedelta = timedelta(seconds=60)
    lease: timedelta = timedelta(minutes=30)
    """A host that reads no new grant for so long ends itself: the outer bound on an unreachable machine."""
    bid_headroom_ppm: int = 100_000
    """How far above the lowest winning bid to bid, where we pay what we bid; never above the ceiling."""
    image_errors_max: int = 3
    rows_may_be_wrong: bool = True
    """What leaps in one list has to stand in a second one; false where lists are made of recorded prices."""
    launches_paused: str = ""
    """A sentence while nothing may be launched (shutting down, the store does not answer)."""
    locked: Mapping[JobId, str] = field(default_factory=dict)
    """Jobs whose secrets this computer has no key for, and why, in a sentence: no machine is launched for them."""

    @property
    def own_providers(self) -> tuple[ProviderName, ...]:
        """Those whose machines are the user's own."""
        return tuple(sorted(name for name, rules in self.providers.items() if rules.is_own))

    def words_against_image(self, rules: ProviderPolicy, image: str) -> str:
        """Why this image cannot be pulled with its registry's login at this provider; empty if it can."""
        registry = self.registries.get(registry_server(image)) if rules.runs_images else None
        if registry is None:
            return ""
        return registry.error or (f"{rules.name}: {rules.no_login}" if rules.no_login else "")

    def words_of_login(self, image: str, detail: str) -> str:
        """Return what to mend where a registry refused to give this image; empty where it did not."""
        if _LOGIN_REFUSED.search(detail) is None:
            return ""
        server = registry_server(image)
        registry = self.registries.get(server)
        if registry is None:
            return f'if the image is private, add a login with server = "{server}" as [registries.NAME] to the config'
        return f"{server} refused it: mend username and password of [registries.{registry.name}], or the image's name"

    def list_lag(self, provider: ProviderName) -> timedelta:
        """Return for how long the provider's lists may lack a machine that exists."""
        rules = self.providers.get(provider)
        return LIST_LAG_DEFAULT if rules is None else rules.reconcile_window

    def provision_timeout(self, provider: ProviderName) -> timedelta:
        """Return how long a machine of the provider may take from its launch to its first sign of life."""
        rules = self.providers.get(provider)
        return PROVISION_TIMEOUT_DEFAULT if rules is None else rules.provision_timeout


# The key a machine carries: which install bought it, for which attempt of which job.
#
# Theory. A key is `spotd-<label>.<identity>-<job>-<number>`. The label is chosen by a user, so two daemons may have the
# same; the identity is made up once for each install and kept in its state and in its checkpoint store. Neither a label
# nor a job's id can hold a dot, so a key is read in one way only. Keys written before there were identities have none.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyParts:
    """The parts of a key of our label; `identity` is empty in one that was written before there were any."""

    identity: str
    job: JobId
    number: int


def attempt_key(install: InstallId, job: JobId, number: int, identity: str = "") -> AttemptKey:
    """Return the name a machine carries, from which its attempt is found again."""
    owner = f"{install}.{identity}" if identity else install
    return AttemptKey(f"spotd-{owner}-{job}-{number}")


@lru_cache(maxsize=4096)  # the same keys are read in every cycle
def key_parts(install: InstallId, key: str) -> KeyParts | None:
    """Return the parts of the key, if it carries this label."""
    head, _, number = key.rpartition("-")
    owner, _, job = head.rpartition("-")
    label, dot, identity = owner.partition(".")
    if label != f"spotd-{install}" or not job or "." in job or not (number.isascii() and number.isdecimal()):
        return None
    if bool(dot) != bool(identity):
        return None
    return KeyParts(identity=identity, job=JobId(job), number=int(number))


def key_belongs_to(install: InstallId, key: str) -> bool:
    """Whether a machine's key carries this label, whichever install of that label bought it."""
    return key_parts(install, key) is not None


def is_own_key(policy: Policy, key: str) -> bool:
    """Whether this very install bought the machine with this key, or answers for the lost install that did."""
    parts = key_parts(policy.install, key)
    return parts is not None and (parts.identity == policy.identity or parts.identity in policy.identities)


class Right(IntEnum):
    """What a route asks for. Each right holds those before it."""

    VIEW = 1
    """Read what is no secret."""
    SUBMIT = 2
    """Queue jobs within a budget of the day, and change one's own."""
    OPERATE = 3
    """Everything else."""
    LOCAL = 4
    """What the answer leads to is on the daemon's own computer: only its socket gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One who makes a request.

    Attributes:
        name: of the user, by which a token is known; empty for the owner, who may open the socket.
        budget_per_day: what all of the caller's jobs may hold in a day; `None` where nothing limits that.
    """

    name: str = ""
    right: Right = Right.LOCAL
    budget_per_day: MicroUsd | None = None

    def may_change(self, submitted_by: str) -> bool:
        """Whether the caller may change a job that this one queued."""
        return self.right >= Right.OPERATE or (self.right >= Right.SUBMIT and submitted_by == self.name)


OWNER: Final = Caller()

"""The `Harness` that a provider's author writes: what the behaviours need from the fake cloud.

A harness opens the provider against its fake cloud and keeps three promises:

1. It states the truth about the *world*: which machines exist in the cloud's own records (`machines`), what is sold
   (`sold`), what was asked (`requests`). Behaviours assert on the world, never on what the provider says of itself.
2. It has *knobs*. Transport faults (lost, cut, slow, garbled, refused answers) are ready-made: serve the fake through
   `Faults` and say in `classify` which request is which `Call`. Market faults (a vanished offer, a raised price, an
   empty account) are methods of this class to override, because only the fake knows how its cloud expresses them.
   They are listed, each to be decided on, in `knobs.MarketKnobs`.
3. It is honest about what does not apply: a knob that makes no sense for this market raises `NotApplicable` with the
   sentence a reader of the report gets. A knob that is not overridden fails; nothing else is ever skipped.

How to write one, for a provider that speaks HTTP:

    class ShelfHarness(Harness):
        plugin = PLUGIN

        def __init__(self, cloud: FakeShelf, faults: Faults, served: Served, folder: Path) -> None:
            super().__init__(faults=faults, served=served, folder=folder, credential=CANARY)
            self.cloud = cloud
        def settings(self) -> ShelfSettings:
            return ShelfSettings(base_url=self.served.url)
        def machines(self) -> Sequence[WorldMachine]: ...
        def sold(self) -> Sequence[WorldOffer]: ...
        ...

    @contextmanager
    def open_harness(folder: Path) -> Iterator[ShelfHarness]:
        cloud = FakeShelf(clock=FakeClock(), credential=CANARY)
        faults = Faults(cloud.app, classify=classify)
        with serving(faults) as served:
            yield ShelfHarness(cloud, faults, served, folder)

The fake must take its time from the harness's clock. It is served by another thread; guard its state with a lock
where a half-made change could be seen by a request.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from spotd_providers.contract.provider import Clock, Provider, ProviderPlugin, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    InstallId,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferQuery,
    RegistryLogin,
    Secret,
)
from spotd_providers.kit.text import begins_like_ours
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call, Canned, Faults, RecordedRequest, Served

# The knobs of a fake cloud: an empty market, moved prices, machines taken away.
#
# Every knob has to be decided on. A harness either overrides it, or overrides it to raise `NotApplicable` with the
# sentence that says why this market knows no such thing. A knob that was not decided on fails the behaviours that
# need it: what was forgotten must not be taken for what does not apply.


# ruff: noqa: ARG002 - the undecided knobs take what their overrides will use


class Undecided(NotImplementedError):
    """A knob that the harness neither implements nor declares as not applicable."""

    def __init__(self) -> None:
        super().__init__("implement this knob in your harness, or raise NotApplicable with the reason")


class NotApplicable(Exception):
    """An error for what this cloud does not have; its message is the reason that the report shows."""


class OddState(StrEnum):
    """States a machine can be put into for `set_state`."""

    UNHEARD_OF = "unheard of"
    """A word the provider has never documented."""
    PROVISION_FAILED = "provision failed"
    """The machine will never come up (image cannot be pulled, container cannot be created)."""
    ENDED_BY_ITSELF = "ended by itself"


class MarketKnobs:
    """One method per thing that a market may do. They take effect at once and last until the harness is closed."""

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        """Put the raw text `raw` in place of this offer's price in the cloud's next offer answers.

        For clouds that answer in JSON it is `NaN`, `1e999`, `-1`, `"abc"`, `true`, `null` or `[]`.
        """
        raise Undecided

    def sell_nothing(self) -> None:
        """Empty the market."""
        raise Undecided

    def vanish_offer(self, offer: Offer) -> None:
        """Remove an offer that was listed a moment ago."""
        raise Undecided

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        """Multiply the price of what the offer stands for by `factor`."""
        raise Undecided

    def exhaust_capacity(self, offer: Offer) -> None:
        """Use up this kind of machine."""
        raise Undecided

    def empty_balance(self) -> None:
        """Take all money from the account."""
        raise Undecided

    def exhaust_quota(self) -> None:
        """Use up an account limit."""
        raise Undecided

    def break_auth(self) -> None:
        """Invalidate the key."""
        raise Undecided

    def sell_on_demand_instead(self) -> None:
        """Sell an on-demand machine to the next launch although it asks for an interruptible one."""
        raise Undecided

    def refuse_but_leave_machine(self) -> None:
        """Refuse the next launch and nevertheless leave a machine behind that bills."""
        raise Undecided

    def set_list_lag(self, lag: timedelta) -> None:
        """Hide a new machine from listings for this long."""
        raise Undecided

    def list_only_part(self) -> None:
        """End the next listing early although there is more (a page fails, a region does not answer)."""
        raise Undecided

    def spoil_listed_row(self, machine_id: str) -> None:
        """Make one machine's row in listings unreadable."""
        raise Undecided

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        """Add machines under these keys, as if launched long ago."""
        raise Undecided

    def add_foreign_machines(self) -> Sequence[str]:
        """Add running machines that are not ours, and return their ids.

        One has no label, one is of another install whose name begins with ours (`spotd-lab2-...`), one has a label of
        a person's own. Where the cloud takes bids they are machines with a bid, and where it keeps logs they have one:
        the cloud itself would do all that is asked of it with them.
        """
        raise Undecided

    def preempt(self, machine_id: str) -> None:
        """Take this machine away, without notice where the cloud knows notices too."""
        raise Undecided

    def pause(self, machine_id: str) -> None:
        """Outbid the machine: stopped, kept, billing storage."""
        raise Undecided

    def give_notice(self, machine_id: str) -> None:
        """Announce that this machine will be taken away."""
        raise Undecided

    def set_state(self, machine_id: str, state: OddState) -> None:
        """Report this state of the machine."""
        raise Undecided

    def make_private(self, image: str, login: RegistryLogin) -> None:
        """Let the registry of this image give it for this login only; no other machine can start it."""
        raise Undecided

    def lose_contact(self, machine_id: str) -> None:
        """Make the host of this machine unreachable for the provider, which lists the machine all the same."""
        raise Undecided

    def true_balance(self) -> Balance:
        """Return what the account really holds."""
        raise Undecided

    def billed(self, machine_id: str) -> int:
        """Return the micro-dollars in the cloud's own ledger for this machine."""
        raise Undecided


# Recorders of the adapter's log and of Python's own logging, in which secrets are searched for.


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event with its fields."""

    level: str
    event: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.level} {self.event} {self.fields!r}"


class RecordingLog:
    """The adapter's own logger.

    Attributes:
        lines: everything that was logged, in order.
    """

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="debug", event=event, fields=fields))

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="info", event=event, fields=fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="warning", event=event, fields=fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="error", event=event, fields=fields))

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)


class _Net(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
        self.texts.append(formatter.format(record))


@contextmanager
def caught_logging() -> Iterator[list[str]]:
    """Record every line that any library logs at INFO or above inside the block, tracebacks included."""
    root = logging.getLogger()
    net = _Net()
    level = root.level
    root.addHandler(net)
    root.setLevel(logging.INFO)
    try:
        yield net.texts
    finally:
        root.setLevel(level)
        root.removeHandler(net)


INSTALL: Final = InstallId("lab")
CANARY: Final = "canary-key-7f3a9c51e2d84b06"
"""The credential of every harness: it must turn up nowhere but in a header."""
START_SCRIPT: Final = "#!/bin/sh\n# url: https://store.example/grant.json?signature=canary-grant-5e1b\nexec sleep 600\n"
GRANT_CANARY: Final = "canary-grant-5e1b"
"""Part of every start script; a script holds a presigned URL and may be in the launch request only."""


PRIVATE_IMAGE: Final = "registry.example/lab/train:1"
LOGIN: Final = RegistryLogin(
    server="registry.example", username="lab", password=Secret("canary-login-41d09be7c8f25a63")
)
"""Of every private image: its password must turn up in no listing, error, log or URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMachine:
    """A machine in the cloud's own records, ours or not.

    Attributes:
        label: the key it carries, where the cloud keeps it.
        exists: it costs something or may run again: pending, running, paused, ending; not gone.
        price: GPU part of the whole machine per hour, what it costs while running (the bid, in a bid market).
        start_script: what the cloud was given to run, if it keeps that.
    """

    machine_id: str
    label: str | None
    exists: bool
    running: bool
    market: Market | None = None
    price: MicroUsdPerHour | None = None
    start_script: str | None = None
    image: str | None = None
    disk_gb: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOffer:
    """Something the cloud sells now.

    Attributes:
        offer_id: as the provider will name it; `None` if the fake does not know it (only prices are compared then).
        price: GPU part of the whole machine per hour, all its GPUs together.
    """

    offer_id: str | None
    gpu: str
    gpu_count: int
    market: Market
    price: MicroUsdPerHour


class Harness(MarketKnobs, ABC):
    """One provider, opened against its fake cloud. A fresh one is made for every behaviour."""

    plugin: ClassVar[ProviderPlugin]
    key_exchanges: ClassVar[frozenset[str]] = frozenset()
    """Paths whose body has to hold the key, since the cloud gives a token for it there."""

    def __init__(
        self,
        *,
        faults: Faults,
        served: Served,
        folder: Path,
        clock: Clock | None = None,
        credential: str | None = CANARY,
        install: InstallId = INSTALL,
    ) -> None:
        self.faults = faults
        self.served = served
        self.folder = folder
        self.clock: Clock = clock or FakeClock()
        self.credential = credential
        self.install = install
        self.log = RecordingLog()
        self.errors: list[str] = []
        """Everything about every error that behaviours met, tracebacks and causes included."""
        self.logins: tuple[RegistryLogin, ...] = ()
        """What the config holds, as `Services.logins` returns it."""
        self._attempts = count(1)
        self._provider: Provider | None = None

    @abstractmethod
    def settings(self) -> Any:
        """Return the provider's own settings model, pointing at the fake."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Provider]:
        """Open the provider; `self.provider` is it."""
        state_dir = self.folder / "state"
        state_dir.mkdir(parents=True, exist_ok=True)
        services = Services(
            install=self.install,
            clock=self.clock,
            rng=Random(7),
            log=self.log,
            state_dir=state_dir,
            credential=self.credential,
            logins=lambda: self.logins,
        )
        async with self.plugin.open(self.settings(), services) as provider:
            self._provider = provider
            try:
                yield provider
            finally:
                self._provider = None

    @property
    def provider(self) -> Provider:
        if self._provider is None:
            raise RuntimeError("the provider is not open")
        return self._provider

    @abstractmethod
    def machines(self) -> Sequence[WorldMachine]:
        """Return every machine in the cloud's records, foreign and gone ones included."""

    @abstractmethod
    def sold(self) -> Sequence[WorldOffer]:
        """Return what the provider should offer now: at least two kinds of GPU, at least one machine with several."""

    def secrets(self) -> Sequence[str]:
        """Return the texts that may be in no log, error or URL. Override where a credential has several parts."""
        return [secret for secret in (self.credential, GRANT_CANARY, LOGIN.password.reveal()) if secret]

    def requests(self, call: Call | None = None) -> list[RecordedRequest]:
        """Return the requests that arrived at the cloud, in order, those with a lost answer included."""
        return [r for r in self.served.requests if call is None or self.faults.classify(r) is call]

    def live(self, key: AttemptKey | None = None) -> list[WorldMachine]:
        """Return the machines that exist under our install label, or under one key."""
        return [
            machine
            for machine in self.machines()
            if machine.exists
            and machine.label is not None
            and (machine.label == key if key is not None else begins_like_ours(machine.label, self.install))
        ]

    def key(self) -> AttemptKey:
        """Return a key of ours that was never used."""
        return AttemptKey(f"spotd-{self.install}-j0b{next(self._attempts):04d}-1")

    def request(self, offer: Offer, key: AttemptKey | None = None, **changes: Any) -> LaunchRequest:
        """Build a valid launch request for an offer."""
        values: dict[str, Any] = {
            "key": key or self.key(),
            "install": self.install,
            "offer": offer,
            "price_max": offer.gpu_price,
            "image": "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
            "disk_gb": 20,
            "start_script": START_SCRIPT,
            **changes,
        }
        return LaunchRequest(**values)

    def query(self) -> OfferQuery:
        """Return the query of behaviours that need no special one."""
        return OfferQuery(disk_gb=20)

    async def advance(self, duration: timedelta) -> None:
        """Move time ahead by `duration`, in the cloud and for the provider."""
        if not isinstance(self.clock, FakeClock):
            raise NotImplementedError("a harness with a clock of its own overrides advance()")
        self.clock.advance(duration)

    async def settle(self) -> None:
        """Let the machines bought so far come up and be listed, as far as time alone does that."""
        await self.advance(timedelta(minutes=5))

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        """Build this cloud's answer "too many requests", with or without the time to wait."""
        headers = {"content-type": "application/json"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        return Canned(status=429, body=b'{"error":"too many requests"}', headers=headers)

    def launch_calls(self) -> int:
        """Count the requests to buy a machine that arrived."""
        return len(self.requests(Call.LAUNCH))


HarnessFactory = Callable[[Path], AbstractContextManager[Harness]]
"""Makes a fresh harness whose files live in the given folder; what an entry point of `spotd.harnesses` names."""

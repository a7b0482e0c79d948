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

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.provider import Clock, Provider, ProviderPlugin, Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    LaunchRequest,
    Market,
    Offer,
    OfferQuery,
)
from spotd_providers.kit.keys import begins_like_ours
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.faults import Call, Canned, Faults
from spotd_providers.testkit.knobs import MarketKnobs
from spotd_providers.testkit.log import RecordingLog
from spotd_providers.testkit.serve import RecordedRequest, Served

INSTALL: Final = InstallId("lab")
CANARY: Final = "canary-key-7f3a9c51e2d84b06"
"""The credential of every harness: it must turn up nowhere but in a header."""
START_SCRIPT: Final = "#!/bin/sh\n# url: https://store.example/grant.json?signature=canary-grant-5e1b\nexec sleep 600\n"
GRANT_CANARY: Final = "canary-grant-5e1b"
"""Part of every start script; a script holds a presigned URL and may be in the launch request only."""


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
        return [secret for secret in (self.credential, GRANT_CANARY) if secret]

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

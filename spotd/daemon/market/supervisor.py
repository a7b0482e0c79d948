"""Keeps every provider open in a task of its own: its context, its poller, and what is known of its health.

One that does not open is tried again for ever and delays no other. A disabled one is opened all the same while the
state knows machines there: disabled means "buy nothing", not "forget what runs".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from random import Random
from typing import Final

import anyio
import anyio.abc

from spotd.core.domain.world import World
from spotd.daemon import log as logs
from spotd.daemon.commits import CrashPoints
from spotd.daemon.controllers import Controller
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.offer_cache import OfferCache, offer_query
from spotd.daemon.market.plugin_fields import MalformedValue
from spotd.daemon.market.plugin_fields import text as plain_text
from spotd.daemon.market.plugin_values import traits as plain_traits
from spotd.daemon.market.pollers import Poller, PollPace, ProviderEntry
from spotd.daemon.policy import ProviderSettings, Settings
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Clock, Logger, Provider, ProviderPlugin, ProviderTraits, Services
from spotd_providers.contract.values import OfferQuery, ProviderName, RegistryLogin

OPEN_DEADLINE_S: Final = 30.0
OPEN_AGAIN_FIRST_S: Final = 1.0
OPEN_AGAIN_MAX_S: Final = 60.0


class _NotOpen(Exception):
    """The provider could not be opened, or is open no more."""


class ProviderSupervisor:
    """`live` are the providers that can be called now; `entries` is every one of the config."""

    def __init__(
        self,
        settings: Settings,
        *,
        offer_cache: OfferCache,
        clock: Clock,
        seed: int,
        log: Logger,
        crash: CrashPoints,
        world: Callable[[], World | None],
        account_known: Callable[[ProviderName, str], None],
        hide: Callable[[str], str] = str,
        logins: Callable[[], Sequence[RegistryLogin]] = tuple,
        date_shown: Callable[[str, datetime], None] = lambda _who, _at: None,
    ) -> None:
        self._hide = hide
        self._logins = logins
        self._date_shown = date_shown
        self._account_known = account_known
        self._settings = settings
        self._offer_cache = offer_cache
        self._clock = clock
        self._seed = seed
        self._log = log
        self._crash = crash
        self._world = world
        self.live: dict[ProviderName, Provider] = {}
        self.entries: dict[ProviderName, ProviderEntry] = {}
        self._tried: dict[ProviderName, anyio.Event] = {}
        for one in settings.providers:
            traits, odd = _traits(one)
            last_error = one.last_error or odd
            self.entries[one.name] = ProviderEntry(
                name=one.name,
                title=one.title,
                enabled=one.enabled,
                fee_ppm=one.fee_ppm,
                traits=traits,
                last_error=last_error if one.enabled else "",
            )

    @property
    def traits(self) -> dict[ProviderName, ProviderTraits]:
        return {name: entry.traits for name, entry in self.entries.items() if entry.traits is not None}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        """Every provider that is enabled, or has machines of ours, is being opened and polled."""
        for one in self._settings.providers:
            self.start_one(group, one)

    def start_one(self, group: anyio.abc.TaskGroup, one: ProviderSettings) -> None:
        """Start it, unless it runs already, cannot run, or has no reason to."""
        if (
            one.name in self._tried
            or one.plugin is None
            or one.last_error
            or self.entries[one.name].traits is None
            or not (one.enabled or self._has_machines(one.name))
        ):
            return
        self._tried[one.name] = anyio.Event()
        self._offer_cache.open(one.name)
        controller = Controller(
            f"provider-{one.name}",
            partial(self._keep_open, one, one.plugin),
            interval_s=OPEN_AGAIN_FIRST_S,
            retry_max_s=OPEN_AGAIN_MAX_S,
            expected=(_NotOpen,),
        )
        group.start_soon(controller.run, name=controller.name)

    def list_again(self, provider: ProviderName) -> None:
        entry = self.entries.get(provider)
        if entry is not None and entry.poller is not None:
            entry.poller.list_again()

    def ask_again(self, provider: ProviderName) -> None:
        entry = self.entries.get(provider)
        if entry is not None and entry.poller is not None:
            entry.poller.ask_again()

    def set_enabled(self, one: ProviderSettings) -> None:
        """Follow the config; what is open stays open, because machines may be there."""
        entry = self.entries[one.name]
        self.entries[one.name] = replace(entry, enabled=one.enabled, fee_ppm=one.fee_ppm)
        if entry.poller is not None:
            entry.poller.pace = self._pace(one)

    async def stock_taken(self, *, seconds: float) -> list[ProviderName]:
        """Wait until every provider that may hold machines of ours was asked for them once; name the silent ones.

        One without any is not waited for: however slow it is, it delays no launch elsewhere.
        """
        awaited = {name: tried for name, tried in self._tried.items() if self._has_machines(name)}
        with anyio.move_on_after(seconds):
            for tried in awaited.values():
                await tried.wait()
        return [name for name in awaited if self._offer_cache.machines(name).listing is None]

    def _has_machines(self, name: ProviderName) -> bool:
        world = self._world()
        if world is None:
            return False
        return any(a.provider == name for a in world.attempts.values()) or any(
            t.provider == name for t in world.intents.values()
        )

    async def _keep_open(self, one: ProviderSettings, plugin: ProviderPlugin) -> None:
        """Open the provider and poll it.

        Raises:
            _NotOpen: it did not open, or has closed.
        """
        last_error = await self._open(one, plugin)
        entry = self.entries[one.name]
        if entry.last_error != last_error:
            self._log.warning("provider.not_open", provider=one.name, error=last_error)
        self.entries[one.name] = replace(entry, last_error=last_error)
        self._offer_cache.offers_failed(one.name, last_error, at=self._clock.now())
        self._offer_cache.machines_failed(one.name, last_error, at=self._clock.now())
        self._tried[one.name].set()
        raise _NotOpen(last_error)

    async def _open(self, one: ProviderSettings, plugin: ProviderPlugin) -> str:
        """Run while the provider is open; return why it could not be opened."""
        folder = self._settings.state_dir / "providers" / one.name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        services = Services(
            install=self._settings.install,
            clock=self._clock,
            rng=Random(f"{self._seed}:{one.name}"),
            log=logs.get(f"provider.{one.name}"),
            state_dir=folder,
            credential=one.credential,
            logins=self._logins,
            date_shown=partial(self._date_shown, one.name),
        )
        ours: BaseException | None = None
        """What ended the polling, if that is our own failure and not the plugin's."""
        try:
            with anyio.fail_after(OPEN_DEADLINE_S) as limit:
                async with plugin.open(one.settings, services) as provider:
                    limit.deadline = float("inf")
                    called = plain_text(provider.name)
                    if called != one.name:
                        return f"the plugin calls itself {called!r}, which is a bug in it"
                    try:
                        await self._poll(one, provider)
                    except Exception as exc:
                        ours = exc
                        raise
        except ProviderError as exc:
            if exc is ours:
                raise
            return plain_text(str(exc)) or type(exc).__name__
        except TimeoutError as exc:
            if exc is ours:
                raise
            return f"it did not open within {OPEN_DEADLINE_S:.0f} s"
        except (Exception, SystemExit) as exc:
            if exc is ours:
                raise
            self._log.error("provider.broke_contract", provider=one.name, call="open", exc_info=exc)
            return f"the plugin failed with {type(exc).__name__}, which is a bug in it"
        return "it closed by itself"

    def _pace(self, one: ProviderSettings) -> PollPace:
        traits = self.traits[one.name]
        return PollPace(
            poll_every=one.poll_every,
            machines_every=one.machines_every,
            offers_every_min=traits.offers_every_min,
            machines_every_min=traits.machines_every_min,
        )

    async def _poll(self, one: ProviderSettings, opened: Provider) -> None:
        provider = guarded(opened, clock=self._clock, log=self._log, name=one.name, hide=self._hide)
        poller = Poller(
            provider,
            offer_cache=self._offer_cache,
            clock=self._clock,
            rng=Random(f"{self._seed}:{one.name}:pace"),
            log=self._log,
            pace=self._pace(one),
            query=lambda: self._query(one.name),
            crash=self._crash,
            account_known=self._account_known,
        )
        self.live[one.name] = provider
        self.entries[one.name] = replace(self.entries[one.name], provider=provider, poller=poller, last_error="")
        try:
            async with anyio.create_task_group() as group:
                for controller in poller.controllers:
                    group.start_soon(controller.run, name=controller.name)
                await poller.first_listing(deadline_s=OPEN_DEADLINE_S)
                self._tried[one.name].set()
        finally:
            self.live.pop(one.name, None)

    def _query(self, provider: ProviderName) -> OfferQuery:
        world = self._world()
        return OfferQuery() if world is None else offer_query(world, provider)


def _traits(one: ProviderSettings) -> tuple[ProviderTraits | None, str]:
    """Return the plugin's traits, or why there are none."""
    if one.plugin is None or (one.last_error and one.settings is None):
        return None, "its settings are not usable"
    try:
        return plain_traits(one.plugin.traits(one.settings)), ""
    except MalformedValue as exc:
        return None, f"the plugin's {exc}, which is a bug in it"
    except Exception as exc:  # noqa: BLE001 - a plugin that fails is a provider that cannot be used, and nothing else
        return None, f"the plugin failed with {type(exc).__name__}, which is a bug in it"

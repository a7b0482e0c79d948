"""Holds the lease on this daemon's install while it runs, and states why nothing may be bought when it does not.

Running jobs never wait for the lease: a store that is away pauses purchases, which need it anyway, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from spotd.core.domain.policy import Policy, is_own_key, key_parts
from spotd.core.domain.world import World
from spotd.daemon.commits import Database, StoreThreads
from spotd.daemon.controllers import Controller, Outage, Pause
from spotd.daemon.install import (
    Claimed,
    Holder,
    InstallTaken,
    LeaseFound,
    claim,
    find_lease,
    may_claim_at_once,
    renew,
    require_silent,
    taken_words,
)
from spotd.store import StateError as StateError
from spotd_jobs.objects.api import Conflict, ObjectStore, StoreError
from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import InstallId, Instance, InstanceState, Listing, ProviderName

T = TypeVar("T")

RENEW_S: Final = 120.0
RETRY_S: Final = 10.0
DOUBT_S: Final = 600.0
"""A lease that was not renewed for so long may be another daemon's by now."""
WATCH_S: Final = 360.0
"""A living holder renews its lease at least twice in this time."""
DEADLINE_S: Final = 60.0
IDENTITIES: Final = "identities"
"""The fact of the state that names what this install is, and which lost ones it answers for: a JSON list."""
BEFORE_IDENTITIES: Final = "none"
"""How a user names the install that bought machines whose keys have no identity."""


class LeaseController:
    """`hold` is a sentence while nothing may be bought, `lost` one once this daemon must leave the store alone."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        install: InstallId,
        me: Holder,
        fresh: str,
        take_over: frozenset[str],
        database: Database,
        log: Logger,
        seconds: Callable[[], float],
        inline: bool = False,
    ) -> None:
        self._objects = objects
        self._install = install
        self._me = me
        self._take_over = take_over
        self._database = database
        self._log = log
        self._threads = StoreThreads(inline=inline)
        self._seconds = seconds
        self._identity = fresh
        self._own = ""
        self._also: frozenset[str] = take_over_identities(take_over)
        self._held: Claimed | None = None
        self._renewed = 0
        self._renewed_at = 0.0
        self._watched: LeaseFound | None = None
        self._watched_at = 0.0
        self._taken: LeaseFound | None = None
        self._outage = Outage(log, "install.lease_in_doubt", "install.lease_sure")
        self.controller = Controller(
            "install-lease",
            self.reconcile_once,
            interval_s=RETRY_S,
            expected=(StoreError, StateError),
            outage=self._outage,
            is_first_run_late=True,
        )
        self._foreign = Outage(log, "install.strange_machines", "install.strange_machines_gone", is_severe=True)
        """Machines of another install under our label."""

    # --- what it means for the rest of the daemon ---

    @property
    def lost(self) -> str:
        if self._taken is None:
            return ""
        words = taken_words(self._install, self._taken, "claimed after this one's")
        return f"{words.partition(chr(10))[0]}; this one buys nothing and writes no grant until it is started again"

    @property
    def may_write(self) -> bool:
        """Whether what lies in the store is this daemon's to change and to delete."""
        return self._held is not None and self._taken is None

    @property
    def hold(self) -> str:
        if self._taken is not None:
            return self.lost
        if self._held is None and self._watched is not None:
            left = int(max(0.0, WATCH_S - (self._seconds() - self._watched_at)) / 60) + 1
            return (
                f'the label "{self._install}" was last used by {self._watched.holder.words}: for {left} min spotd'
                " watches whether that one lives, before it buys anything"
            )
        if self._held is None:
            why = self._outage.error or "it was not asked yet"
            return f"whether another spotd uses this label is not known: {why}"
        if self._is_in_doubt:
            why, silent_s = self._outage.error or "it was not renewed in time", self._seconds() - self._renewed_at
            return f"this install's lease was renewed last {int(silent_s / 60)} min ago, so nothing is rented: {why}"
        return self._foreign.error

    @property
    def _is_in_doubt(self) -> bool:
        return self._seconds() - self._renewed_at > DOUBT_S

    def owned(self, policy: Policy) -> Policy:
        """Return the policy of this very install.

        One whose lease may have been taken meanwhile lists the machines of the one that took it as its own orphans.
        """
        is_sure = self.may_write and not self._is_in_doubt
        return replace(policy, identity=self._identity, identities=self._also, identity_sure=is_sure)

    def check_owners(self, listings: Mapping[ProviderName, Listing], world: World | None) -> None:
        """Machines of our label that another install bought forbid to buy more: each would disturb the other."""
        if world is None:
            self._foreign.update("")
            return
        policy = self.owned(world.policy)
        known = {*(a.carried_key for a in world.attempts.values()), *(i.key for i in world.intents.values())}
        strange = [
            machine
            for name in sorted(listings)
            for machine in listings[name].instances
            if machine.state not in {InstanceState.GONE, InstanceState.ENDING}
            and machine.key not in known
            and key_parts(self._install, machine.key) is not None
            and not is_own_key(policy, machine.key)
        ]
        self._foreign.update(self._strange_words(strange))

    def _strange_words(self, strange: list[Instance]) -> str:
        if not strange:
            return ""
        first = min(strange, key=lambda machine: (machine.ref.provider, machine.ref.instance_id))
        parts = key_parts(self._install, first.key)
        identity = (parts.identity if parts is not None else "") or BEFORE_IDENTITIES
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        return (
            f'{first.ref.instance_id} at {first.ref.provider} ({first.key}){more} carries the label "{self._install}" '
            f"of another install (identity {identity}; this one is {self._identity}): two spotd use one label and one "
            "account, and neither buys until one of them has another install in [daemon]; if the other one is gone for "
            f'good, write take_over = ["{identity}"] in [daemon]'
        )

    # --- holding it ---

    async def start(self) -> None:
        """Take the lease, or prepare to claim it once that is safe.

        Raises:
            InstallTaken: another daemon acts under this label.
        """
        raw = await self._database.read(lambda reads: reads.meta(IDENTITIES))
        own = [str(one) for one in json.loads(raw)] if raw else []
        if own:
            self._own = self._identity = own[0]
            self._also |= frozenset(own[1:])
        await self.controller.run_once()

    async def reconcile_once(self) -> Pause:
        """Renew the lease, or come one step nearer to holding it.

        Raises:
            StoreError, StateError: whether it is held is not known.
            InstallTaken: another daemon acts under this label.
        """
        await self._step()
        return Pause(seconds=RENEW_S if self._held is not None else RETRY_S)

    async def _step(self) -> None:
        if self._taken is not None:
            return
        if self._held is not None:
            await self._renew(self._held)
            return
        found = await self._call(lambda: find_lease(self._objects, self._install))
        dead = found is None or may_claim_at_once(found, self._me, self._take_over)
        if not dead and found is not None and not await self._watched_long_enough(found):
            return
        await self._claim(found)

    async def _watched_long_enough(self, found: LeaseFound) -> bool:
        watched = self._watched
        if watched is not None and (found.epoch, found.info.etag) != (watched.epoch, watched.info.etag):
            raise InstallTaken(taken_words(self._install, found, "renewed while it was watched"))
        if watched is None:
            await self._call(lambda: require_silent(self._objects, self._install, found, self._own))
            self._watched, self._watched_at = found, self._seconds()
            self._log.warning("install.watched", holder=found.holder.words, identity=found.identity)
        return self._seconds() - self._watched_at >= WATCH_S

    async def _claim(self, found: LeaseFound | None) -> None:
        began = self._seconds()
        try:
            held = await self._call(
                lambda: claim(
                    self._objects, self._install, self._me, found, own_identity=self._own, fresh=self._identity
                )
            )
        except Conflict as exc:
            raise StoreError(str(exc)) from exc  # the next try finds who was faster
        also = self._also | held.also
        names = [held.identity, *sorted(also - {held.identity})]
        await self._database.tx(lambda tx: tx.set_meta(IDENTITIES, json.dumps(names)))
        self._own = self._identity = held.identity
        self._also, self._held, self._renewed_at, self._watched = also, held, began, None
        self._log.info("install.lease_held", identity=held.identity, epoch=held.epoch, also=sorted(also))

    async def _renew(self, held: Claimed) -> None:
        began = self._seconds()
        self._renewed += 1
        renewed = self._renewed
        taken = await self._call(lambda: renew(self._objects, self._install, self._me, held, renewed=renewed))
        if taken is None:
            self._renewed_at = began
            return
        self._taken = taken
        self._log.error("install.lost", error=self.lost)

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._threads.run(work, deadline_s=DEADLINE_S)


def take_over_identities(take_over: frozenset[str]) -> frozenset[str]:
    """Return the identities that the user's words mean."""
    return frozenset("" if one == BEFORE_IDENTITIES else one for one in take_over)

"""What the parts of the backend share: references to the running daemon, and the doors to its two stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from spotd.api.backend import NotFound, Unavailable
from spotd.api.refs import JobHead, resolve
from spotd.core.model import JobId, World
from spotd.daemon.bell import Bell
from spotd.daemon.boards import Boards
from spotd.daemon.brain import Brain
from spotd.daemon.commits import Commits, PolicyBox
from spotd.daemon.crash import CrashPoints
from spotd.daemon.database import Database
from spotd.daemon.historian import Historian
from spotd.daemon.ids import JobIds
from spotd.daemon.pollers import Poller
from spotd.daemon.secretfiles import SecretFiles
from spotd.daemon.storekeeper import Storekeeper
from spotd.store import AmbiguousJob, JobView, Reads, StoreError
from spotd_jobs.objects.api import ObjectMissing, ObjectStore
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_providers.contract.provider import Clock, Logger, Provider, ProviderTraits
from spotd_providers.contract.values import ProviderName

T = TypeVar("T")

OBJECTS_DEADLINE_S: Final = 120.0
OBJECTS_THREADS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """One provider of the config. `provider` is `None` for one that is disabled or did not open; `trouble` says why."""

    name: ProviderName
    title: str
    enabled: bool
    fee_ppm: int
    provider: Provider | None = None
    poller: Poller | None = None
    traits: ProviderTraits | None = None
    trouble: str = ""


@dataclass(slots=True, kw_only=True)
class Parts:
    """The running daemon, as its API needs it."""

    clock: Clock
    wall: Clock
    database: Database
    commits: Commits
    policy: PolicyBox
    boards: Boards
    historian: Historian
    brain: Brain
    bell: Bell
    keeper: Storekeeper
    objects: ObjectStore
    secrets: SecretFiles
    ids: JobIds
    providers: Mapping[ProviderName, ProviderEntry]
    crash: CrashPoints
    log: Logger
    started_at: datetime
    spool: Path
    """A private folder for what is on its way into the object store."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of this process, for `status` and `doctor`: version, config path, state folder."""
    inline: bool = False
    _limiter: anyio.CapacityLimiter | None = None

    async def read(self, work: Callable[[Reads], T]) -> T:
        """One consistent look at the state.

        Raises:
            Unavailable: it cannot be read now.
        """
        try:
            return await self.database.read(work)
        except StoreError as exc:
            raise Unavailable(exc.message, hint=exc.hint) from exc

    async def stored(self, work: Callable[[], T]) -> T:
        """What a blocking call of the object store returned.

        Raises:
            NotFound: the object does not exist.
            Unavailable: the store does not answer.
        """
        try:
            if self.inline:
                return work()
            if self._limiter is None:
                self._limiter = anyio.CapacityLimiter(OBJECTS_THREADS)
            with anyio.fail_after(OBJECTS_DEADLINE_S):
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        except ObjectMissing as exc:
            raise NotFound(str(exc)) from exc
        except ObjectsError as exc:
            raise Unavailable(str(exc), hint="spotctl doctor") from exc
        except TimeoutError as exc:
            raise Unavailable("the checkpoint store does not answer", hint="spotctl doctor") from exc

    async def find(self, ref: str) -> JobId:
        """The job a user means.

        Raises:
            NotFound, Ambiguous
        """
        return await self.read(lambda reads: find_job(reads, ref))

    @property
    def why_paused(self) -> str:
        """Why nothing may be launched now, in a sentence; empty while launches are allowed."""
        held = self.brain.held
        return f"no decisions are made: {held}" if held else self.policy.why_paused

    def world(self) -> World:
        """The newest world the brain has seen.

        Raises:
            Unavailable: there is none yet.
        """
        if self.brain.state is None:
            raise Unavailable("the daemon has only just started", hint="try again in a moment")
        return self.brain.state.world


def find_job(reads: Reads, ref: str) -> JobId:
    """The one job the reference means, by the API's rule, looking only at jobs that could be it."""
    candidates: dict[JobId, JobView] = {view.id: view for view in reads.active_named(ref)}
    found = reads.find_job(ref)
    if isinstance(found, AmbiguousJob):
        candidates.update({view.id: view for view in found.candidates})
    elif found is not None:
        candidates[found.id] = found
    heads = [
        JobHead(id=view.id, name=view.name, is_final=view.state.is_final, order=view.submitted_at.timestamp())
        for view in candidates.values()
    ]
    return JobId(resolve(ref, heads))

"""What a rented machine does while the command of its job does not run yet, or not any more.

A provider states it until the machine's first heartbeat, the heartbeats afterwards. All of it is only ever shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from spotd.api.schemas.jobs import StageResponse
from spotd.api.timestamps import instant
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.states import AttemptState
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.hosts.transfers import TransferKind
from spotd_jobs.wire.reports import Phase
from spotd_providers.contract.values import InstanceRef, Listing, ProviderName

Words = Mapping[InstanceRef, str]
DETAIL_CHARS_MAX: Final = 160

_OF_PHASE: Final = {
    Phase.BOOT: ("boot", "the runner begins"),
    Phase.CODE: ("code", "fetches and unpacks the code"),
    Phase.SETUP: ("set-up", "runs the job's set-up command"),
    Phase.RESTORE: ("restore", "restores the checkpoint"),
    Phase.SAVE: ("save", "was asked to stop; the job may be writing its last checkpoint"),
    Phase.UPLOAD: ("upload", "the command has ended; what is complete goes to the store"),
}


def provider_words(listings: Mapping[ProviderName, Listing]) -> Words:
    """Return what the providers say of each machine in their own words, where they say anything."""
    return {one.ref: one.detail for listing in listings.values() for one in listing.instances if one.detail}


def stage_response(attempts: Iterable[Attempt], hosts: HostMonitor, words: Words) -> StageResponse | None:
    """Return what the machine of the attempt that counts does; `None` while its command runs, and without one."""
    item = next((one for one in attempts if one.state.counts), None)
    if item is None:
        return None
    heartbeat = hosts.heartbeat(item.id)
    if heartbeat is None:
        return _unheard(item, words)
    named = _OF_PHASE.get(heartbeat.phase)
    if named is None or heartbeat.exit is not None:
        return None
    since, moving = hosts.phase_at(item.id), hosts.transfer(item.id)
    return _stage(
        *named,
        since=since,
        moved=None
        if moving is None or (moving.kind is TransferKind.UPLOAD) is not (heartbeat.phase in {Phase.SAVE, Phase.UPLOAD})
        else (moving.done, moving.total),
    )


def _unheard(item: Attempt, words: Words) -> StageResponse | None:
    """Return the stage of a machine without a heartbeat that this daemon has read."""
    if item.state is AttemptState.INTENDED and item.ref is None:
        return _stage("launch", f"{item.provider} has not answered the launch yet", since=item.intended_at)
    if item.state not in {AttemptState.INTENDED, AttemptState.STARTING} or item.heartbeat_seq >= 0:
        return None
    detail = words.get(item.ref, "")[:DETAIL_CHARS_MAX] if item.ref is not None else ""
    said = f"; {item.provider} says: {detail}" if detail else ""
    text = f"the machine starts and pulls the image, and has not reported yet{said}"
    return _stage("image", text, since=item.launched_at or item.intended_at)


def _stage(name: str, text: str, *, since: datetime | None, moved: tuple[int, int] | None = None) -> StageResponse:
    done, total = moved or (None, None)
    return StageResponse(
        name=name,
        text=text,
        since=instant(since),
        bytes_done=done,
        bytes_total=total,
    )

"""Core values as responses of the API. Pure functions; dollars and text appear here and not before."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from spotd.api.handlers.context import DaemonAnswers, HandlerContext
from spotd.api.requests import instant, utc_text
from spotd.api.responses import ApiUnavailable, NotFound
from spotd.api.schemas import jobs as schemas
from spotd.api.schemas.answers import EventResponse, PassedOverResponse
from spotd.api.schemas.costs import BreakdownResponse, PollResponse, QuoteResponse
from spotd.core.bids import pays_bid
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, Intent, IntentId, JobId
from spotd.core.domain.jobs import ArrayTask, Checkpoint
from spotd.core.domain.market import MarketSnapshot, PriceBreakdown, ProviderOffers, Quote
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import Verdict
from spotd.core.handover import waits_order
from spotd.core.host_reports import explain_exit, late_words
from spotd.core.metering import is_estimate, on_demand_spent, spent
from spotd.core.pricing import gpu_price_limit, market_word, repriced, usual_bid
from spotd.daemon.hosts.limits import HostTransfer, TransferKind
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.hosts.reader import last_lines
from spotd.store import AttemptView, EventView, JobView
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.wire.reports import Phase
from spotd_providers.contract.values import InstanceRef, Listing, MicroUsdPerGpuHour, ProviderName, as_usd

# Why a job failed: its reason, what its exit code usually means, the last lines of its output, the next step.


LISTED_MAX: Final = 5
"""Of so many failed jobs a list shows the output."""
_KNOWN_MAX: Final = 256


_COMMAND_FAILED: Final = EndReason.USER_ERROR.sentence("{").partition("{")[0]


def failure_response(view: JobView) -> schemas.FailureResponse | None:
    """Return why a job failed, or why its command did and is about to be tried again; `None` for all others."""
    if view.state is JobState.FAILED or _is_retried(view.state, view.reason):
        return _response(view.state, view.reason, view.attempts_made, view.exit_code, (), view.name)
    return None


def _is_retried(state: JobState, reason: str) -> bool:
    return state is JobState.RECOVERING and reason.startswith(_COMMAND_FAILED)


def _response(
    state: JobState, reason: str, attempt: int, exit_code: int | None, output: Sequence[str], name: str
) -> schemas.FailureResponse:
    known = explain_exit(exit_code, output, name, is_retried=state is JobState.RECOVERING)
    return schemas.FailureResponse(
        attempt=attempt,
        reason=reason,
        exit_code=exit_code,
        meaning=known.meaning,
        output=list(output),
        next_step=known.step,
    )


class FailureHandlers(DaemonAnswers):
    """Adds the last lines of output, which are in the object store, to the answers about failed jobs."""

    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self._known: OrderedDict[AttemptId, list[str]] = OrderedDict()

    async def complete(self, jobs: Sequence[schemas.JobResponse]) -> None:
        """Add the output to the newest failed ones of these."""
        failed = [job for job in jobs if job["failure"] is not None]
        for job in failed[:LISTED_MAX]:
            failure = job["failure"]
            if failure is not None and failure["attempt"]:
                output = await self.output_of(AttemptId(job=JobId(job["id"]), number=failure["attempt"]))
                job["failure"] = _response(
                    JobState(job["state"]),
                    failure["reason"],
                    failure["attempt"],
                    failure["exit_code"],
                    output,
                    job["name"],
                )

    async def output_of(self, attempt: AttemptId) -> list[str]:
        """Return the last lines that an ended attempt wrote; none where they cannot be read now."""
        if (known := self._known.get(attempt)) is not None:
            return known
        context = self._context
        try:
            lines = await context.stored(partial(last_lines, context.objects, attempt))
        except (ApiUnavailable, NotFound):
            return []
        if lines:
            self._known[attempt] = lines
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return lines


# What a rented machine does while the command of its job does not run yet, or not any more.
#
# A provider states it until the machine's first heartbeat, the heartbeats afterwards. All of it is only ever shown.


Words = Mapping[InstanceRef, str]
Intents = Mapping[IntentId, Intent]
DETAIL_CHARS_MAX: Final = 160

_OF_PHASE: Final = {
    Phase.BOOT: ("boot", "the runner begins"),
    Phase.CANARY: ("canary", "measures the machine, for [canary] time at most, before its job starts there"),
    Phase.CODE: ("fetch", "fetches the code, and the data and the checkpoint where there are any"),
    Phase.SETUP: ("set-up", "runs the job's set-up command"),
    Phase.RESTORE: ("restore", "restores the checkpoint"),
    Phase.SAVE: ("save", "was asked to stop; the job may be writing its last checkpoint"),
    Phase.UPLOAD: ("upload", "the command has ended; what is complete goes to the store"),
}


def provider_words(listings: Mapping[ProviderName, Listing]) -> Words:
    """Return what the providers say of each machine in their own words, where they say anything."""
    return {one.ref: one.detail for listing in listings.values() for one in listing.instances if one.detail}


def stage_response(
    attempts: Iterable[Attempt], hosts: HostMonitor, words: Words, intents: Intents
) -> schemas.StageResponse | None:
    """Return what the machine of the attempt that counts does; `None` while its command runs, and without one."""
    known = tuple(attempts)
    item = next((one for one in known if one.state.counts), None)
    if item is None:
        waits = ((one, order) for one in known if (order := waits_order(intents.get, one)) is not None)
        return next((_waiting(one, order) for one, order in waits), None)
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


def _waiting(item: Attempt, order: Intent) -> schemas.StageResponse:
    until = "" if order.not_before is None else f" until {order.not_before.astimezone(UTC):%H:%M} UTC"
    text = f"its job is done; it waits for another job{until}, then it is ended"
    return _stage("waits", text, since=item.ended_at)


def _unheard(item: Attempt, words: Words) -> schemas.StageResponse | None:
    """Return the stage of a machine without a heartbeat that this daemon has read."""
    if item.state is AttemptState.INTENDED and item.ref is None:
        return _stage("launch", f"{item.provider} has not answered the launch yet", since=item.intended_at)
    if item.state not in {AttemptState.INTENDED, AttemptState.STARTING} or item.heartbeat_seq >= 0:
        return None
    if item.awaits_handover:
        text = "the machine of a job that is done goes on with this one, and has not reported yet"
        if item.members is not None:
            text = "the healthy machines of the attempt before go on with this one, once their first one is replaced"
        return _stage("takeover", text, since=item.launched_at)
    detail = words.get(item.ref, "")[:DETAIL_CHARS_MAX] if item.ref is not None else ""
    said = f"; {item.provider} says: {detail}" if detail else ""
    text = f"the machine starts and pulls the image, and has not reported yet{said}"
    return _stage("image", text, since=item.launched_at or item.intended_at)


def _stage(
    name: str, text: str, *, since: datetime | None, moved: tuple[int, int] | None = None
) -> schemas.StageResponse:
    done, total = moved or (None, None)
    return schemas.StageResponse(
        name=name,
        text=text,
        since=instant(since),
        bytes_done=done,
        bytes_total=total,
    )


SHELL = ("/bin/sh", "-c")


def usd(amount: int | None) -> float | None:
    return None if amount is None else as_usd(amount)


def attempt_response(item: Attempt, now: datetime) -> schemas.AttemptResponse:
    offer = item.quote.offer
    reason = item.end_reason
    return schemas.AttemptResponse(
        attempt=item.id.number,
        state=item.state.value,
        provider=offer.provider,
        host=offer.host_id or offer.offer_id,
        region=offer.region,
        market=market_word(item.quote),
        gpu=offer.gpu,
        gpu_count=offer.gpu_count,
        nodes=offer.nodes,
        effective_usd_h=as_usd(item.quote.price.total),
        ceiling_usd_gpu_h=as_usd(item.ceiling_now),
        on_demand_usd_h=usd(item.quote.on_demand),
        intended_at=utc_text(item.intended_at),
        launched_at=instant(item.launched_at),
        running_at=instant(item.running_at),
        ended_at=instant(item.ended_at),
        resumed_from=item.resumed_from,
        reason=None if reason is None else reason.value,
        detail="" if reason is None else reason.sentence(item.end_detail),
        exit_code=item.exit_code,
        spent_usd=as_usd(spent(item, now)),
        estimated=is_estimate(item, spent(item, now)),
        on_demand_usd=as_usd(on_demand_spent(item, now)),
        bid=_bid_response(item) if pays_bid(item) else None,
        taken_over_from=None if item.machine_key is None else "-".join(item.machine_key.split("-")[-2:]),
    )


def _bid_response(item: Attempt) -> schemas.BidResponse:
    known = item.bidding
    return schemas.BidResponse(
        usd_h=as_usd(item.quote.price.gpu),
        floor_usd_h=usd(known.floor),
        changes=max(0, len(known.placed) - 1),
        held_since=instant(known.held_since),
    )


def transfer_response(at: HostTransfer) -> schemas.TransferResponse:
    return schemas.TransferResponse(
        kind=at.kind.value,
        checkpoint=at.name,
        bytes_done=at.done,
        bytes_total=at.total,
        bytes_per_s=at.rate,
        seconds_left=at.left_s,
        queued=at.queued,
        failing=at.failing,
    )


def gpu_responses(hosts: HostMonitor, attempt: AttemptId) -> list[schemas.GpuResponse]:
    """Return the use of the host's GPUs by its newest heartbeat that was read."""
    heartbeat, at = hosts.heartbeat(attempt), hosts.heartbeat_at(attempt)
    if heartbeat is None or at is None:
        return []
    return [schemas.GpuResponse(**gpu.model_dump(), at=utc_text(at)) for gpu in heartbeat.gpus]  # type: ignore[typeddict-item]  # the fields of both are the same, which a test holds


def job_response(
    view: JobView,
    attempts: Iterable[Attempt],
    verdict: Verdict | None,
    now: datetime,
    hosts: HostMonitor,
    words: Words,
    intents: Intents,
) -> schemas.JobResponse:
    """Return the job object. In a list, `attempts` are those that have not ended.

    Args:
        words: what providers say of machines.
        intents: the calls that are owed.
    """
    machine, shown = next((a for a in view.open if a.state.counts), None), tuple(attempts)
    spent_by_now, compared = view.spent_at(now), view.on_demand_at(now)
    gpu, count = _gpu_of(view, machine)
    moving = None if machine is None else hosts.transfer(machine.id)
    return schemas.JobResponse(
        id=view.id,
        name=view.name,
        state=view.state.value,
        reason=view.reason,
        provider=None if machine is None else machine.provider,
        host=None if machine is None else machine.host_id or machine.offer_id,
        gpu=gpu,
        gpu_count=count,
        nodes=next((item.quote.offer.nodes for item in shown if machine is not None and item.id == machine.id), 1),
        attempt=view.attempts_made,
        attempts=[attempt_response(item, now) for item in shown],
        effective_usd_h=None if machine is None else as_usd(machine.price),
        spent_usd=as_usd(spent_by_now),
        estimated=view.is_estimated and spent_by_now != 0,
        on_demand_usd=as_usd(compared),
        saved_usd=as_usd(compared - spent_by_now),
        recoveries=view.recoveries,
        checkpoint=None if view.checkpoint is None else checkpoint_response(view.checkpoint),
        submitted_at=utc_text(view.submitted_at),
        started_at=instant(view.started_at),
        ended_at=instant(view.ended_at),
        verdict=view.reason if verdict is None or view.state.is_final else verdict.sentence,
        exit_code=view.exit_code,
        transfer=None if moving is None else transfer_response(moving),
        gpus=[] if machine is None else gpu_responses(hosts, machine.id),
        uncompared_usd=as_usd(view.uncompared_at(now)),
        summary=view.closing_words(now),
        checkpoint_late=_late_words(view, shown, now),
        array=None if view.array is None else _array_response(view.array),
        ceiling_usd_gpu_h=_ceiling(shown, verdict),
        stage=stage_response(shown, hosts, words, intents),
        moves=view.moves.count,
        submitted_by=view.submitted_by,
        gpu_wanted=view.gpu_wanted,
        failure=failure_response(view),
    )


def _ceiling(attempts: Iterable[Attempt], verdict: Verdict | None) -> float | None:
    current = next((item.ceiling_now for item in attempts if item.state.counts), None)
    return usd(current if current is not None or verdict is None else verdict.ceiling)


def _late_words(view: JobView, attempts: Iterable[Attempt], now: datetime) -> str:
    newest = "" if view.checkpoint is None else view.checkpoint.name
    return next((late_words(item.freshness, newest, now) for item in attempts if item.state.counts), "")


def _array_response(task: ArrayTask) -> schemas.ArrayTaskResponse:
    return schemas.ArrayTaskResponse(
        id=task.id, name=task.name, index=task.index, count=task.count, at_once=task.at_once
    )


def _gpu_of(view: JobView, machine: AttemptView | None) -> tuple[str | None, int]:
    if machine is not None:
        return machine.gpu, machine.gpu_count
    first = view.gpu_wanted.partition(",")[0].rpartition(" x ")[2]
    name, _, number = first.rpartition(":")
    return name or None, int(number) if number.isdecimal() else 1


def checkpoint_response(item: Checkpoint) -> schemas.CheckpointResponse:
    return schemas.CheckpointResponse(
        name=item.name, attempt=item.attempt, step=item.step, bytes=item.bytes, at=utc_text(item.at)
    )


def event_response(item: EventView, job_name: str | None) -> EventResponse:
    event = item.event
    return EventResponse(
        id=item.seq,
        at=utc_text(event.at),
        kind=event.kind,
        message=event.message,
        job=event.job,
        job_name=job_name,
        attempt=event.attempt,
        data=dict(event.data),
    )


def breakdown_response(price: PriceBreakdown) -> BreakdownResponse:
    return BreakdownResponse(
        gpu_usd_h=as_usd(price.gpu),
        storage_usd_h=as_usd(price.storage),
        fee_usd_h=as_usd(price.fee),
        fee_multiplier=price.fee_ppm / 1_000_000,
        upload_usd_h=as_usd(price.upload),
        restore_usd_h=as_usd(price.restore),
        total_usd_h=as_usd(price.total),
        per_gpu_usd_h=as_usd(price.per_gpu),
    )


def quote_response(quote: Quote, ceiling: MicroUsdPerGpuHour | None, blocked: str, headroom_ppm: int) -> QuoteResponse:
    """`blocked` names what besides the price speaks against it."""
    offer, price = quote.offer, quote.price
    floor, bid = _bids(quote, ceiling, headroom_ppm)
    if blocked:
        verdict = blocked
    elif ceiling is None:
        verdict = "no ceiling applies to this GPU"
    elif price.per_gpu > ceiling:
        verdict = "above the ceiling"
    else:
        verdict = "ok"
    return QuoteResponse(
        provider=offer.provider,
        offer=offer.offer_id,
        host=offer.host_id or offer.offer_id,
        region=offer.region,
        market=market_word(quote),
        interruption=offer.interruption.value,
        gpu=offer.gpu,
        gpu_count=offer.gpu_count,
        nodes=offer.nodes,
        gpu_vram_gb=None if offer.gpu_vram_mb is None else round(offer.gpu_vram_mb / 1000, 1),
        reliability=offer.reliability,
        effective_usd_h=as_usd(price.total),
        effective_usd_gpu_h=as_usd(price.per_gpu),
        floor_usd_gpu_h=usd(floor),
        bid_usd_gpu_h=usd(bid),
        on_demand_usd_h=usd(quote.on_demand),
        ceiling_usd_gpu_h=usd(ceiling),
        fits=verdict == "ok",
        verdict=verdict,
        breakdown=breakdown_response(price),
        at=utc_text(quote.at),
    )


def _bids(quote: Quote, ceiling: MicroUsdPerGpuHour | None, headroom_ppm: int) -> tuple[int | None, int | None]:
    """Return the prices per GPU at the lowest bid that wins, and at the bid that was placed or would be."""
    offer = quote.offer
    if not offer.pays_bid:
        return None, None
    floor = repriced(quote, offer.gpu_price).price.per_gpu
    placed = quote.price.gpu
    if placed <= offer.gpu_price:
        most = usual_bid(offer, headroom_ppm)
        placed = most if ceiling is None else max(offer.gpu_price, min(most, gpu_price_limit(quote, ceiling)))
    return floor, repriced(quote, placed).price.per_gpu


def poll_response(provider_offers: ProviderOffers, note: str) -> PollResponse:
    return PollResponse(
        provider=provider_offers.provider,
        offers=provider_offers.offer_index.size,
        at=instant(provider_offers.at),
        error=provider_offers.error,
        note=note,
    )


def offers_responses(market: MarketSnapshot, notes: Mapping[ProviderName, str] | None = None) -> list[PollResponse]:
    known = notes or {}
    return [poll_response(market.by_provider[name], known.get(name, "")) for name in sorted(market.by_provider)]


def passed_over_responses(rows: Iterable[tuple[str, int]]) -> list[PassedOverResponse]:
    ordered = sorted(rows, key=lambda row: (-row[1], row[0]))
    return [PassedOverResponse(reason=reason, offers=count) for reason, count in ordered]


def run_words(spec: JobSpec) -> str:
    if spec.run[:2] == SHELL and len(spec.run) == 3:
        return spec.run[2]
    return shlex.join(spec.run)

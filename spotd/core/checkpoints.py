"""Which checkpoints of a job are kept, decided on the world alone.

Theory. The list of a job's accepted checkpoints is what may be restored, and the only promise about what the store
still holds: objects are deleted only after they were taken off the list, durably, and only if nothing on the list needs
them. An attempt may restore what the list held before it was intended, and then refers to chunks of that checkpoint
for as long as its machine exists. What it may have been offered therefore stays on the list until it has ended:
the newest few of the attempts before it, which no later event can change, since only one attempt counts at a time.

Beside the newest, the list keeps what its owner pinned, where the job names a metric the checkpoint that is best by it,
and of earlier attempts what no later one has made needless (`spotd.core.domain.lineage`). All of it follows from the
list itself, so that every rule here stays a function of the job and its open attempts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain import lineage
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import OF_ANOTHER_JOB, Checkpoint, FailedRestore, Job, Outputs
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.experience import PPM, Hazards
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import machine_words, own_interval, span_words
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, is_admissible
from spotd.core.ranking.cost_words import evidence_words
from spotd.core.ranking.remaining_work import remaining_on
from spotd_jobs.spec.model import JobSpec, MarketChoice, MetricBest
from spotd_providers.contract.values import Interruption, Offer

FALLBACKS: Final = lineage.CHOICES
DROPPED_SAID_MAX: Final = 10
"""More than so many that go at once are reported in one line."""
REMEMBERED: Final = 50
"""How many checkpoints one attempt can have on the list: how many a host publishes is its own choice."""


def offered(job: Job) -> tuple[Checkpoint, ...]:
    """Return what a grant that is written now may offer, first choice first."""
    order = lineage.restore_order(job.checkpoints, lineage.doubts_allowed(job))
    return tuple(order[: _depth(job)])


def with_fresh(job: Job, attempt: int, fresh: Collection[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the list with what this attempt, the newest, has published since, oldest of the fresh ones first."""
    own = [c for c in job.checkpoints if c.attempt == attempt]
    others = [c for c in job.checkpoints if c.attempt != attempt]
    newest = [*reversed([*fresh]), *own]
    bound = max(REMEMBERED, job.spec.checkpoint.keep)
    best = best_of(job, (*newest, *others))
    return (*newest[:bound], *(c for c in newest[bound:] if c.pinned or c == best), *others)


def with_older(job: Job, older: Iterable[tuple[Checkpoint, str]]) -> tuple[Checkpoint, ...]:
    """Return the list with what was found late, each behind the next newer one: a fallback, and never the first choice.

    What stands behind one that is no longer on the list is of no use any more.
    """
    found = list(job.checkpoints)
    bound = max(REMEMBERED, job.spec.checkpoint.keep)
    for one, newer in older:
        own = [c.manifest_key for c in found if c.attempt == one.attempt]
        if one.manifest_key in own or newer not in own or len(own) >= bound:
            continue
        place = next(n for n, c in enumerate(found) if c.attempt == one.attempt and c.manifest_key == newer)
        found.insert(place + 1, one)
    return tuple(found)


def kept(job: Job, open_attempts: Collection[int]) -> tuple[Checkpoint, ...]:
    """Return what stays on the list while these attempts of the job have not ended."""
    best = best_of(job, job.checkpoints)
    newest = job.checkpoints[: job.spec.checkpoint.keep]
    chosen = {*newest, *in_reach(job, open_attempts), *lineage.earlier_kept(job.checkpoints)}
    return tuple(c for c in job.checkpoints if c in chosen or c.pinned or c == best)


def in_reach(job: Job, open_attempts: Collection[int]) -> frozenset[Checkpoint]:
    """Return what a machine of one of these attempts may read: not even its owner may take it away."""
    depth = _depth(job)
    reach = set(job.checkpoints[:depth] if open_attempts else ())
    # How many doubts were allowed when a grant was written is not known any more: it was one of these.
    for allowed in (1, lineage.DOUBTS):
        for number in open_attempts:
            order = lineage.restore_order(job.checkpoints, allowed, before=number)
            reach.update(order[:depth])
        if open_attempts:
            reach.update(lineage.restore_order(job.checkpoints, allowed)[:depth])
    return frozenset(reach)


def best_of(job: Job, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the one with the best value of the job's metric, the newest of several; `None` where none has one."""
    rules = job.spec.checkpoint
    measured = [] if rules.metric is None else [(c.metric, c) for c in checkpoints if c.metric is not None]
    if not measured:
        return None
    pick = min if rules.best is MetricBest.LOWEST else max
    return pick(measured, key=lambda pair: pair[0])[1]


def trim(world: World, others: Iterable[Job], now: datetime) -> Plan:
    """No job's list holds more than is kept.

    Args:
        others: jobs that are over and may no longer be part of the world; one that is, is taken from there.
    """
    jobs = {job.id: job for job in others} | dict(world.jobs)
    builder = PlanBuilder(replace(world, jobs=jobs), now)
    for job in jobs.values():
        stay = kept(job, open_numbers(world, job))
        if len(stay) == len(job.checkpoints):
            continue
        builder.put_job(replace(job, checkpoints=stay))
        dropped = [checkpoint for checkpoint in job.checkpoints if checkpoint not in stay]
        if len(dropped) > DROPPED_SAID_MAX:
            builder.event(
                "checkpoint.dropped",
                f"deleted {len(dropped)} old checkpoints (keeping {len(stay)})",
                job=job.id,
                count=len(dropped),
                bytes=sum(checkpoint.bytes for checkpoint in dropped),
            )
            continue
        for checkpoint in dropped:
            builder.event(
                "checkpoint.dropped",
                f"deleted old checkpoint {checkpoint.name} (keeping {len(stay)})",
                job=job.id,
                name=checkpoint.name,
                step=checkpoint.step,
                bytes=checkpoint.bytes,
                of_attempt=checkpoint.attempt,
            )
    return builder.plan()


def note_fallbacks(builder: PlanBuilder, attempt: AttemptId, fallbacks: Iterable[FailedRestore]) -> None:
    """Record in the job's history, and by it in the receipt, what could not be resumed from, and why."""
    for one in fallbacks:
        after = "starting afresh" if one.next is None else f"falling back to {one.next}"
        builder.event(
            "checkpoint.fallback",
            f"checkpoint {one.name} could not be restored ({one.reason}): {after}",
            attempt=attempt,
            name=one.name,
            reason=one.reason,
            next=one.next,
        )


def passed_over(world: World, attempt: AttemptId, fallbacks: Iterable[FailedRestore], now: datetime) -> Plan:
    """Record what could not even be offered to the attempt's host."""
    builder = PlanBuilder(world, now)
    note_fallbacks(builder, attempt, fallbacks)
    return builder.plan()


def open_numbers(world: World, job: Job) -> frozenset[int]:
    """Return the attempts of this job that have not ended, so that a machine of theirs may still read and write."""
    return frozenset(attempt.id.number for attempt in world.attempts_of(job.id))


def _depth(job: Job) -> int:
    return max(FALLBACKS, job.spec.checkpoint.keep)


# What a user does with the checkpoints of a job: name one, pin it, remove it, begin another job from it.
#
# A name alone means the newest checkpoint of that name, since a later attempt may write a name again; `NAME@ATTEMPT`
# means that attempt's. `newest` and `best` mean what they say, unless a checkpoint is called so.


NEWEST: Final = "newest"
BEST: Final = "best"


def find_checkpoint(job: Job, checkpoints: Sequence[Checkpoint], text: str) -> Checkpoint | None:
    """Return the one of these, newest first, that the text means."""
    name, sign, attempt = text.rpartition("@")
    for one in checkpoints:
        if text == one.name or (sign and name == one.name and attempt == str(one.attempt)):
            return one
    if text == NEWEST:
        return checkpoints[0] if checkpoints else None
    return best_of(job, checkpoints) if text == BEST else None


def borrowed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same content, as the list of another job names it."""
    return replace(checkpoint, attempt=OF_ANOTHER_JOB, pinned=False, proven_by=None, doubted_by=())


def pin(world: World, job: Job, chosen: Collection[Checkpoint], now: datetime, *, pinned: bool) -> Plan:
    """Keep these on the list until they are unpinned; or let nothing but the rules of the job keep them any more."""
    builder = PlanBuilder(world.with_job(job), now)
    changed = [c for c in chosen if c.pinned is not pinned]
    if not changed:
        return builder.plan()
    builder.put_job(
        replace(job, checkpoints=tuple(replace(c, pinned=pinned) if c in changed else c for c in job.checkpoints))
    )
    for one in changed:
        kind, words = (
            ("checkpoint.pinned", "is pinned") if pinned else ("checkpoint.unpinned", "is not pinned any more")
        )
        builder.event(kind, f"checkpoint {one.name} {words}", job=job.id, name=one.name, of_attempt=one.attempt)
    return builder.plan()


def remove(world: World, job: Job, chosen: Collection[Checkpoint], now: datetime) -> Plan:
    """Take these off the list: the job never resumes from them, and what only they need is deleted soon."""
    builder = PlanBuilder(world.with_job(job), now)
    builder.put_job(replace(job, checkpoints=tuple(c for c in job.checkpoints if c not in chosen)))
    for one in chosen:
        builder.event(
            "checkpoint.removed",
            f"checkpoint {one.name} was removed by the job's owner",
            job=job.id,
            name=one.name,
            step=one.step,
            bytes=one.bytes,
            of_attempt=one.attempt,
        )
    return builder.plan()


def damaged(world: World, job: Job, checkpoint: Checkpoint, problem: str, now: datetime) -> Plan:
    """Record in the job's history that a checkpoint was found damaged."""
    builder = PlanBuilder(world.with_job(job), now)
    builder.event(
        "checkpoint.damaged",
        f"checkpoint {checkpoint.name} is damaged in the store: {problem}",
        job=job.id,
        name=checkpoint.name,
        of_attempt=checkpoint.attempt,
    )
    return builder.plan()


# How often a job should save: the interval of Young and Daly, from the time that a save takes and the hazard.
#
# Theory. Saving takes time C each time, and a loss repeats what was done since the last save. With a mean time M = 1/h
# between losses the best interval is, to first order (Young 1974), sqrt(2 C M), and with Daly's higher order
# (2006)
#
#     sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C     for C < 2 M, else M
#
# The prior of a loss in a usual stay is no more than that: where machines were lost in minutes, the hazard that those
# losses prove by themselves (`Hazards.proved_of`) counts.
#
# The hazard falls with the age of a machine: `AGES` states by how much in recorded traces of spot machines, relative
# to the mean over the first six hours. For an attempt that begins, the mean over a usual stay counts; what a running
# one is advised follows its age. C is what the host states its uploads to take, which is more than the job stands
# still, and so an upper bound: a job is never advised to save more often than every 20 C, an overhead of five
# percent, nor more seldom than every hour; where 20 C is more than an hour, every hour, and never before the last
# upload is over. A job that was seen to save more often by itself has shown that it costs it less than C, and is not
# advised to save less often.
#
# C is a host's word, held to `SAVE_TIME_MAX`; a wrong one moves the advice between its bounds and does nothing else.


LEAST_SAVES: Final = 20
"""An interval is at least so many times what a save takes."""
INTERVAL_MAX: Final = timedelta(hours=1)
INTERVAL_MIN: Final = timedelta(seconds=10)
SAVE_TIME_MAX: Final = timedelta(hours=1)
AGES: Final = (
    (timedelta(minutes=15), 4.2),
    (timedelta(minutes=30), 3.8),
    (timedelta(hours=1), 1.9),
    (timedelta(hours=2), 1.1),
    (timedelta(hours=4), 0.59),
    (timedelta(hours=8), 0.38),
)
"""Up to which age of a machine its hazard is how many times the mean; the means of recorded traces of three clouds."""
OLD: Final = 0.27
_SECOND: Final = timedelta(seconds=1)


def prior_hazard_ppm(policy: Policy) -> int:
    """Return the losses in a million hours of a spot machine of which nothing is known: one in a usual stay."""
    stay = max(policy.expected_stay, timedelta(minutes=1))
    return math.ceil(PPM * (timedelta(hours=1) / stay))


def hazard_at(hazard_ppm: int, age: timedelta) -> int:
    """Return the hazard of a machine of this age, given the mean over a usual stay."""
    factor = next((factor for limit, factor in AGES if age < limit), OLD)
    return round(hazard_ppm * factor)


def advised_interval(save_time: timedelta | None, hazard_ppm: int) -> timedelta | None:
    """Return how often to save; `None` where it is not known how long a save takes."""
    if save_time is None:
        return None
    cost = min(max(save_time, timedelta(0)), SAVE_TIME_MAX)
    best = INTERVAL_MAX
    if hazard_ppm > 0:
        best = timedelta(seconds=min(_daly(cost / _SECOND, 3600 * PPM / hazard_ppm), INTERVAL_MAX / _SECOND))
    bounded = min(INTERVAL_MAX, max(best, LEAST_SAVES * cost, INTERVAL_MIN))
    return timedelta(seconds=round(max(bounded, cost) / _SECOND))


def save_interval(job: Job, hazard_ppm: int) -> timedelta | None:
    """Return how often this job should save: as advised, or as it was seen to do by itself where that is more often."""
    advised, own = advised_interval(job.save_time, hazard_ppm), _shown_interval(job)
    return advised if advised is None or own is None else min(advised, own)


def expected_hazard(offer: Offer, hazards: Hazards) -> int:
    """Return the hazard for which a job on this offer should save: what is expected, or more where that is proved."""
    return max(hazards.of(offer), hazards.proved_of(offer))


def hazards_with_prior(world: World, now: datetime) -> Hazards:
    """Return the losses that are to be expected of offers, where nothing is known a prior."""
    return Hazards(world.experience, now, world.attempts.values(), prior_ppm=prior_hazard_ppm(world.policy))


def advice_at_launch(job: Job, offer: Offer, world: World, now: datetime) -> timedelta | None:
    """Return how often an attempt on this offer is advised to save, where its owner states nothing."""
    if job.spec.checkpoint.every is not None or job.save_time is None:
        return None
    return save_interval(job, expected_hazard(offer, hazards_with_prior(world, now)))


def advice_words(job: Job, item: Attempt | None, world: World, now: datetime) -> str:
    """Return how often the job should save and why, in a sentence; empty where nothing is known of its saves."""
    if job.save_time is None:
        return ""
    offer = None if item is None else item.quote.offer
    hazard = prior_hazard_ppm(world.policy)
    if offer is not None:
        hazard = expected_hazard(offer, hazards_with_prior(world, now))
    advised, own = advised_interval(job.save_time, hazard), _shown_interval(job)
    if advised is None:
        return ""
    losses = f"a preemption every {_between_losses(hazard)} is expected" if hazard else "no preemption is expected"
    words = f"a save takes {span_words(job.save_time)} and {losses}: "
    if own is not None and own < advised:
        words += f"it saves every {span_words(own)} by itself, which is often enough"
        advised = own
    else:
        words += f"saving every {span_words(advised)} costs least"
    if item is not None and item.launched_at is not None:
        age = max(timedelta(0), now - item.launched_at)
        at_age = save_interval(job, hazard_at(hazard, age))
        if at_age is not None and at_age != advised:
            words += f", and every {span_words(at_age)} while its machine is {span_words(age)} old"
    if job.spec.checkpoint.every is not None:
        return f"{words}; the job states every {span_words(job.spec.checkpoint.every)}"
    if item is not None and item.save_every is not None:
        words += f"; SPOTD_CHECKPOINT_INTERVAL_S is {item.save_every.total_seconds():.0f} on this machine"
    return words


def _shown_interval(job: Job) -> timedelta | None:
    """Return how often the job was seen to save; `None` where that is not known, or the host's clock stands."""
    own = own_interval(job)
    return None if own is None or own <= timedelta(0) else timedelta(seconds=max(1, round(own / _SECOND)))


def _between_losses(hazard_ppm: int) -> str:
    hours = PPM / hazard_ppm
    return f"{hours:.1f} h" if hours >= 1 else span_words(timedelta(hours=hours))


def _daly(cost_s: float, mean_s: float) -> float:
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = cost_s / (2 * mean_s)
    return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def with_save_time(job: Job, stated: timedelta | None) -> Job:
    """Return the job with what its host states a save to take; a fourth of each new figure counts."""
    if stated is None:
        return job
    held = min(max(stated, timedelta(0)), SAVE_TIME_MAX)
    mean = held if job.save_time is None else (3 * job.save_time + held) / 4
    return job if mean == job.save_time else replace(job, save_time=mean)


def states_checkpoints(spec: JobSpec) -> bool:
    """Whether anything in the job file says that the job saves.

    That is `[checkpoint] path`, `every` or `metric`, or the name of the checkpoint folder's variable in `run`, `setup`
    or `env`. A program that reads the variable itself says nothing; one line `every = "15m"` does.
    """
    rules = spec.checkpoint
    texts = (*spec.run, spec.setup or "", *(value for _, value in spec.env))
    return (
        rules.path is not None
        or rules.every is not None
        or rules.metric is not None
        or any("SPOTD_CHECKPOINT_DIR" in text for text in texts)
    )


# Which outputs are a job's: those of the attempt that ended well, as they were when its end was read.


def pin_outputs(builder: PlanBuilder, attempt: AttemptId, report: HostStatus) -> Outputs:
    """Record on the job which manifest its outputs are, and what of them is not there."""
    job = builder.job(attempt.job)
    problem = report.outputs_problem
    if report.outputs_sha256 is None and not job.spec.outputs and not report.outputs_lost:
        problem = ""  # none were asked for
    outputs = Outputs(attempt=attempt.number, sha256=report.outputs_sha256, bytes=report.outputs_bytes, problem=problem)
    builder.put_job(replace(job, outputs=outputs))
    return outputs


def note_outputs(builder: PlanBuilder, attempt: AttemptId, outputs: Outputs) -> None:
    """Say in the job's history, and in its reason, what of the outputs is missing."""
    job = builder.job(attempt.job)
    if outputs.sha256 is not None:
        builder.event(
            "outputs.stored", f"{outputs.bytes} bytes of outputs are stored", attempt=attempt, bytes=outputs.bytes
        )
    if outputs.problem:
        sentence = outputs_warning(outputs)
        builder.event("outputs.missing", sentence, attempt=attempt, problem=outputs.problem)
        builder.put_job(replace(job, reason=f"{job.reason}; {sentence}"))


def outputs_warning(outputs: Outputs | None) -> str:
    """Return what a user has to know about the outputs of a job, empty where all is well."""
    if outputs is None or not outputs.problem:
        return ""
    missing = "some" if outputs.sha256 is not None else "none"
    return f"{missing} of its outputs {'are missing' if missing == 'some' else 'is stored'}: {outputs.problem}"


# Spot jobs that would lose everything: longer than a machine lasts in the mean, and without any checkpoint.


_HOUR = timedelta(hours=1)


def unprotected_words(job: Job, world: World, market: MarketSnapshot, now: datetime) -> str:
    """Return why the job would hardly finish on what it would be given now; empty where it may.

    Nothing is said of a job whose length is not known, that saves, or that would get a machine that is not taken back.
    """
    if job.checkpoints or states_checkpoints(job.spec):
        return ""
    job, catalogue = _on_first_market(job), CandidateCatalogue(world, market, now)
    offers = catalogue.list_for(catalogue.key_of(job))
    for quote in catalogue.ranked(offers):
        offer = quote.offer
        kind = (offer.gpu, offer.gpu_count)
        ceiling = ceiling_for(*kind, job.spec.price, world.policy)
        if not is_admissible(quote, ceiling, job.spec.price):
            continue
        length = remaining_on(job, *kind)
        if length is None or offer.interruption is Interruption.NEVER:
            return ""
        hazards = hazards_with_prior(world, now)
        hazard = hazards.of(offer)
        if hazard <= 0 or length <= _HOUR * PPM / hazard:
            return ""
        count, span = hazards.evidence_of(offer)
        return (
            f"{job.name} would run {length / _HOUR:.1f} h on {machine_words(*kind)} at {offer.provider}, where"
            f" a spot machine is preempted every {PPM / hazard:.1f} h in the mean"
            f"{evidence_words(count, span, 'preemptions')}, and nothing in the job says that it saves: each preemption"
            " would begin it anew"
        )
    return ""


def _on_first_market(job: Job) -> Job:
    """Return the job as it is placed at first: on spot alone where it waits for that before it takes on-demand."""
    resources = job.spec.resources
    if resources.on_demand_after is None:
        return job
    return replace(job, spec=replace(job.spec, resources=replace(resources, market=MarketChoice.SPOT)))


HINT = (
    'let it save to $SPOTD_CHECKPOINT_DIR and state [checkpoint] every = "15m", or give --market on-demand,'
    " or --i-know to submit it all the same"
)

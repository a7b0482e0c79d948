"""When something that was refused may be tried again: after its time, or once its cause is seen to be over.

A cause that can be asked about ends a cool-down early. A first refusal is then repeated at once; what is refused again
although its cause seemed to be over is left alone for a while, which doubles each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, assert_never

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.domain.market import ProviderOffers
from spotd.core.domain.policy import ProviderPolicy
from spotd.core.domain.states import Counted, EndReason, JobState
from spotd_providers.contract.values import Market, Offer, OfferId, ProviderName

# What an attempt that came to nothing costs its job: when it is tried again, and when it is given up.
#
# Theory. Every launch costs calls, and most cost money, so a job that gets nowhere must ask less and less often. Two
# counts are kept on the job. `idle_launches` counts launches in a row without progress, whatever was to blame; the
# first few are repeated at once, since the next offer may be better, and then the pause doubles, for longer where a
# machine was bought and lost. However many they are, they end no job: a preemption is not its fault. `failed_starts`
# counts those of them that may be the job's own fault (its image, its code, its secrets, its disk, or a command that
# kills the machine): each is followed by a pause, and after `[retry] starts` of them the job has failed. Progress
# resets both: a new checkpoint, or a command that ran for a while. A job that saved before is known to start, so
# machines that never give a sign of life more likely cannot write to the store: several times as many of those are
# accepted, and they are counted apart from the others.
#
# What is the host's, the offer's, the pool's, the account's or the provider's fault cools those down instead; see
# `outcomes` and `PlanBuilder`.


RAN_FOR_A_WHILE: Final = timedelta(minutes=5)
"""A command that ran so long did start."""
GOT_SOMEWHERE: Final = timedelta(minutes=30)
"""A machine that ran so long was worth its launch, even without a checkpoint."""
MUTE_FACTOR: Final = 4
"""How many times more starts may fail of a job that has saved before, where the machine gave no sign of life."""
TRIES_AT_ONCE: Final = 3
RETRY_FIRST: Final = timedelta(seconds=5)
RETRY_MAX: Final = timedelta(minutes=2)
BOUGHT_MAX: Final = timedelta(minutes=6)
"""The same where a machine was bought and billed, whatever took it: a market that takes each one soon is left alone."""
FAULT_FIRST: Final = timedelta(seconds=5)
FAULT_MAX: Final = timedelta(minutes=10)
AWAY_FIRST: Final = timedelta(minutes=2)
AWAY_MAX: Final = timedelta(hours=1)
"""Where the place of its data does not answer: each machine that waits for it is billed for minutes."""
LAUNCHES_PER_HOUR_MAX: Final = 40
"""No job is launched more often within any hour without progress; follows from the pauses above."""
BOUGHT_PER_HOUR_MAX: Final = 12
"""No job has more machines in any hour but the first that are lost without progress; follows from `BOUGHT_MAX`."""
_DOUBLINGS_MAX: Final = 20


def pool_subject(offer: Offer) -> str:
    """Name what cools down where an offer finds no place: several machines may lack it at once where one has it."""
    return str(offer.pool) if offer.nodes == 1 else f"{at_once_words(offer.nodes)}{offer.pool}"


def at_once_words(nodes: int) -> str:
    """Return how the name begins of what cools down for so many machines at once."""
    return f"{nodes} at once of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """The job's counts after an attempt, when it may be launched again, and whether it is given up."""

    idle_launches: int
    failed_starts: int
    not_before: datetime | None
    gives_up: bool = False
    mute_starts: int = 0


def doubled(first: timedelta, times: int, longest: timedelta) -> timedelta:
    """Return a pause that doubles so many times, up to a longest."""
    factor: int = 2 ** max(0, min(times, _DOUBLINGS_MAX))
    return min(longest, first * factor)


def did_start(item: Attempt, job: Job, now: datetime) -> bool:
    """Whether the command ran for a while or saved something."""
    return item.command_time(now) >= RAN_FOR_A_WHILE or has_saved(item, job)


def got_somewhere(item: Attempt, job: Job, now: datetime) -> bool:
    """Whether the machine was worth its launch: the job has a checkpoint of it, or its command ran for long enough."""
    return has_saved(item, job) or item.command_time(now) >= GOT_SOMEWHERE


def has_saved(item: Attempt, job: Job) -> bool:
    """Whether the attempt has written a checkpoint that the job still has."""
    return bool(job.saved_by(item.id.number))


def is_failed_start(item: Attempt, reason: EndReason) -> bool:
    """Whether this end may be the job's own fault: not of a machine that neither its provider nor its host ever showed.

    There may have been none: the answer to its launch was lost, and its provider has been away since.
    """
    was_there = item.launched_at is not None or item.heartbeat_seen_at is not None
    return reason.traits.is_failed_start and (was_there or reason.traits.counted is not Counted.SILENT_START)


def setback(job: Job, item: Attempt, reason: EndReason, now: datetime) -> Setback:
    """Return what follows for the job from this end of its newest attempt."""
    traits = reason.traits
    if traits.counted is Counted.NOTHING:
        return Setback(idle_launches=job.idle_launches, failed_starts=job.failed_starts, not_before=None)
    is_further = got_somewhere(item, job, now)
    idle = 0 if is_further else job.idle_launches + 1
    has_failed = is_failed_start(item, reason)
    starts = 0 if did_start(item, job, now) else job.failed_starts + int(has_failed)
    is_mute = has_failed and is_mute_start(item, job, reason)
    mute = (job.mute_starts or 0) + is_mute if starts else 0
    most = job.spec.retry_starts
    faults = starts if has_failed else job.errors + 1 if traits.counted is Counted.ERROR else 0
    pause = doubled(AWAY_FIRST, idle - 1, AWAY_MAX) if traits.counted is Counted.AWAY and idle else timedelta(0)
    if not is_further and faults > 0:
        pause = doubled(FAULT_FIRST, faults - 1, FAULT_MAX)
    if idle > TRIES_AT_ONCE:
        longest = RETRY_MAX if item.launched_at is None else BOUGHT_MAX
        pause = max(pause, doubled(RETRY_FIRST, idle - TRIES_AT_ONCE - 1, longest))
    return Setback(
        idle_launches=idle,
        failed_starts=starts,
        not_before=now + pause if pause else None,
        gives_up=has_failed and (starts >= MUTE_FACTOR * most or (not is_mute and starts - mute >= most)),
        mute_starts=mute,
    )


def pacing_after(job: Job, item: Attempt, now: datetime) -> Pacing:
    """Return what the job remembers of its pace once this attempt has ended: progress ends what it waited for.

    Progress on a rented machine does not begin the wait for own machines anew: in a market that takes machines back
    every hour that would cost the wait each time.
    """
    pacing = job.pacing
    if not pacing.waits or not got_somewhere(item, job, now):
        return pacing
    own_wanted_since = None if item.quote.is_own else pacing.own_wanted_since
    return replace(pacing, spot_wanted_since=None, spot_waited=None, own_wanted_since=own_wanted_since)


def words_of_setback(back: Setback) -> str:
    """Why the job is not tried again at once although the last machine's end is not its fault; mostly empty."""
    if back.not_before is None or back.idle_launches <= TRIES_AT_ONCE:
        return ""
    return f"; {back.idle_launches} launches in a row came to nothing"


STARTS_FAILED: Final = "starts in a row failed"


def words_of_giving_up(job: Job, back: Setback) -> str:
    """Which bound ended the job: of a job that has saved before, more starts without a word may fail than of others."""
    allowed, starts = job.spec.retry_starts, back.failed_starts
    if starts < MUTE_FACTOR * allowed:
        beside = f", beside {back.mute_starts} without a sign of life" if back.mute_starts else ""
        return f"; {starts - back.mute_starts} {STARTS_FAILED}{beside}, [retry] starts allows {allowed}"
    return f"; {starts} {STARTS_FAILED}, {MUTE_FACTOR} times [retry] starts, which is {allowed}"


def is_mute_start(item: Attempt, job: Job, reason: EndReason) -> bool:
    """Whether its host never gave a sign of life, and the job is known to start since it has saved."""
    return reason.traits.counted is Counted.SILENT_START and item.heartbeat_seen_at is None and bool(job.checkpoints)


def wait_for_cause(
    job: Job, item: Attempt, reason: EndReason, back: Setback, rules: ProviderPolicy | None
) -> timedelta:
    """How long the job waits before it fails for a spot machine that may have been taken back.

    Once; of a job that has saved, whose bound is another one where the host never spoke, up to that other bound.
    """
    most = job.spec.retry_starts * MUTE_FACTOR
    is_first = back.failed_starts == job.spec.retry_starts or bool(job.checkpoints and back.failed_starts <= most)
    is_unexplained = reason is EndReason.HOST_LOST and item.stop is None and item.phase != "done"
    may_be_taken = is_unexplained and item.quote.offer.market is Market.SPOT
    return rules.causes_within if rules is not None and is_first and may_be_taken else timedelta(0)


def may_wait_for_cause(job: Job, now: datetime) -> bool:
    """Whether the job waits after failed starts, so that a late cause of the last one is of use."""
    is_lost = job.state is JobState.RECOVERING and job.failed_starts > 0
    return is_lost and job.not_before is not None and job.not_before > now


def pause_left(job: Job, now: datetime, longest: timedelta) -> timedelta:
    """How long the job still waits before it is launched again.

    An instant further ahead than any pause can be was written by a clock that ran ahead, and is not waited for.
    """
    if job.not_before is None or job.not_before - now > max(FAULT_MAX, AWAY_MAX, longest):
        return timedelta(0)
    return max(timedelta(0), job.not_before - now)


SHOWN_FIRST: Final = timedelta(seconds=5)
SHOWN_MAX: Final = timedelta(minutes=5)
LAG_MAX: Final = timedelta(minutes=10)
"""For so long after an account was filled its provider may refuse launches all the same."""
LAG_FIRST: Final = timedelta(seconds=15)
PRESSED_FIRST: Final = timedelta(minutes=3)
"""A lost host is left alone at least so long, and twice as long each time in a row, whatever a deadline needs."""
COOLDOWNS_REMEMBERED: Final = timedelta(hours=1)
"""After its end: what is refused again soon cools down for longer."""


class CooldownScope(StrEnum):
    HOST = "host"
    POOL = "pool"
    QUOTA = "quota"
    """A limit of the account at the provider, shared by many offers."""
    OFFER = "offer"
    PROVIDER = "provider"
    STORE = "store"
    """No launch can be prepared anywhere, since the checkpoint store takes no grant."""
    TARGET = "target"
    """A machine for which a healthy one was stopped, and that could not be had; others may be launched there."""
    BID = "bid"
    """A bid for a machine of ours that is gone, by host: its host may go on stating it as the lowest that wins."""
    JOB = "job"
    """A market of a provider for one job, which it refused again and again, or an offer that cannot do what it asks."""
    BUDGET = "budget"
    """A budget of all jobs together is used up for its day or month."""


REFUSED_AT_ONCE: Final = 10
"""So many launches in a row a market of a provider may refuse one job before it is left alone by that job."""
UNABLE_AT_ONCE: Final = 3
"""So many offers of a market may be unable to do what one job asks before that job leaves the others alone, too."""
REFUSED_FIRST: Final = timedelta(minutes=4)
REFUSED_MAX: Final = timedelta(minutes=20)
REFUSED_IN_A_ROW: Final = COOLDOWNS_REMEMBERED
"""Refusals of one job follow each other ever more slowly, and are counted together for so long after a pause."""
ECHO_LASTS: Final = timedelta(hours=1)
"""What a host states as its lowest winning bid is up to so old."""
ECHOES_MAX: Final = 12
"""Of the bids for one machine that is gone, so many of the newest are remembered for `ECHO_LASTS`."""
EVERYWHERE: Final = ProviderName("")
"""The provider of a cool-down that concerns all of them."""


def refusal_subject(job: JobId, market: Market) -> str:
    """Return what names a market of a provider for one job, which refuses it."""
    return f"{job} {market.value}"


def unable_subject(job: JobId, market: Market, offer: OfferId | None = None) -> str:
    """Return what names a market that cannot do what one job asks, or one offer of it."""
    return f"{job} {market.value} unable" + ("" if offer is None else f": {offer}")


def bid_subject(host: str, gpus: int, bid: int) -> str:
    """Return what names a bid for a machine of so many GPUs of a host."""
    return f"{host} {gpus} {bid}"


def bids_by_host(cooldowns: Iterable[Cooldown], now: datetime) -> dict[tuple[ProviderName, str], list[tuple[int, int]]]:
    """Return by host the bids for machines that are gone and may still be stated, each with its number of GPUs."""
    found: dict[tuple[ProviderName, str], list[tuple[int, int]]] = {}
    for one in cooldowns:
        if one.scope is CooldownScope.BID and one.until > now:
            host, gpus, bid = one.subject.rsplit(" ", 2)
            found.setdefault((one.provider, host), []).append((int(gpus), int(bid)))
    return found


class CooldownEnd(StrEnum):
    """What ends a cool-down before its time.

    TIME: nothing. SHOWN: a list of offers that was asked for after the refusal and shows the offer again. CREDIT: the
    account's balance rose. KEY: the provider took the key again. DEADLINE: one that nothing else can meet.
    """

    TIME = "time"
    SHOWN = "shown"
    CREDIT = "credit"
    KEY = "key"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """Something not to be bought before `until`, or before what ended it is known.

    Attributes:
        since: when it was refused last; `None` in rows of an older spotd.
        strikes: how often in a row it had been refused before.
    """

    provider: ProviderName
    scope: CooldownScope
    subject: str
    until: datetime
    reason: str
    since: datetime | None = None
    strikes: int = 0
    ends: CooldownEnd = CooldownEnd.TIME


def is_remembered(cooldown: Cooldown, now: datetime) -> bool:
    """Whether anything may still ask for it: each ended machine leaves its bids, which are never refused again."""
    after = timedelta(0) if cooldown.scope is CooldownScope.BID else COOLDOWNS_REMEMBERED
    return cooldown.until + after > now


def cooling_until(cooldown: Cooldown, provider_offers: ProviderOffers | None) -> datetime:
    """Return the end of a cool-down, as far as what is known of its provider can bring it nearer."""
    since = cooldown.since
    if since is None or provider_offers is None:
        return cooldown.until
    match cooldown.ends:
        case CooldownEnd.TIME | CooldownEnd.DEADLINE:
            return cooldown.until
        case CooldownEnd.SHOWN:
            # An offer that is on no list is not bought anyway.
            again = cooldown.strikes > 0
            pause = doubled(SHOWN_FIRST, cooldown.strikes - 1, SHOWN_MAX) if again else timedelta(0)
            seen_at = provider_offers.at
        case CooldownEnd.CREDIT:
            pause, seen_at = timedelta(0), provider_offers.credit_at
        case CooldownEnd.KEY:
            pause, seen_at = timedelta(0), provider_offers.key_at
        case _:
            assert_never(cooldown.ends)
    if seen_at is None:
        return cooldown.until
    if seen_at > since:
        return min(cooldown.until, since + pause)
    if cooldown.ends is CooldownEnd.CREDIT and since - seen_at <= LAG_MAX:
        # Its launches lag behind what it states of the account: each pause is as long as the lag has lasted.
        return min(cooldown.until, since + max(LAG_FIRST, since - seen_at))
    return cooldown.until


def pressed_until(cooldown: Cooldown) -> datetime:
    """Return the end of a cool-down for a job whose deadline nothing else can meet."""
    if cooldown.ends is not CooldownEnd.DEADLINE or cooldown.since is None:
        return cooldown.until
    return min(
        cooldown.until, cooldown.since + doubled(PRESSED_FIRST, cooldown.strikes, cooldown.until - cooldown.since)
    )


UNABLE_FIRST: Final = timedelta(hours=1)
UNABLE_MAX: Final = timedelta(hours=6)
"""An offer that cannot do what a job asks is left alone for so long, and longer than its market."""

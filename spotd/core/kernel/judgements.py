"""What follows for an attempt from its state and from what was observed of its instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spotd.core.bids import is_kept, is_older_than_waking, keep_outbid
from spotd.core.billing import charge_unseen, last_lived
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, IntentState
from spotd.core.domain.states import AttemptState, EndReason, require_rows
from spotd.core.kernel.listed import is_outdated
from spotd.core.kernel.loss_evidence import (
    LossEvidence,
    is_missing_for_long,
    is_missing_twice,
    is_mute,
    proves_absence,
    settle_until_missing,
    watch_timeouts,
)
from spotd.core.metering import STOPPED, lease_and_save
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import Instance, InstanceState, Listing, Loss

_LOSS_REASONS: Final[Mapping[Loss, EndReason]] = {
    Loss.PREEMPTED: EndReason.PREEMPTED,
    Loss.OUTBID: EndReason.OUTBID,
    Loss.HOST_LOST: EndReason.HOST_LOST,
    Loss.PROVISION_FAILED: EndReason.HOST_LOST,
    Loss.NO_CAPACITY: EndReason.NO_CAPACITY,
    Loss.IMAGE_ERROR: EndReason.IMAGE_ERROR,
    Loss.BALANCE: EndReason.PROVIDER_BALANCE,
    Loss.EXPIRED: EndReason.HOST_LOST,
    Loss.SELF: EndReason.HOST_LOST,
}
require_rows(Loss, _LOSS_REASONS)


class Observed(StrEnum):
    """What was observed of the instance of one attempt."""

    LISTED = "listed, and may compute, or could not be read since"
    HALTED = "listed as paused, ending or gone, and read since"
    ABSENT = "missing from complete lists for long enough, and read since"
    UNREAD = "halted or missing, but only its liveness was checked since"
    OTHER_MARKET = "listed in another market than agreed"
    NOTHING = "no list says anything of it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attempt beside everything that was observed of it."""

    builder: PlanBuilder
    attempt_id: AttemptId
    listing: Listing | None
    mine: Instance | None
    report: HostStatus | None
    is_held: bool
    """Its absence is not believed yet."""
    evidence: LossEvidence

    @property
    def item(self) -> Attempt:
        return self.builder.attempt(self.attempt_id)

    @property
    def is_read(self) -> bool:
        """Whether all that its host wrote was read after it was listed.

        However little is known of it, it may have run and saved while the store did not answer.
        """
        report, listing = self.report, self.listing
        return report is not None and not report.liveness_check and (listing is None or report.read_at >= listing.at)

    def end(self, reason: EndReason, detail: str = "") -> None:
        self.builder.end_attempt(self.attempt_id, reason, detail)


def judge(case: Case) -> None:
    """Apply the rule of the attempt's state and of what was observed."""
    JUDGEMENTS[case.item.state][_observation(case)](case)


def _observation(case: Case) -> Observed:
    item, listing, mine = case.item, case.listing, case.mine
    absent = listing is not None and listing.complete and mine is None and proves_absence(case.builder, item, listing)
    if not item.state.counts:
        if absent and listing is not None and item.end_reason is EndReason.LAUNCH_UNKNOWN:
            absent = is_missing_for_long(case.builder, item, listing)
        elif absent and listing is not None and item.ref is None:
            absent = is_missing_twice(case.builder, item, listing)
        return Observed.ABSENT if absent else Observed.NOTHING if mine is None else Observed.LISTED
    if mine is not None and mine.market not in {None, item.quote.offer.market}:
        return Observed.OTHER_MARKET
    if absent and item.ref is None and item.heartbeat_seen_at is not None and not case.evidence.is_silent(item):
        absent = False  # its host lives, so the launch took effect, whatever the lists lack
    elif absent and listing is not None and item.ref is None:
        is_missing = is_missing_for_long if case.evidence.hosts_cannot_write else is_missing_twice
        absent = is_missing(case.builder, item, listing)
    halted = mine is not None and mine.state in STOPPED
    absent = absent and not case.is_held
    if (halted or absent) and case.report is not None and case.report.liveness_check:
        return Observed.UNREAD
    if case.is_read and (halted or absent):
        return Observed.HALTED if halted else Observed.ABSENT
    return Observed.NOTHING if mine is None else Observed.LISTED


# --- the rules -------------------------------------------------------------------------------------------------


def wait(case: Case) -> None:
    """Change nothing."""


def end_gone(case: Case) -> None:
    """Take the machine as gone, once its provider had accepted its end before the list was begun."""
    if _is_end_accepted(case.builder, case.item, case.listing):
        case.builder.machine_gone(case.attempt_id)


def end_other_market(case: Case) -> None:
    """End the attempt: the provider broke the contract."""
    market = None if case.mine is None else case.mine.market
    case.end(EndReason.CONTRACT_BROKEN, f"the machine is {market}, which was not agreed")


def read_in_full(case: Case) -> None:
    """Ask for a full read of what its host wrote, before a loss is believed."""
    case.builder.read_in_full(case.attempt_id)


def end_halted(case: Case) -> None:
    """End the attempt by the order to stop, by the reason that its provider gives, or as lost."""
    item, mine = case.item, case.mine
    if mine is None:
        return
    listed_at = None if case.listing is None else case.listing.at
    if item.stop and item.bidding.held_since and not (listed_at and listed_at > item.stop.ordered_at):
        case.builder.list_again(item.provider)  # it may have woken since the list
        watch_clocks(case)
        return
    if item.stop is not None:
        case.end(item.stop.reason, item.stop.detail)
        return
    if is_kept(case.builder, item, mine):
        keep_outbid(case.builder, item)
        return
    unstated = EndReason.HOST_LOST if item.notice_at is None else EndReason.PREEMPTED
    reason = unstated if mine.loss is None else _LOSS_REASONS[mine.loss]
    case.end(reason, mine.detail or f"the provider says {mine.state.value}")


def end_unlaunched(case: Case) -> None:
    """End the attempt: its launch never took effect, or its machine is gone although its host gave a sign of life."""
    last_sign = case.item.heartbeat_seen_at
    if last_sign is not None:
        charge_unseen(case.builder, case.attempt_id, last_lived(case.item, last_sign, case.report))
    case.builder.machine_gone(case.attempt_id)
    if last_sign is not None:
        case.end(EndReason.HOST_LOST, "its host gave a sign of life, and the provider lists no machine")
    else:
        case.end(EndReason.NEVER_LAUNCHED, "the provider has no machine with its key")


def end_absent(case: Case) -> None:
    """End the attempt by the order to stop, by its interruption notice, or as lost; charge it while it was listed."""
    item = case.item
    if item.ref is None:
        end_unlaunched(case)
        return
    settle_until_missing(case.builder, item)
    if item.stop is not None:
        case.end(item.stop.reason, item.stop.detail)
    elif item.notice_at is not None:
        case.end(EndReason.PREEMPTED)
    else:
        case.end(EndReason.OUTBID if is_mute(item) else EndReason.HOST_LOST, "the provider lists it no more")


def watch_unlisted(case: Case) -> None:
    """Give up a launch that stays without an answer for too long; else watch its time-outs."""
    item = case.item
    if _is_unanswerable(case):
        why = f"{item.provider} does not answer; the job goes on elsewhere, and the machine is ended when it is found"
        case.end(EndReason.LAUNCH_UNKNOWN, why)
    else:
        watch_clocks(case)


def watch_clocks(case: Case) -> None:
    """End the attempt at the deadline of its order to stop, after too long a silence, or at its start's time-out."""
    patience = case.evidence.patience(case.item, case.mine, case.listing)
    watch_timeouts(case.builder, case.attempt_id, case.report, patience, case.evidence)


# --- what they ask ---------------------------------------------------------------------------------------------


def _is_end_accepted(builder: PlanBuilder, item: Attempt, listing: Listing | None) -> bool:
    """Whether a list begun after the provider accepted the end shows it; one list may be wrong."""
    intent = builder.end_order(item)
    is_accepted = intent is not None and intent.accepted_at is not None
    return item.ref is None or (is_accepted and not is_outdated(builder, item, listing))


def _is_unanswerable(case: Case) -> bool:
    """Whether a machine that may have been launched could by now neither give a sign of life nor go on without one.

    Its provider, or the part of it that was asked to sell it, has been away since its answer was lost. A machine that
    lives would have given a sign of life, without which its grant is not renewed; one that does not starts no more,
    once the grant that it would read is superseded.
    """
    builder, item, listing = case.builder, case.item, case.listing
    intent = builder.launch_order(item)
    if item.ref is not None or intent is None or intent.state is not IntentState.UNKNOWN or intent.not_before is None:
        return False
    if listing is not None and listing.complete and listing.at > intent.not_before:
        return False
    given_up_at = intent.not_before + lease_and_save(builder.job(item.id.job), builder.policy)
    if builder.now < given_up_at:
        builder.wake(given_up_at)
        return False
    return case.is_read and item.heartbeat_seen_at is None


# --- the table -------------------------------------------------------------------------------------------------

_COUNTS: Final[Mapping[Observed, Callable[[Case], None]]] = {
    Observed.LISTED: watch_clocks,
    Observed.HALTED: end_halted,
    Observed.ABSENT: end_absent,
    Observed.UNREAD: read_in_full,
    Observed.OTHER_MARKET: end_other_market,
    Observed.NOTHING: watch_unlisted,
}
require_rows(Observed, _COUNTS)

JUDGEMENTS: Final[Mapping[AttemptState, Mapping[Observed, Callable[[Case], None]]]] = {
    AttemptState.INTENDED: {**_COUNTS, Observed.ABSENT: end_unlaunched},
    AttemptState.STARTING: _COUNTS,
    AttemptState.RUNNING: _COUNTS,
    AttemptState.STOPPING: _COUNTS,
    AttemptState.ENDING: {**dict.fromkeys(Observed, wait), Observed.ABSENT: end_gone},
    AttemptState.ENDED: dict.fromkeys(Observed, wait),
}
require_rows(AttemptState, JUDGEMENTS)


# Rows that state a machine as over: one row alone ends no attempt and settles no bill, whatever is known of its host.
#
# Theory. A row that states a machine as paused, ending or gone, or as one of another market, would end its attempt,
# and what the host does meanwhile would be thrown away. A provider's list holds a wrong row now and then: one of a
# cache, of a failing shard, of another machine. So something else must say the same. That a machine is gone means
# that it is ended and booked no more, so only another list says it, or an end that its provider has accepted: a host
# that is silent may be cut off, and one that is to end itself may fail to. Of the other states also the silence of a
# host that was read and watched, or its report of its own end, does, since the machine is ended then in any case.
# That a host never spoke, cannot speak since its machine is held, or could not be read says nothing. Until then its
# provider is asked for another list, the state of the machine counts as unknown, and nothing of the row is recorded.
# What is believed then holds from the first such list on. The host is read in full before its attempt ends in any
# case.
#
# That a held machine is outbid and paused is no news. An end by another market is never the host's to confirm. A row
# without a state, as of several machines in part, shows none that is well: only a host that spoke since does then.
#
# This is the one gate: `reconcile` takes each row of an attempt through it before anything is recorded. The absence of
# a machine has rules of its own (`loss_evidence`), since an absence is weaker than a row.


def is_doubted(
    builder: PlanBuilder,
    item: Attempt,
    mine: Instance,
    listing: Listing,
    report: HostStatus | None,
    evidence: LossEvidence,
) -> bool:
    """Whether something else must say what this row states; then another list is asked for."""
    if is_older_than_waking(item, mine, listing):
        builder.list_again(item.provider)
        return True
    since, spoke = item.over_since, item.heartbeat_seen_at
    if not _states_end(item, mine):
        if since and listing.at > since and (mine.state is not InstanceState.UNKNOWN or (spoke or since) > since):
            _withdraw(builder, item)
        return False
    if since is None or since > builder.now:
        since = listing.at
        builder.put_attempt(replace(item, over_since=since))
    if listing.at > since or _is_confirmed(builder, item, mine, report, evidence):
        return False
    builder.list_again(item.provider)
    return True


def as_unknown(mine: Instance) -> Instance:
    """Return what is left of a row that is doubted: there is a machine."""
    return replace(mine, state=InstanceState.UNKNOWN, market=None, loss=None)


def _states_end(item: Attempt, mine: Instance) -> bool:
    if item.bidding.held_since is not None and mine.state is InstanceState.PAUSED and mine.loss is Loss.OUTBID:
        return _is_other_market(item, mine)  # as it is known already
    return mine.state in STOPPED or _is_other_market(item, mine)


def _is_other_market(item: Attempt, mine: Instance) -> bool:
    return item.state.counts and mine.market not in {None, item.quote.offer.market}


def _is_confirmed(
    builder: PlanBuilder, item: Attempt, mine: Instance, report: HostStatus | None, evidence: LossEvidence
) -> bool:
    """Whether something beside the row says so; that it is gone, only an end that its provider has accepted."""
    if mine.state is InstanceState.GONE:
        intent = builder.end_order(item)
        return intent is not None and intent.accepted_at is not None
    if not item.state.counts:
        return True
    if _is_other_market(item, mine):
        return False
    if report is not None and report.exit_reason is not None:
        return True
    return evidence.is_silent(item) and not evidence.is_shared(item)


def _withdraw(builder: PlanBuilder, item: Attempt) -> None:
    builder.put_attempt(replace(item, over_since=None))
    if item.state.counts and item.bidding.held_since is None:
        why = f"one list of {item.provider} said that the machine is over, and a newer one shows it: nothing was done"
        builder.event("machine.doubted", why, attempt=item.id)

"""Rows that contradict a host: a machine whose host gives signs of life is not over because one list says so.

Theory. A row that states a machine as paused, ending or gone, or as one of another market, would end its attempt, and
what the host does meanwhile would be thrown away. A provider's list holds a wrong row now and then: one of a cache, of
a failing shard, of another machine. So such a row is believed where nothing contradicts it: the host is silent, never
spoke, or reported its own end. Else its provider is asked for another list, and a second one must say it, too. Until
then the state of the machine counts as unknown, and nothing of the row is recorded. The host is read in full before
its attempt ends in any case.

This is the one gate: `reconcile` takes each row of an attempt through it before anything is recorded. The absence of
a machine has rules of its own (`loss_evidence`), since an absence is weaker than a row.
"""

from __future__ import annotations

from dataclasses import replace

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import HostStatus
from spotd.core.machines.listed import STOPPED
from spotd.core.machines.loss_evidence import LossEvidence
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.values import Instance, InstanceState, Listing


def is_doubted(
    builder: PlanBuilder,
    item: Attempt,
    mine: Instance,
    listing: Listing,
    report: HostStatus | None,
    evidence: LossEvidence,
) -> bool:
    """Whether another list must say what this row states; then that list is asked for."""
    since = item.over_since
    if not _states_end(item, mine):
        if since is not None and listing.at > since:
            _withdraw(builder, item)
        return False
    if since is None or since > builder.now:
        since = listing.at
        builder.put_attempt(replace(item, over_since=since))
    if listing.at > since or not _is_contradicted(builder, item, mine, report, evidence):
        return False
    builder.list_again(item.provider)
    return True


def as_unknown(mine: Instance) -> Instance:
    """Return what is left of a row that is doubted: there is a machine."""
    return replace(mine, state=InstanceState.UNKNOWN, market=None, loss=None)


def _states_end(item: Attempt, mine: Instance) -> bool:
    return mine.state in STOPPED or _is_other_market(item, mine)


def _is_other_market(item: Attempt, mine: Instance) -> bool:
    return item.state.counts and mine.market not in {None, item.quote.offer.market}


def _is_contradicted(
    builder: PlanBuilder, item: Attempt, mine: Instance, report: HostStatus | None, evidence: LossEvidence
) -> bool:
    """Whether something speaks against the row: its host, or what was agreed of the machine."""
    seen_at = evidence.sign(item) or item.heartbeat_seen_at
    has_spoken = seen_at is not None and builder.now - seen_at < builder.policy.silence_max
    if not item.state.counts:
        return has_spoken and mine.state is InstanceState.GONE and _is_still_to_end(builder, item)
    if _is_other_market(item, mine):
        return True
    if seen_at is None or (report is not None and report.exit_cause is not None):
        return False
    return has_spoken or report is None


def _is_still_to_end(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether its provider has not accepted the end of a machine whose host has not ended by itself."""
    intent = builder.end_order(item)
    return intent is not None and intent.accepted_at is None and not item.ends_itself


def _withdraw(builder: PlanBuilder, item: Attempt) -> None:
    builder.put_attempt(replace(item, over_since=None))
    if item.state.counts and item.bidding.held_since is None:
        why = f"one list of {item.provider} said that the machine is over, and a newer one shows it: nothing was done"
        builder.event("machine.doubted", why, attempt=item.id)

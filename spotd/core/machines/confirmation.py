"""Rows that state a machine as over: one row alone ends no attempt and settles no bill, whatever is known of its host.

Theory. A row that states a machine as paused, ending or gone, or as one of another market, would end its attempt, and
what the host does meanwhile would be thrown away. A provider's list holds a wrong row now and then: one of a cache, of
a failing shard, of another machine. So something else must say the same: another list, the silence of a host that was
read and watched, its report of its own end, or an end that its provider has accepted. That a host never spoke, cannot
speak since its machine is held, or could not be read says nothing. Until then its provider is asked for another list,
the state of the machine counts as unknown, and nothing of the row is recorded. What is believed then holds from the
first such list on. The host is read in full before its attempt ends in any case.

That a held machine is outbid and paused is known, and no news. An end by another market is never the host's to confirm.

This is the one gate: `reconcile` takes each row of an attempt through it before anything is recorded. The absence of
a machine has rules of its own (`loss_evidence`), since an absence is weaker than a row.
"""

from __future__ import annotations

from dataclasses import replace

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import HostStatus
from spotd.core.machines.holding import is_older_than_waking
from spotd.core.machines.listed import STOPPED
from spotd.core.machines.loss_evidence import LossEvidence
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.values import Instance, InstanceState, Listing, Loss


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
    since = item.over_since
    if not _states_end(item, mine):
        if since is not None and listing.at > since:
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
    """Whether something beside the row says so: its host, its silence, or an end that its provider has accepted."""
    if not item.state.counts:
        return mine.state is not InstanceState.GONE or not _is_still_to_end(builder, item)
    if _is_other_market(item, mine):
        return False
    if report is not None and report.exit_cause is not None:
        return True
    return evidence.is_silent(item) and not evidence.is_shared(item)


def _is_still_to_end(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether its provider has not accepted the end of a machine whose host has not ended by itself."""
    intent = builder.end_order(item)
    return intent is not None and intent.accepted_at is None and not item.ends_itself


def _withdraw(builder: PlanBuilder, item: Attempt) -> None:
    builder.put_attempt(replace(item, over_since=None))
    if item.state.counts and item.bidding.held_since is None:
        why = f"one list of {item.provider} said that the machine is over, and a newer one shows it: nothing was done"
        builder.event("machine.doubted", why, attempt=item.id)

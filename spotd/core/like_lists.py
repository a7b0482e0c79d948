"""Lists that are like the last one, but for their instant: few of them can change what is decided."""

from __future__ import annotations

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd_providers.contract.values import InstanceState, Listing, ProviderName


def awaits_list(world: World, provider: ProviderName, newest: Listing) -> bool:
    """Whether a list that is like this newest one, but for its instant, may change what is decided.

    It does not where no row of the state concerns the provider: it repeats what is not ours. Nor for a machine that
    runs, of which it repeats that it runs as agreed: the next decision, which its host is read for, comes soon enough.
    """
    if any(intent.provider == provider for intent in world.intents.values()):
        return True
    if any(job.moves.proposed is not None for job in world.jobs.values()):
        return True  # it waits for a second list of a machine, which may be another job's
    rows = newest.instances if newest.complete else ()
    runs = {(row.ref, row.key) for row in rows if row.state is InstanceState.RUNNING}
    items = (item for item in world.attempts.values() if item.provider == provider)
    return any((item.ref, item.carried_key) not in runs or not _only_runs(item) for item in items)


def _only_runs(item: Attempt) -> bool:
    """Whether its machine runs, and nothing about it waits for a second list."""
    if item.state is not AttemptState.RUNNING or item.machine is not MachineState.LIVE or not item.ever_listed:
        return False
    first_lists = (item.missing_since, item.over_since, item.over_ceiling_at, item.bidding.seen, item.bidding.leapt_at)
    under_way = (item.stop, item.notice_at, item.bidding.held_since)
    return not item.awaits_handover and all(one is None for one in (*first_lists, *under_way))

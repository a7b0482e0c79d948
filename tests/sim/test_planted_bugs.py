"""The oracles are tested by what they must catch: each planted bug is found within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim import (
    bounds,
    money,
    oracles,
    own_rules,
    planted,
    planted_bills,
    planted_gangs,
    planted_lives,
    planted_moves,
    planted_own,
    planted_plans,
    planted_promises,
    planted_reuse,
    planted_stops,
    planted_unfit,
    receipts,
    schedules,
    stops,
    unfit,
)
from tests.sim.oracles import CHECKS, broken_rules
from tests.sim.planted import Bug
from tests.sim.run import Result, run_world

pytestmark = pytest.mark.long

SEEDS = range(12)
BUGS = {
    **planted.BUGS,
    **planted_promises.PROMISES,
    **planted_lives.LIVES,
    **planted_moves.MOVES,
    **planted_plans.PLANS,
    **planted_bills.BILLS,
    **planted_stops.STOPS,
    **planted_own.OWN,
    **planted_reuse.REUSES,
    **planted_gangs.GANGS,
    **planted_unfit.UNFIT,
}
LENGTHY = frozenset(
    {
        "accept manifests unseen",
        "add up rows twice",
        "ask again at once after a refusal",
        "believe a list without a computer that is silent",
        "believe a notice for ever",
        "believe large news at once",
        "believe when a machine says it was made",
        "bid less",
        "book nothing for own machines",
        "book the wait of a machine to nobody",
        "book without end what nobody can see",
        "buy outside of windows",
        "buy what was cancelled while its launch waited",
        "end the machines that a restored state does not know",
        "forget what was ended on a full disk",
        "give up a machine without a last full read of its host",
        "hand a machine over at any price",
        "hand a machine to anybody",
        "hand one machine to two",
        "hand over what its job left",
        "keep the ceiling of the launch where the config accepts less",
        "launch while the old machine may live",
        "meter by a clock that was set",
        "meter no traffic",
        "meter the day before midnight twice",
        "meter what was agreed and not what is listed",
        "move before the machine has ended",
        "move for anything",
        "no intent before the launch",
        "promise nothing for uploads",
        "renew the grant of an attempt that a restored state takes for the newest",
        "stay when a window closes",
        "stop a machine while the store is away",
        "stop equals as well",
        "take a label for an install",
        "take a silent store for silent hosts",
        "take an order for an end",
        "take bytes for a length of time",
        "take the clock of a host for a right one",
        "take the offers of a plugin as they are",
        "take what was given up for ended",
        "trust a price that is none",
        "use a number again after the state was restored",
        "wait for words of a held machine",
        "wait too long",
        "wait with an end for as long as asked",
    }
)
"""Each takes a second of processor time or more; most of what notices them notices a cheaper bug in `make test`."""
LENGTHY_WORLDS = frozenset(
    {
        "end a job for the price of a moment",
        "end nothing on a full disk",
        "forget who refused",
        "hand one machine to two",
        "keep the ceiling of the launch where the config accepts less",
        "leave a machine while its bid is changed",
        "leave an own machine for a price",
        "stop a job that saves",
        "take the instants of a plugin as they are",
    }
)
"""The first bug of each world in which the real daemon takes two seconds or more."""
LENGTHY_RULES = frozenset(
    {
        "ambiguous_cost",
        "bids_bounded",
        "handed_to_whom_it_fits",
        "held_and_gone",
        "moved",
        "out_of_window",
        "preempted",
        "waiting_bounded",
        "while_away",
    }
)
"""What only bugs of some seconds each prove."""
AT_ONCE = (
    oracles.said_by_the_core,
    oracles.foreign_machines,
    oracles.launches,
    oracles.doubles,
    oracles.raised_bids,
    oracles.stalls,
    oracles.healthy_machines_killed,
    oracles.resumes,
    oracles.machines_max,
    oracles.full_disk,
    bounds.launches_bounded,
    money.above_ceiling,
    money.below_ceiling,
    money.budgets,
    money.expired_too_soon,
    *schedules.RULES,
    *stops.STOPS,
    receipts.bills_believed,
    *own_rules.OWN_RULES,
    *unfit.UNFIT,
)
"""These judge what has happened by then, so a world need not go on once one is broken; others judge its end."""


def rules_broken(bug: Bug, seed: int) -> set[str]:
    checks = [check for check in AT_ONCE if check.__name__ in bug.rule]

    def is_found(result: Result) -> bool:
        return any(True for check in checks for _ in check(result))

    with bug.patch():
        result = run_world(
            seed, bug.shape, daemon_type=bug.daemon, limit=bug.until or bug.limit, enough=is_found if checks else None
        )
    return {rule.split(":")[0] for rule in broken_rules(result)}


def marked(name: str) -> pytest.MarkDecorator | tuple[()]:
    return pytest.mark.lengthy if name in LENGTHY else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in BUGS])
def test_a_planted_bug_is_found_within_a_few_seeds(name: str) -> None:
    bug = BUGS[name]
    for seed in (bug.seed, *SEEDS):
        if rules_broken(bug, seed) & set(bug.rule):
            return
    pytest.fail(f"no oracle of {bug.rule} noticed {name!r} in {len(SEEDS)} worlds")


def test_each_bug_names_oracles_that_there_are() -> None:
    known, at_once = {check.__name__ for check in CHECKS}, {check.__name__ for check in AT_ONCE}
    assert [name for name, bug in BUGS.items() if not bug.rule or not set(bug.rule) <= known] == []
    assert [name for name, bug in BUGS.items() if bug.until is not None and not set(bug.rule) <= at_once] == []


def test_each_oracle_that_a_bug_proves_is_proven_by_one_that_is_soon_found() -> None:
    rules = {name: set(bug.rule) for name, bug in BUGS.items()}
    assert set(BUGS) >= LENGTHY
    soon = set().union(*(rules[name] for name in BUGS.keys() - LENGTHY))
    assert set().union(*rules.values()) - soon == LENGTHY_RULES
    assert {names[0] for names in names_by_world().values()} >= LENGTHY_WORLDS


def marked_world(names: list[str]) -> pytest.MarkDecorator | tuple[()]:
    return pytest.mark.lengthy if LENGTHY.issuperset(names) or names[0] in LENGTHY_WORLDS else ()


def names_by_world() -> dict[tuple[int, str], list[str]]:
    """The bugs that each world gives away."""
    found: dict[tuple[int, str], list[str]] = {}
    for name, bug in BUGS.items():
        found.setdefault((bug.seed, repr(bug.shape)), []).append(name)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, id=f"seed {seed}, {names[0]}", marks=marked_world(names))
        for (seed, _), names in names_by_world().items()
    ],
)
def test_the_real_daemon_passes_the_worlds_that_give_the_bugs_away(names: list[str]) -> None:
    """To the end of the world, or as far as its bugs need to be noticed if no rule of theirs judges the end.

    Then only a rule that is broken by then could be what noticed a bug, and the real daemon keeps all of these so far.
    """
    bugs = [BUGS[name] for name in names]
    seed, shape = bugs[0].seed, bugs[0].shape
    spans = [bug.until for bug in bugs if bug.until is not None]
    until = max(spans) if len(spans) == len(bugs) else None
    early: list[str] = []

    def is_broken(result: Result) -> bool:
        both = [result] if result.twin is None else [result, result.twin]
        early.extend(f"{check.__name__}: {rule}" for one in both for check in AT_ONCE for rule in check(one))
        return bool(early)

    result = run_world(seed, shape, limit=until, enough=is_broken)
    if until is not None:
        is_broken(result)
    assert early == []
    if until is None:
        assert broken_rules(result) == []

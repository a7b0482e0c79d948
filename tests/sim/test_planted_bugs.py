"""The oracles are tested by what they must catch: each planted bug is found within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim import planted, planted_lives, planted_promises
from tests.sim.oracles import CHECKS, broken_rules
from tests.sim.planted import Bug
from tests.sim.run import run_world
from tests.sim.worlds import Shape

pytestmark = pytest.mark.long

SEEDS = range(12)
BUGS = {**planted.BUGS, **planted_promises.PROMISES, **planted_lives.LIVES}


def rules_broken(bug: Bug, seed: int) -> set[str]:
    with bug.patch():
        result = run_world(seed, bug.shape, daemon_type=bug.daemon, limit=bug.limit)
    return {rule.split(":")[0] for rule in broken_rules(result)}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_within_a_few_seeds(name: str) -> None:
    bug = BUGS[name]
    for seed in (bug.seed, *SEEDS):
        if rules_broken(bug, seed) & set(bug.rule):
            return
    pytest.fail(f"no oracle of {bug.rule} noticed {name!r} in {len(SEEDS)} worlds")


def test_each_bug_names_oracles_that_there_are() -> None:
    known = {check.__name__ for check in CHECKS}
    assert [name for name, bug in BUGS.items() if not bug.rule or not set(bug.rule) <= known] == []


WORLDS = {f"{bug.seed} {bug.shape}": (bug.shape, bug.seed) for bug in BUGS.values()}


@pytest.mark.parametrize(("shape", "seed"), WORLDS.values())
def test_the_real_daemon_passes_the_worlds_that_give_the_bugs_away(shape: Shape, seed: int) -> None:
    assert broken_rules(run_world(seed, shape)) == []

"""The replay of recorded traces gives the reference scores to the cent, and slack pacing the share it is kept for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

import pytest

from spotd.core.policies import HOUR_S, POLICIES, WITH_DEADLINE, Rule, shielded
from tests.replays.optimum import optimum, usd
from tests.replays.replay import replay
from tests.replays.traces import ABSENT, SCORES, Window, windows

pytestmark = pytest.mark.skipif(not SCORES.exists(), reason=ABSENT)
_CENT: Final = 0.005
_RULES: Final[dict[str, Rule]] = {
    "on_demand": POLICIES["on-demand"],
    "greedy": POLICIES["greedy"],
    "uniform_progress": POLICIES["uniform-progress"],
    "uniform_progress_eager_return": POLICIES["uniform-progress-eager"],
    "slack_reserve_10pct": partial(shielded, POLICIES["slack-reserve-tenth"]),
    "slack_reserve_2d": partial(shielded, POLICIES["slack-reserve"]),
}
"""The references of the first four ran without the shield."""
_SHARES: Final = {"aws-2022-1node": 93.7, "aws-2023-v100-9zone": 92.7, "gcp-2025-h100-16": 94.9}
_SAMPLE: Final = 37
"""Every so many windows in `make test`: a few of each set."""


def _differences(some: Iterable[Window]) -> list[str]:
    found = []
    for window in some:
        for name, rule in _RULES.items():
            got = replay(rule, [window.zone], window.terms)
            finish_h, launches, preemptions = window.rows[name]
            is_same = (
                abs(got.usd - window.costs[name]) < _CENT
                and got.finish_s is not None
                and abs(got.finish_s / HOUR_S - float(finish_h)) < 1e-5
                and (str(got.launches), str(got.preemptions)) == (launches, preemptions)
                and not got.is_late
            )
            if not is_same:
                found.append(f"{name} on {window.trace} {window.terms}: {got}, not {window.costs[name]}")
        least = usd(optimum(window.zone, window.terms))
        if abs(least - window.costs["offline_optimum"]) >= _CENT:
            found.append(f"optimum on {window.trace} {window.terms}: {least}, not {window.costs['offline_optimum']}")
    return found


@pytest.mark.long
def test_a_sample_of_windows_costs_what_the_references_say() -> None:
    assert _differences(windows()[::_SAMPLE]) == []


@pytest.mark.slow
def test_every_window_costs_what_the_references_say() -> None:
    assert len(windows()) * (len(_RULES) + 1) == 2961
    assert _differences(windows()) == []


def _shares(some: Iterable[Window]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for window in some:
        got = replay(partial(shielded, POLICIES[WITH_DEADLINE]), [window.zone], window.terms)
        assert not got.is_late
        total = sums.setdefault(window.set_name, [0.0, 0.0])
        total[0] += window.costs["on_demand"] - got.usd
        total[1] += window.costs["on_demand"] - window.costs["offline_optimum"]
    return {name: 100 * gained / possible for name, (gained, possible) in sums.items()}


@pytest.mark.long
def test_the_default_policy_captures_its_share_of_what_is_possible_and_is_never_late() -> None:
    shares = _shares(windows())
    too_low = {name: shares[name] for name, least in _SHARES.items() if round(shares[name], 1) < least}
    assert too_low == {}

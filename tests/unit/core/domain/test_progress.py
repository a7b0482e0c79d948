"""For how long a job shows no progress: only what lies between fresh heartbeats counts, by both clocks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.attempts import SHARE, HostSample, Watch, watched
from spotd_jobs.spec.model import WatchdogPolicy
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW

RULES = WatchdogPolicy(min_gpu_util=5, window=20 * MINUTE, no_progress=60 * MINUTE)
NOTHING = timedelta(0)


def sample(minutes: float, *, busy: float = 0.0, gpu: bool = True, **changes: Any) -> HostSample:
    """What a host states that has been up for so long, its GPU used for so many minutes of them."""
    up = minutes * MINUTE
    base = HostSample(boot=0, up=up, phase="run", printed=0, writes=0)
    if gpu:
        base = replace(base, gpu_time=up, gpu_busy=busy * MINUTE)
    return replace(base, **changes)


def after(*samples: tuple[float, HostSample], rules: WatchdogPolicy = RULES) -> Watch:
    """What is known after these, each read so many minutes after the beginning."""
    known: Watch | None = None
    for minutes, one in samples:
        known = watched(known, one, rules, NOW + minutes * MINUTE)
    assert known is not None
    return known


def test_a_job_that_prints_nothing_and_uses_no_gpu_is_quiet_and_idle() -> None:
    found = after(*((m, sample(m)) for m in range(0, 31, 2)))
    assert (found.quiet, found.idle, found.has_begun) == (30 * MINUTE, 30 * MINUTE, False)


@every(
    "changes",
    [
        pytest.param({"printed": 1}, id="a new line of output"),
        pytest.param({"seen": "step-2:2:x"}, id="a new checkpoint"),
        pytest.param({"writes": 1}, id="a checkpoint being written"),
    ],
)
def test_progress_ends_the_quiet(changes: dict[str, Any]) -> None:
    steps = [(m, sample(m)) for m in range(0, 31, 2)]
    found = after(*steps, (32, sample(32, **changes)))
    assert (found.quiet, found.active) == (NOTHING, 2 * MINUTE)


def test_a_gpu_that_is_used_is_not_idle_and_shows_that_the_work_has_begun() -> None:
    found = after((0, sample(0)), (2, sample(2)), (4, sample(4, busy=0.1)))
    assert (found.idle, found.has_begun) == (NOTHING, True)  # 0.1 of 2 minutes: exactly the limit


def test_idle_time_does_not_grow_while_a_checkpoint_is_written() -> None:
    steps = [(m, sample(m, writes=m)) for m in range(0, 61, 2)]
    assert after(*steps).idle == NOTHING


@every("phase", ["boot", "code", "restore", "save", "upload", "done"])
def test_no_progress_is_asked_for_while_bytes_are_moved(phase: str) -> None:
    found = after(*((m, sample(m, phase=phase)) for m in range(0, 301, 5)))
    assert (found.quiet, found.idle) == (NOTHING, NOTHING)


def test_a_host_without_gpu_figures_is_never_idle() -> None:
    found = after(*((m, sample(m, gpu=False)) for m in range(0, 61, 2)))
    assert (found.idle, found.quiet) == (NOTHING, 60 * MINUTE)


def test_figures_that_stop_coming_add_nothing() -> None:
    frozen = replace(sample(2), up=2 * MINUTE)
    steps = [(m, replace(frozen, up=m * MINUTE)) for m in range(2, 61, 2)]
    assert after(*steps).idle == NOTHING


@every(
    ("read_at", "up", "most"),
    [
        pytest.param(480.0, 480.0, 60 / SHARE, id="eight hours of sleep, or of a silent store"),
        pytest.param(480.0, 2.0, 2, id="the daemon's clock leaps ahead"),
        pytest.param(-480.0, 2.0, 0, id="the daemon's clock is set back"),
        pytest.param(2.0, 1e9, 2, id="the host states nonsense"),
    ],
)
def test_a_gap_adds_no_more_than_a_share_of_the_limit(read_at: float, up: float, most: float) -> None:
    found = after((0, sample(0)), (read_at, sample(up)))
    assert found.quiet == most * MINUTE
    assert found.idle == min(most, 20 / SHARE) * MINUTE


def test_a_runner_that_was_started_again_counts_anew_and_what_is_known_stays() -> None:
    first = [(m, sample(m)) for m in range(0, 11, 2)]
    found = after(*first, (12, sample(1, boot=1)), (14, sample(3, boot=1)))
    assert (found.quiet, found.idle) == (12 * MINUTE, 12 * MINUTE)


_SPANS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(
    st.lists(
        st.tuples(_SPANS, st.builds(
            HostSample,
            boot=st.integers(0, 2),
            up=st.timedeltas(NOTHING, timedelta(days=3650)),
            phase=st.sampled_from(["setup", "run", "save"]),
            printed=st.integers(0, 3),
            writes=st.integers(0, 3),
            seen=st.sampled_from(["", "a", "b"]),
            gpu_time=st.none() | st.timedeltas(NOTHING, timedelta(days=3650)),
            gpu_busy=st.none() | st.timedeltas(NOTHING, timedelta(days=3650)),
        )),
        min_size=2,
        max_size=12,
    )
)  # fmt: skip
def test_whatever_hosts_and_clocks_state_each_heartbeat_adds_little(steps: list[tuple[float, HostSample]]) -> None:
    known: Watch | None = None
    for count, (minutes, one) in enumerate(steps):
        known = watched(known, one, RULES, NOW + minutes * MINUTE)
        assert NOTHING <= known.quiet <= count * 12 * MINUTE
        assert NOTHING <= known.idle <= count * 4 * MINUTE
        assert NOTHING <= known.idle_busy <= known.idle

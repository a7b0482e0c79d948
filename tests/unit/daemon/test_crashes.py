"""The daemon dies at every named point, is born again, and nothing is forgotten, doubled or lost."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import anyio
import pytest
from _pytest.mark.structures import ParameterSet

from spotd.api.requests import JobDraft, Submission
from spotd.api.responses import StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.daemon.commits import CrashPoint
from spotd.store import JobView, Reads
from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown, Unavailable
from spotd_providers.contract.values import InstanceState
from tests.e2e.crashable import OF_SEVERAL, crash_points
from tests.unit.core.builders import offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.crew import UNITS, Crew
from tests.unit.daemon.rig import Killed, Rig
from tests.unit.daemon.shop import Hang, Shop
from tests.unit.store.reads import intents_of

pytestmark = pytest.mark.anyio

CODE = b"the packed workdir"
SHA256 = hashlib.sha256(CODE).hexdigest()
LIVES_MAX = 4
LENDER, HEIR = "lender", "heir"
"""The machine of the first one goes on with the other."""
REUSE = shop_policy(reuse_wait=timedelta(minutes=10))
ONCE = ("commit_launch_refused", "commit_terminate_failed")
"""What the story comes to once: who dies before it never comes to what is after it."""
ADOPTS = (CrashPoint.BEFORE_LAUNCH, CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT)
"""Only a life after a death during a launch has anything to adopt."""

STEPS_OF_MACHINES = frozenset(
    {
        CrashPoint.AFTER_COMMIT_SUBMIT,
        CrashPoint.AFTER_COMMIT_ADOPT,
        CrashPoint.AFTER_COMMIT_CYCLE_LAUNCH,
        CrashPoint.AFTER_COMMIT_CYCLE_HANDOVER,
        CrashPoint.AFTER_COMMIT_CYCLE_TERMINATE,
        CrashPoint.AFTER_COMMIT_LAUNCH_SENT,
        CrashPoint.AFTER_COMMIT_LAUNCHED,
        CrashPoint.AFTER_COMMIT_LAUNCH_UNKNOWN,
        CrashPoint.AFTER_COMMIT_TERMINATE_ACCEPTED,
        CrashPoint.AFTER_LAUNCH,
        CrashPoint.AFTER_TERMINATE,
    }
)


def deaths() -> list[tuple[CrashPoint, ...]]:
    """Where the daemon dies in its first life, in its second and so on: before each step, and then after it."""
    steps: dict[str, list[CrashPoint]] = {}
    for point in (one for one in CrashPoint if one not in OF_SEVERAL):
        _, _, step = point.value.partition("_")
        steps.setdefault(point.value if step in ONCE else step, []).append(point)
    return [ADOPTS if set(points) < set(ADOPTS) and len(points) > 1 else tuple(points) for points in steps.values()]


def draft(name: str) -> JobDraft:
    return JobDraft(
        data={
            "name": name,
            "run": "train",
            "image": "scratch",
            "workdir": ".",
            "secrets": ["TOKEN"],
            "resources": {"gpu": "RTX_4090:1"},
            "price": {"max_price": 1.0},
        },
        base_dir="/work",
    )


async def stream() -> AsyncIterator[bytes]:
    yield CODE


def named(reads: Reads, name: str) -> list[JobView]:
    return [view for view in reads.jobs() if view.name == name]


async def submitted(rig: Rig, name: str) -> JobId:
    """What a user does, who tries again when the daemon died under the first try."""
    handlers = rig.handlers()
    if not await handlers.submissions.has_code(SHA256):
        await handlers.submissions.put_code(SHA256, stream())
    request = Submission(draft=draft(name), code_sha256=SHA256, secrets={"TOKEN": "canary-value"})
    known = rig.store.read(lambda reads: named(reads, name))
    if known:
        return known[0].id
    try:
        return JobId((await handlers.submissions.submit(request))["job"]["id"])
    except StateConflict:
        return rig.store.read(lambda reads: named(reads, name))[0].id


async def story(rig: Rig) -> None:
    """One job through a preemption, another cancelled and retried, and two on one machine, one after the other.

    Each step is skipped if it happened already.
    """
    first = await submitted(rig, "first")
    second = await submitted(rig, "second")
    handlers = rig.handlers()
    if "job.retried" not in rig.kinds(second):
        await rig.until(lambda: rig.job(second).started_at is not None)
        if not rig.job(second).state.is_final:
            await handlers.jobs.cancel(second)
        await rig.until_state(second, JobState.CANCELLED)
        await handlers.jobs.retry(second)
    for name in (first, second):
        await rig.until_state(name, JobState.SUCCEEDED)
    lender = await submitted(rig, LENDER)
    await rig.until_state(lender, JobState.SUCCEEDED)
    heir = await submitted(rig, HEIR)
    await rig.until_state(heir, JobState.SUCCEEDED)
    await rig.until(lambda: not rig.shop.not_gone())
    await rig.until(lambda: not rig.store.read(lambda reads: intents_of(reads, first))[-1].is_open)


async def live(rig: Rig) -> None:
    """One life: the story to its end, or to the crash."""
    try:
        async with rig.running():
            await story(rig)
    except Killed:
        return
    except BaseExceptionGroup as group:
        killed, rest = group.split(Killed)
        if killed is None or (rest is not None and rest.split(anyio.get_cancelled_exc_class())[1] is not None):
            raise


def new_world(folder: Path, point: CrashPoint | None) -> tuple[Rig, Crew]:
    clock = VirtualClock()
    shop = Shop(clock, offers=[offer(f"o{n}", price=400_000 + n) for n in range(8)])
    shop.faults["launch"].extend([NoCapacity("sold out"), OutcomeUnknown("the line broke", key=""), Hang()])
    shop.faults["terminate"].append(Unavailable("down"))
    rig = Rig(folder, clock=clock, shops=[shop], crash_at=point, policy=REUSE)
    lent_by = lambda job: any(view.id == job for view in rig.store.read(partial(named, name=LENDER)))  # noqa: E731 - one use
    return rig, Crew(folder, clock, shop, outbid=frozenset({1, 2}), lent_by=lent_by)


def some_in_every_run() -> list[ParameterSet]:
    """All of them; those that can neither double a machine nor forget one nor lose a job are lengthy."""
    marks = [() if STEPS_OF_MACHINES.intersection(points) else pytest.mark.lengthy for points in deaths()]
    return [pytest.param(points, id=points[-1].value, marks=mark) for points, mark in zip(deaths(), marks, strict=True)]


@pytest.mark.parametrize("points", some_in_every_run())
async def test_after_crashes_no_machine_is_forgotten_or_doubled_and_every_job_finishes(
    points: tuple[CrashPoint, ...], tmp_path: Path
) -> None:
    rig, crew = new_world(tmp_path, points[0])
    async with anyio.create_task_group() as group:
        group.start_soon(crew.work)
        for point, then in zip_longest(points, points[1:]):
            await live(rig)
            assert rig.dead, f"the story never comes to {point}"
            rig = rig.reborn(crash_at=then)
        for _ in range(LIVES_MAX):
            await live(rig)
            if not rig.dead:
                break
            rig = rig.reborn()
        group.cancel_scope.cancel()
    shop = rig.shop
    assert [m.state for m in shop.machines.values() if m.state is not InstanceState.GONE] == []
    assert max(shop.most_alive.values()) == 1
    keys = [request.key for request in shop.requests]
    assert len(keys) == len(set(keys)), "an attempt was launched twice"
    for name in ("first", "second", LENDER, HEIR):
        view = rig.store.read(partial(named, name=name))
        assert [v.state for v in view] == [JobState.SUCCEEDED]
        newest = rig.job(view[0].id).checkpoints[0]
        assert newest.name == f"u{UNITS:03d}"
        assert not list((tmp_path / "secrets").glob(f"{view[0].id}.json")), "values outlive the job that needed them"
    (lender, heir) = (rig.store.read(partial(named, name=name))[0].id for name in (LENDER, HEIR))
    assert "machine.handed_over" in rig.kinds(lender)
    assert rig.attempts(heir)[0].machine_key == rig.attempts(lender)[-1].key
    assert [key for key in keys if key.split("-")[2] == heir] == [], "its machine was there already"
    _resumed_only_forwards(crew)
    assert all(values == {"TOKEN": "canary-value"} for values in crew.secrets.values())


def _resumed_only_forwards(crew: Crew) -> None:
    """Each attempt goes on where the newest accepted checkpoint of its job was, never further back."""
    saved: dict[str, int] = {}
    for attempt in sorted(crew.progress, key=lambda a: (a.job, a.number)):
        assert crew.resumed_at[attempt] >= saved.get(attempt.job, 0) - 1
        saved[attempt.job] = max(saved.get(attempt.job, 0), crew.resumed_at[attempt])


def test_the_daemon_dies_at_every_point_of_the_list() -> None:
    assert len(CrashPoint) >= 25
    assert {point for points in deaths() for point in points} == set(CrashPoint) - OF_SEVERAL


def test_a_setting_kills_at_the_passage_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("tests.e2e.crashable.os.kill", lambda pid, number: killed.append(number))
    reached = crash_points("before_launch:2")
    reached(CrashPoint.BEFORE_LAUNCH)
    reached(CrashPoint.AFTER_LAUNCH)
    assert not killed
    reached(CrashPoint.BEFORE_LAUNCH)
    assert len(killed) == 1
    reached(CrashPoint.BEFORE_LAUNCH)
    assert len(killed) == 1


@pytest.mark.parametrize("setting", ["nowhere", "before_launch:0", "before_launch:x"])
def test_a_setting_that_names_no_point_is_refused(setting: str) -> None:
    with pytest.raises(ValueError):
        crash_points(setting)

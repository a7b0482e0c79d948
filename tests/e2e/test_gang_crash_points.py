"""`kill -9` of the daemon at each point that it passes while a gang that lost its first machine goes on without it.

The first machine is lost in a save as often as there are points, and each time the daemon dies at another one and is
started again. Each machine saves a part. The market's own books are the judge: the gang is bought once, each first
machine is replaced once, and the training ends with the bytes of a run that nothing disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from spotd.daemon.commits import CrashPoint
from tests.e2e.crashable import OF_SEVERAL
from tests.e2e.gangs import straight_sha256
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, assert_books_are_clean, lab, until
from tests.e2e.person import Person
from tests.e2e.test_crash_points import assert_no_trouble_in_the_logs
from tests.e2e.test_gang import SCALE, code_folder, command, in_save, kill, processes
from tests.e2e.test_gang_kept import HOSTS, gang_of, trains

pytestmark = pytest.mark.e2e
NODES = 3
STEPS = 4000
"""It trains for longer than all losses take, until it is released."""
P = CrashPoint
ONLY_THEN = (
    P.BEFORE_COMMIT_CYCLE_HANDOVER,
    P.AFTER_COMMIT_CYCLE_HANDOVER,
    P.BEFORE_PUT_GRANT,
    P.AFTER_PUT_GRANT,
    P.BEFORE_PUT_NEXT,
    P.AFTER_PUT_NEXT,
    P.BEFORE_COMMIT_REPLACE_SENT,
    P.AFTER_COMMIT_REPLACE_SENT,
    P.BEFORE_COMMIT_REPLACED,
    P.AFTER_COMMIT_REPLACED,
)
"""A job that runs passes none of these."""
ONCE_LOST = (P.BEFORE_COMMIT_CYCLE_OTHER, P.AFTER_COMMIT_CYCLE_OTHER)
"""A job that runs passes them, too: they count from the loss on, or from the next attempt on."""
ONCE_NEXT = (P.BEFORE_RENEW_GRANT, P.AFTER_RENEW_GRANT)
AT_STAKE = (P.AFTER_COMMIT_CYCLE_HANDOVER, P.AFTER_PUT_NEXT, P.BEFORE_COMMIT_REPLACED)
ALL = ONLY_THEN + ONCE_LOST + ONCE_NEXT


def test_all_points_that_only_jobs_of_several_machines_pass_are_among_them() -> None:
    assert set(ALL) > OF_SEVERAL


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(AT_STAKE, id="those at stake"),
        pytest.param(tuple(one for one in ALL if one not in AT_STAKE), id="all others", marks=pytest.mark.lengthy),
    ],
)
def test_a_gang_goes_on_without_its_first_machine_wherever_the_daemon_dies(
    points: tuple[CrashPoint, ...], tmp_path: Path
) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.environment["SPOTD_CRASH_FILE"] = str(tmp_path / "crash")
        found.start()
        lose_first_at_each(found, points, tmp_path)


def lose_first_at_each(found: Lab, points: Sequence[CrashPoint], tmp_path: Path) -> None:
    """A training loses its first machine for each of these points, at which the daemon dies then."""
    expected = straight_sha256(tmp_path / "straight", NODES, STEPS)
    found.shares_machines = True  # an attempt goes on with the machines of the one before
    job, person = submit(found, tmp_path), Person(found)
    person.sees(lambda: trains(found, job, 0), what="all to train", within=120)
    for count, point in enumerate(points, start=1):
        lose_first(person, job, point, count)
    (tmp_path / "release").touch()
    person.sees_the_end(job, "SUCCEEDED")
    assert found.delivered(job, "weights.sha256") == expected
    assert person.deaths == [f"{point.value}:1" for point in points]
    reasons = [one.get("reason") for one in found.job(job)["attempts"]]
    assert reasons == ["host_lost"] * len(points) + ["done"]
    assert len({span.machine_id for span in found.ledger()}) == 1, "the gang was bought again"
    assert_books_are_clean(found, reconcile_s=3 * SCALE)
    assert_no_trouble_in_the_logs(found)


def submit(found: Lab, tmp_path: Path) -> str:
    return found.submit(
        "gang",
        command(tmp_path, STEPS) + " --in-parts",
        workdir=code_folder(tmp_path),
        nodes=NODES,
        replace_within="20m",
        outputs=["out/**"],
        checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s", "saved_by": "all"},
    )


def lose_first(person: Person, job: str, point: CrashPoint, count: int) -> None:
    """The first machine is lost for this time, and the daemon dies there."""
    found, before = person.lab, gang_of(person.lab)
    if point in ONLY_THEN:
        person.arm(point)
    until(lambda: in_save(found, before.member(0)), what="a save", every=0.002)
    kill(found, before.member(0))
    if point in ONCE_NEXT:
        person.sees(lambda: len(found.job(job)["attempts"]) > count, what="the next attempt")
    if point not in ONLY_THEN:
        person.arm(point)
    person.sees(lambda: len(person.deaths) == count, what=f"the daemon to die at {point}")
    after = person.sees(partial(trains, found, job, count), what=f"all to train after {point}", within=120)
    assert (after.machine_id, after.rounds) == (before.machine_id, {0: 2 * count}), point
    assert not processes(found, before.member(0)), f"what was the first machine runs on after {point}"

"""The state folder is lost while a gang goes on without its first machine: it is taken back, and ends equal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from spotd.daemon.commits import CrashPoint
from tests.e2e.ctl import assert_no_traceback, log_lines, spotctl
from tests.e2e.gangs import straight_sha256
from tests.e2e.harness import LEAVES_AT_ONCE, Lab, assert_books_are_clean, lab, until
from tests.e2e.person import Person
from tests.e2e.test_adoption import lose_state, take_over
from tests.e2e.test_gang import kill
from tests.e2e.test_gang_crash_points import NODES, STEPS, submit
from tests.e2e.test_gang_kept import HOSTS, gang_of, trains

pytestmark = pytest.mark.e2e
SCALE = 20.0
P = CrashPoint


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(P.BEFORE_COMMIT_CYCLE_HANDOVER, id="before it", marks=pytest.mark.lengthy),
        pytest.param(P.AFTER_COMMIT_CYCLE_HANDOVER, id="nothing of it is stored", marks=pytest.mark.lengthy),
        pytest.param(P.AFTER_PUT_NEXT, id="the machines wait for another first one"),
        pytest.param(P.AFTER_COMMIT_REPLACED, id="another first one came", marks=pytest.mark.lengthy),
    ],
)
def test_a_lost_state_is_rebuilt_while_a_gang_goes_on_without_its_first_machine(
    point: CrashPoint, tmp_path: Path
) -> None:
    store = tmp_path / "objects"
    settings = f'{LEAVES_AT_ONCE}[store]\nurl = "file://{store}"\n'
    expected = straight_sha256(tmp_path / "straight", NODES, STEPS)
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=settings) as found:
        found.environment["SPOTD_CRASH_FILE"] = str(tmp_path / "crash")
        found.start()
        found.shares_machines = True
        job, person = submit(found, tmp_path), Person(found)
        until(lambda: trains(found, job, 0), what="all to train", within=120)
        first = gang_of(found)
        person.arm(point)
        kill(found, first.member(0))
        until(lambda: found.is_dead, what=f"the daemon to die at {point}", within=60)
        person.disarm()
        lose_state(found)
        found.start(wait=False)
        assert found.exit_code() != 0
        take_over(found, store)
        found.start()
        until(lambda: log_lines(found, "survey.state_lost"), what="the loss to be noticed")
        until(lambda: "machine" in spotctl(found, "reconcile").stdout, what="the machines to be listed")
        done = spotctl(found, "reconcile", "--adopt", "--yes")
        assert done.stdout.endswith("1 job taken back\n"), done
        until(partial(runs_again, found, job), what="the training to go on", within=120)
        (tmp_path / "release").touch()
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED"
        assert found.delivered(job, "weights.sha256") == expected
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert [one["attempt"] for one in found.job(job)["attempts"]][-1] == 2
        assert {span.machine_id for span in found.ledger()} == {first.machine_id}, "the gang was bought again"
        assert_books_are_clean(found, reconcile_s=6 * SCALE)
        assert_no_traceback(found)


def runs_again(found: Lab, job: str) -> bool:
    events = [one["kind"] for one in found.events(job)]
    return found.state(job) == "RUNNING" and "checkpoint.accepted" in events

"""`kill -9` of the daemon before and after each commit, each provider call and each write to the store.

Each point has a story that provably reaches it. The story is told once, by somebody who restarts the daemon whenever
it died and repeats what was not heard. Afterwards the market's own books are the judge: every machine had its attempt,
no attempt had two, and none billed longer than a reconcile period after its job had ended (or, where the daemon was
down then, after it was back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.commits import CrashPoint
from tests.e2e.crashable import OF_SEVERAL
from tests.e2e.harness import Lab, assert_receipts_agree, host
from tests.e2e.person import Person, assert_one_machine_each

pytestmark = pytest.mark.e2e
SCALE = 60.0
RECONCILE = timedelta(minutes=3)
WAITS = timedelta(minutes=15)
"""How long the machine of a job that is done waits for the next one."""
ALONE = {"gpu": ["RTX_3090:1"], "disk": "10GB"}
"""What one host has: a story that needs this machine and no other gets it whatever the stories before it did."""
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(12)) + host("alone", 0.20, gpu="RTX_3090")
SECRET = "hunter2-hunter2"

P = CrashPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a story works with."""

    person: Person
    name: str
    folder: Path
    arm: Callable[[], None]

    @property
    def lab(self) -> Lab:
        return self.person.lab

    def once(self, line: str) -> str:
        """A command that also writes down which attempt ran it."""
        return f"echo $SPOTD_ATTEMPT >> {self.folder / 'runs'}; {line}"


Story = Callable[[Scene], str]


def finished(scene: Scene) -> str:
    """A job with code and a secret is submitted and finishes."""
    code = scene.folder / "code"
    code.mkdir()
    (code / "hello.txt").write_text(scene.name)
    scene.arm()
    job = scene.person.submit(
        scene.name,
        scene.once('cat hello.txt && test "$TOKEN" = hunter2-hunter2 && sleep 0.2'),
        workdir=code,
        secret_values={"TOKEN": SECRET},
        secrets=["TOKEN"],
    )
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def first_of_a_store(scene: Scene) -> str:
    """The same in a store that does not hold the runner yet, and with a daemon that has not put it there."""
    scene.lab.kill()
    for runner in (scene.lab.folder / "state" / "store" / "runner").glob("*.pyz"):
        runner.unlink()
    scene.lab.start()
    return finished(scene)


def watched(scene: Scene) -> str:
    """A job runs until the daemon died while it was watching: whatever the pace, the point is passed meanwhile."""
    gone = scene.folder / "the daemon died"
    job = scene.person.submit(scene.name, scene.once(f"until test -e '{gone}'; do sleep 0.02; done"))
    scene.person.sees_state(job, "RUNNING")
    scene.arm()
    scene.person.sees(lambda: scene.person.deaths, what="the daemon to die")
    gone.touch()
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def cancelled(scene: Scene) -> str:
    """A running job is cancelled, and takes a moment to save: a look at its host falls into that."""
    job = scene.person.submit(scene.name, scene.once("trap 'sleep 1; exit 143' TERM; sleep 60 & wait"))
    scene.person.sees_state(job, "RUNNING")
    scene.arm()
    stopped = frozenset({"CANCELLING", "CANCELLED"})
    scene.person.wish(
        lambda: bool(scene.lab.api.cancel(job)), fulfilled=lambda: scene.lab.state(job) in stopped or None
    )
    scene.person.sees_the_end(job, "CANCELLED")
    return job


def retried(scene: Scene) -> str:
    """A job fails, its owner mends the cause and retries it."""
    cause = scene.folder / "mended"
    job = scene.person.submit(scene.name, scene.once(f"test -e {cause}"), retry={"errors": 0})
    scene.person.sees_the_end(job, "FAILED")
    cause.touch()
    scene.arm()
    scene.person.wish(
        lambda: bool(scene.lab.api.retry(job)), fulfilled=lambda: scene.lab.state(job) != "FAILED" or None
    )
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def outbid(scene: Scene) -> str:
    """The machine is stopped under the job, goes on billing its disk, and has to be ended; the job runs elsewhere."""
    job = scene.person.submit(scene.name, scene.once('test "$SPOTD_ATTEMPT" -gt 1 || sleep 60'))
    scene.person.sees_state(job, "RUNNING")
    machine = scene.person.sees_machine(job)
    scene.arm()
    scene.lab.control("preempt", {"machine": machine, "notice": False, "lasting": "2h"})
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def not_ended_at_once(scene: Scene) -> str:
    """The same, and the provider fails when it is told to end the machine."""
    scene.lab.control("faults", {"call": "terminate", "status": 503})
    return outbid(scene)


def launch_refused(scene: Scene) -> str:
    """The provider refuses the first launch."""
    scene.arm()
    scene.lab.control("faults", {"call": "launch", "status": 429, "retry_after_s": 1})
    job = scene.person.submit(scene.name, scene.once("true"))
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def answer_lost(scene: Scene) -> str:
    """The machine is made, and the answer that says so gets lost."""
    scene.arm()
    scene.lab.control("faults", {"call": "launch", "lose": True, "after_effect": True})
    job = scene.person.submit(scene.name, scene.once("true"))
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def launch_lost(scene: Scene) -> str:
    """The order to launch gets lost before the provider hears of it."""
    scene.arm()
    scene.lab.control("faults", {"call": "launch", "lose": True})
    job = scene.person.submit(scene.name, scene.once("true"))
    scene.person.sees_the_end(job, "SUCCEEDED")
    return job


def taken_over(scene: Scene) -> str:
    """A job is done, and its machine goes on with the next one."""
    changes: dict[str, Any] = {"reuse": True, "resources": ALONE}
    lender = scene.person.submit(f"{scene.name}-lender", scene.once("true"), **changes)
    scene.person.sees_state(lender, "SUCCEEDED")
    scene.arm()
    # A cheaper host that comes back meanwhile would be bought instead, and rightly.
    heir = scene.person.submit(scene.name, f"echo heir >> {scene.folder / 'runs'}", **changes)
    scene.person.sees_the_end(heir, "SUCCEEDED")
    kinds = [event["kind"] for event in scene.lab.events(lender)]
    assert "machine.handed_over" in kinds, kinds
    return heir


STORIES: dict[Story, tuple[CrashPoint, ...]] = {
    finished: (
        P.BEFORE_COMMIT_SUBMIT,
        P.AFTER_COMMIT_SUBMIT,
        P.BEFORE_WRITE_SECRETS,
        P.AFTER_WRITE_SECRETS,
        P.BEFORE_PUT_CODE,
        P.AFTER_PUT_CODE,
        P.BEFORE_PUT_SPEC,
        P.AFTER_PUT_SPEC,
        P.BEFORE_PUT_GRANT,
        P.AFTER_PUT_GRANT,
        P.BEFORE_COMMIT_CYCLE_LAUNCH,
        P.AFTER_COMMIT_CYCLE_LAUNCH,
        P.BEFORE_COMMIT_LAUNCH_SENT,
        P.AFTER_COMMIT_LAUNCH_SENT,
        P.BEFORE_LAUNCH,
        P.AFTER_LAUNCH,
        P.BEFORE_COMMIT_LAUNCHED,
        P.AFTER_COMMIT_LAUNCHED,
        P.BEFORE_COMMIT_CYCLE_OTHER,
        P.AFTER_COMMIT_CYCLE_OTHER,
        P.BEFORE_COMMIT_ADOPT,
        P.AFTER_COMMIT_ADOPT,
    ),
    watched: (P.BEFORE_OFFERS, P.AFTER_OFFERS, P.BEFORE_INSTANCES, P.AFTER_INSTANCES),
    first_of_a_store: (P.BEFORE_PUT_RUNNER, P.AFTER_PUT_RUNNER),
    cancelled: (
        P.BEFORE_COMMIT_CANCEL,
        P.AFTER_COMMIT_CANCEL,
        P.BEFORE_COMMIT_CYCLE_ORDER,
        P.AFTER_COMMIT_CYCLE_ORDER,
        P.BEFORE_RENEW_GRANT,
        P.AFTER_RENEW_GRANT,
    ),
    retried: (P.BEFORE_COMMIT_RETRY, P.AFTER_COMMIT_RETRY),
    outbid: (
        P.BEFORE_COMMIT_CYCLE_TERMINATE,
        P.AFTER_COMMIT_CYCLE_TERMINATE,
        P.BEFORE_TERMINATE,
        P.AFTER_TERMINATE,
        P.BEFORE_COMMIT_TERMINATE_ACCEPTED,
        P.AFTER_COMMIT_TERMINATE_ACCEPTED,
        P.BEFORE_SUPERSEDE_GRANT,
        P.AFTER_SUPERSEDE_GRANT,
    ),
    not_ended_at_once: (P.BEFORE_COMMIT_TERMINATE_FAILED, P.AFTER_COMMIT_TERMINATE_FAILED),
    launch_refused: (P.BEFORE_COMMIT_LAUNCH_REFUSED, P.AFTER_COMMIT_LAUNCH_REFUSED),
    answer_lost: (P.BEFORE_COMMIT_LAUNCH_UNKNOWN, P.AFTER_COMMIT_LAUNCH_UNKNOWN),
    launch_lost: (P.BEFORE_FIND, P.AFTER_FIND),
    taken_over: (
        P.BEFORE_COMMIT_CYCLE_HANDOVER,
        P.AFTER_COMMIT_CYCLE_HANDOVER,
        P.BEFORE_PUT_NEXT,
        P.AFTER_PUT_NEXT,
    ),
}
"""Which story reaches which point."""

AFTER_A_CRASH = {
    # A restarted daemon commits something only if its predecessor left a call open.
    P.BEFORE_COMMIT_ADOPT: P.AFTER_COMMIT_CYCLE_LAUNCH,
    P.AFTER_COMMIT_ADOPT: P.AFTER_LAUNCH,
}
AT_STAKE = frozenset(
    {
        P.AFTER_LAUNCH,
        P.AFTER_INSTANCES,
        P.AFTER_PUT_RUNNER,
        P.AFTER_COMMIT_CANCEL,
        P.AFTER_COMMIT_RETRY,
        P.AFTER_TERMINATE,
        P.AFTER_COMMIT_TERMINATE_FAILED,
        P.BEFORE_COMMIT_LAUNCH_REFUSED,
        P.BEFORE_COMMIT_LAUNCH_UNKNOWN,
        P.BEFORE_FIND,
        P.AFTER_PUT_NEXT,
    }
)
"""Of each story, the point at which the provider knows most and the daemon least.

`make lengthy` kills at all others; `make test` does that in virtual time (`tests/unit/daemon/test_crashes.py`).
"""
CASES = [
    pytest.param(story, point, id=point.value, marks=() if point in AT_STAKE else pytest.mark.lengthy)
    for story, points in STORIES.items()
    for point in points
]


class Workplace:
    """One lab for many stories; one that a failed story left in a mess is replaced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lab: Lab | None = None
        self._labs = 0
        self.in_use = False

    def take(self) -> Lab:
        if self._lab is None or self.in_use:
            self.close()
            self._labs += 1
            self._lab = Lab(self._root / str(self._labs), hosts=HOSTS, scale=SCALE, daemon='[reuse]\nwait = "15m"\n')
            self._lab.environment["SPOTD_CRASH_FILE"] = str(self._root / f"crash-{self._labs}")
            self._lab.start()
        self.in_use = True
        return self._lab

    def close(self) -> None:
        if self._lab is not None:
            self._lab.close()
            self._lab = None


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = Workplace(tmp_path_factory.mktemp("crash-points"))
    yield place
    place.close()


def test_every_crash_point_has_exactly_one_story() -> None:
    told = [point for points in STORIES.values() for point in points]
    assert sorted([*told, *OF_SEVERAL]) == sorted(CrashPoint)
    assert [story for story, points in STORIES.items() if AT_STAKE.isdisjoint(points)] == []


@pytest.mark.parametrize(("story", "point"), CASES)
def test_no_machine_is_forgotten_or_doubled_when_the_daemon_dies(
    story: Story, point: CrashPoint, workplace: Workplace, tmp_path: Path
) -> None:
    found = workplace.take()
    play(story, point, Person(found), tmp_path)
    workplace.in_use = False


def play(story: Story, point: CrashPoint, person: Person, folder: Path) -> None:
    """Kill the daemon there, and ask the market's books what became of its machines."""
    found = person.lab
    first = AFTER_A_CRASH.get(point)
    armed = [f"{first.value}:1", f"{point.value}:1"] if first else [f"{point.value}:1"]

    def arm() -> None:
        person.arm(first or point, then=point if first else None)

    job = story(Scene(person=person, name=point.value.replace("_", "-"), folder=folder, arm=arm))

    assert person.deaths == armed, f"the story does not reach {point}: it died at {person.deaths}"
    found.shares_machines = story is taken_over
    ended = datetime.fromisoformat(found.job(job)["ended_at"])
    waits = WAITS if found.shares_machines else timedelta(0)
    assert_one_machine_each(found, job, ended_by=max(ended, person.restarted_at) + RECONCILE + waits)
    assert_receipts_agree(found, None if found.shares_machines else job)
    runs = (folder / "runs").read_text().split()
    assert len(runs) == len(set(runs)), f"an attempt ran twice: {runs}"
    assert_no_trouble_in_the_logs(found)
    kept = {path.stem for path in (found.folder / "state").glob("secrets/*")}
    assert kept <= {item["id"] for item in found.api.jobs({})["jobs"]}, "secrets of a job that does not exist"


def assert_no_trouble_in_the_logs(found: Lab) -> None:
    for log in found.folder.glob("spotd-*.log"):
        text = log.read_text(encoding="utf-8")
        assert "Traceback" not in text, text[-3000:]
        assert "invariant.broken" not in text, text[-3000:]
        assert SECRET not in text

"""Four machines that train together: each is killed in turn, two at once, one in a save; the result stays the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotd_providers.local.hosts.processes import pids_with_environment
from tests.e2e.harness import FINAL, LEAVES_AT_ONCE, Lab, assert_books_are_clean, host, lab, until
from tests.processes import oldest_first

pytestmark = pytest.mark.e2e
NODES = 4
SCALE = 60.0
HOSTS = "".join(host(f"pool{i}", 0.30 + i / 100) + f"slots = {NODES}\n" for i in range(24))
SCRIPT = Path(__file__).with_name("gang_train.py")


def code_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    return folder


def members(machine: str) -> list[str]:
    return [machine, *(f"{machine}.{rank}" for rank in range(1, NODES))]


def processes(found: Lab, member: str) -> list[int]:
    """The processes of one machine, by the mark that all of them inherit, the oldest in front."""
    mark = (found.market_folder / "machines" / "mark").read_text()
    return oldest_first(pids_with_environment(f"SPOTD_LOCAL_MACHINE={mark}:{member}"))


def kill(found: Lab, *killed: str) -> None:
    """End these machines as a power cut does, all at once."""
    victims = [pid for member in killed for pid in processes(found, member)]
    assert victims
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def running_gang(found: Lab, job: str, after: str) -> str | None:
    """The newest machine whose command has saved on its own since, on all members."""
    assert found.state(job) not in FINAL, found.job(job)
    for span in found.running_machines():
        if span.machine_id > after:
            folder = found.machine_folder(span.machine_id) / "spotd" / "checkpoints"
            if len(list(folder.glob("step-*"))) >= 2:
                return span.machine_id
    return None


def in_save(found: Lab, machine: str) -> bool:
    return any((found.machine_folder(machine) / "spotd" / "checkpoints").glob("tmp-*"))


def strike(found: Lab, job: str, last: str, victims: Callable[[list[str]], list[str]], *, saving: bool) -> str:
    """Kill some machines of the next gang, and return the gang once all of it is gone."""
    gang = until(lambda: running_gang(found, job, last), what="all four to train", within=120)
    if saving:
        until(lambda: in_save(found, gang), what="a save", every=0.002)
    kill(found, *victims(members(gang)))
    until(lambda: gang not in {s.machine_id for s in found.open_machines()}, what="the others to end")
    assert not [pid for member in members(gang) for pid in processes(found, member)]
    return gang


def submit(found: Lab, tmp_path: Path, run: str) -> str:
    return found.submit(
        "gang",
        run,
        workdir=code_folder(tmp_path),
        nodes=NODES,
        outputs=["out/**"],
        checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s", "saved_by": "first"},
    )


def command(tmp_path: Path, steps: int) -> str:
    flags = f"--steps {steps} --save-every 10 --pace 0.02 --save-s 0.1 --release {tmp_path / 'release'}"
    return f"{sys.executable} gang_train.py {flags}"


@pytest.mark.lengthy
def test_four_machines_end_with_the_result_of_a_run_that_nothing_disturbed(tmp_path: Path) -> None:
    steps = 1500
    with lab(tmp_path / "calm", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        calm = tmp_path / "one"
        calm.mkdir()
        (calm / "release").touch()
        job = submit(found, calm, command(calm, steps))
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED", found.job(job)
        expected = found.delivered(job, "weights.sha256")
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        job = submit(found, tmp_path, command(tmp_path, steps))
        last = ""
        strikes: list[tuple[Callable[[list[str]], list[str]], bool]] = [
            (lambda gang: [gang[0]], False),
            (lambda gang: [gang[1]], False),
            (lambda gang: [gang[2]], False),
            (lambda gang: [gang[3]], True),
            (lambda gang: [gang[0], gang[2]], False),
            (lambda gang: [gang[1], gang[3]], True),
        ]
        for victims, saving in strikes:
            last = strike(found, job, last, victims, saving=saving)
        (tmp_path / "release").touch()
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED", found.job(job)
        assert found.delivered(job, "weights.sha256") == expected
        attempts = found.job(job)["attempts"]
        assert [one["resumed_from"] is None for one in attempts] == [True] + [False] * len(strikes)
        assert {one["reason"] for one in attempts[:-1]} <= {"host_lost", "preempted"}
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert_books_are_clean(found, reconcile_s=2 * SCALE)


def test_a_daemon_that_is_killed_finds_the_four_at_work_and_doubles_none(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        job = submit(found, tmp_path, command(tmp_path, 1500))
        gang = until(lambda: running_gang(found, job, ""), what="all four to train", within=120)
        before = [processes(found, member)[0] for member in members(gang)]
        found.kill()
        folder = found.machine_folder(gang) / "spotd" / "checkpoints"
        newest = max(folder.glob("step-*")).name
        until(lambda: max(folder.glob("step-*")).name > newest, what="the four to train on without a daemon")
        found.start()
        (tmp_path / "release").touch()
        assert [processes(found, member)[0] for member in members(gang)] == before
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED", found.job(job)
        assert len(found.job(job)["attempts"]) == 1
        assert {span.machine_id for span in found.ledger()} == {gang}, "a second gang was started"
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert not [pid for member in members(gang) for pid in processes(found, member)]
        assert_books_are_clean(found, reconcile_s=2 * SCALE)

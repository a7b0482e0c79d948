"""Own hosts of one pool, over a real sshd, that train together while some of them are lost, the first one too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.commits import CrashPoint
from spotd_providers.kit.ssh import own_key
from spotd_providers.ssh.answers import key_in
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import FINAL, Lab, lab, until
from tests.e2e.person import Person
from tests.e2e.test_gang_kept import events_of
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, real_sshd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lengthy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
]
NAMES = ("titan", "twin", "third", "fourth", "fifth")
IS_OFF = "#!/bin/sh\nexit 1\n"
PRICE = 0.10
HOST = """
[[providers.ssh.hosts]]
name = "{name}"
address = "127.0.0.1"
port = {port}
user = "{user}"
price = {price}
pool = "rack"
path = "{path}"
folder = "{folder}"
"""


def parts(hosts: dict[str, FakeHost]) -> dict[int, tuple[FakeHost, str]]:
    """Return by rank the hosts that run its machines, with the names of these there."""
    found = [
        (host, one.machine_id.partition(":")[2]) for host in hosts.values() for one in host.machines() if one.running
    ]
    return {int((host.folder(name) / "meta").read_text().split()[3]): (host, name) for host, name in found}


def left(hosts: dict[str, FakeHost]) -> list[str]:
    """Return the machines on all hosts that run, or whose end was not ordered there."""
    return [one.machine_id for host in hosts.values() for one in host.machines() if one.exists]


def keys(hosts: dict[str, FakeHost]) -> set[str]:
    """Return the keys by which anything was ever started."""
    return {key_in(one.name) for host in hosts.values() for one in host.state.glob("machines/*")}


def cut_off(host: FakeHost) -> None:
    """Let it answer no more; what it runs goes on."""
    host.program("flock", IS_OFF)


def connect(host: FakeHost) -> None:
    (host.bin / "flock").unlink()


@contextmanager
def pool(tmp_path: Path, size: int = 3) -> Iterator[tuple[Lab, dict[str, FakeHost]]]:
    """Hosts of one pool behind a real sshd, and a daemon that may log in; no machine on them is left."""
    hosts = {
        name: FakeHost(name, tmp_path / name, Gpu(uuid=f"GPU-7{n}77a000-0000-0001"))
        for n, name in enumerate(NAMES[:size])
    }
    try:
        with real_sshd(tmp_path / "sshd") as sshd:
            config = "[providers.ssh]\nshares_files = true\n" + "".join(
                HOST.format(
                    name=host.name, port=sshd.port, user=sshd.user, price=PRICE, folder=host.state,
                    path=f"{Path(sys.executable).parent}:{host.path}",
                )
                for host in hosts.values()
            )  # fmt: skip
            silence = 'silence_limit = "8m"'
            with lab(
                tmp_path / "lab", hosts=config, daemon=silence, market="enabled = false", scale=20.0, poll_s=1.5
            ) as found:
                found.ledgers = []  # own hosts send no bill
                state = found.folder / "state"
                code = "import sys; from spotd.cli.client import main; sys.exit(main())"
                words = [sys.executable, "-c", code, "hosts", "add", "127.0.0.1", "--port", str(sshd.port), "--yes"]
                subprocess.run(words, check=True, env={**os.environ, "STATE_DIRECTORY": str(state)}, timeout=120)
                sshd.admit(f"restrict {own_key(state / 'providers' / 'ssh' / 'id_ed25519')}")
                found.environment["SPOTD_CRASH_FILE"] = str(tmp_path / "crash")
                found.start()
                yield found, hosts
                until(lambda: not left(hosts), what="the end")
                found.stop()  # there is no bill that its receipts could be held against
    finally:
        for host in hosts.values():
            host.shut_down()


def end_of(found: Lab, tmp_path: Path, job: str, expected: str) -> list[dict[str, Any]]:
    """Let the job end; return its attempts."""
    (tmp_path / "release").touch()
    found.wait_final(job, within=240)
    row = found.job(job)
    assert row["state"] == "SUCCEEDED", row
    assert found.delivered(job, "weights.sha256") == expected
    attempts: list[dict[str, Any]] = row["attempts"]
    return attempts


def test_a_training_on_two_own_hosts_outlives_the_loss_of_each_bit_by_bit(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    with pool(tmp_path) as (found, hosts):
        job = submit_two(found, tmp_path)
        last = 0
        for rank in (1, 0):
            last = until(lambda: (n := saved_on_its_own(found, job)) > last and n, what="a save", within=240)  # noqa: B023 - called at once
            host, name = parts(hosts)[rank]
            host.kill(name)
        until(lambda: saved_on_its_own(found, job) > last, what="the job to go on", within=240)
        attempts = end_of(found, tmp_path, job, expected)
        assert {one["reason"] for one in attempts[:-1]} == {"host_lost"}
        assert all(one["resumed_from"] is not None for one in attempts[1:])
        booked = [one for receipt in found.receipts(job) for one in receipt["attempts"]]
        assert {(one["gpu_count"], one["effective_usd_h"]) for one in booked} == {(2, 2 * PRICE)}


def test_the_host_that_is_left_is_kept_while_another_one_gets_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """One dies; then the one in its place is suspended, and another one has it before that could go on."""
    expected = straight_sha256(tmp_path / "straight")
    with pool(tmp_path) as (found, hosts):
        job = submit_two(found, tmp_path, replace_within="60m")
        until(lambda: saved_on_its_own(found, job), what="a save", within=240)
        first, lost = parts(hosts)[0], parts(hosts)[1]
        leader = first[0].leader(first[1])
        lost[0].kill(lost[1])
        until(partial(goes_on, found, job, 1), what="all to train again", within=240)
        saves = len(events_of(found, job, "checkpoint.accepted"))
        until(lambda: len(events_of(found, job, "checkpoint.accepted")) > saves, what="one more save", within=240)
        second = parts(hosts)[1]
        assert second[0] is not lost[0]
        stopped = second[0].members(second[1])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        until(partial(goes_on, found, job, 2), what="all to train once more", within=240)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        third = parts(hosts)[1]
        assert third[0] is not second[0]
        until(lambda: not second[0].members(second[1]), what="the suspended one to end")
        assert (parts(hosts)[0], first[0].leader(first[1])) == (first, leader), "the healthy one began anew"
        assert len(end_of(found, tmp_path, job, expected)) == 1
        (line,) = found.api.cost(job)["receipts"][0]["attempts"]
        assert line["kept_s"] > 0


def goes_on(found: Lab, job: str, times: int) -> bool:
    return len(events_of(found, job, "attempt.went_on")) >= times


def trains(found: Lab, job: str, losses: int) -> bool:
    """Whether all train again after so many losses, and something was saved since."""
    assert found.state(job) not in FINAL, found.job(job)
    kinds = [one["kind"] for one in found.events(job)]
    if kinds.count("attempt.went_on") < losses or found.state(job) != "RUNNING":
        return False
    since = max((at for at, kind in enumerate(kinds) if kind == "attempt.went_on"), default=0)
    return "checkpoint.accepted" in kinds[since:]


def test_the_first_host_is_lost_alone_with_another_and_again_and_the_others_go_on(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight", 3)
    with pool(tmp_path, 5) as (found, hosts):
        job = submit_two(found, tmp_path, nodes=3, replace_within="60m")
        until(partial(trains, found, job, 0), what="all to train", within=240)
        healthy = parts(hosts)[1]
        leader = healthy[0].leader(healthy[1])
        for losses, ranks in enumerate(([0], [0, 2], [0]), start=1):
            lost = [parts(hosts)[rank] for rank in ranks]
            for host, name in lost:
                cut_off(host)
                host.kill(name)
            until(partial(trains, found, job, losses), what="all to train again", within=240)
            assert not {host.name for host, _ in parts(hosts).values()} & {host.name for host, _ in lost}
            for host, _ in lost:
                connect(host)
            until(lambda: len(left(hosts)) == 3, what="what the lost ones left to be cleared away")
        assert (parts(hosts)[1], healthy[0].leader(healthy[1])) == (healthy, leader), "the healthy one began anew"
        assert len(keys(hosts)) == 1, "they were bought again"
        attempts = end_of(found, tmp_path, job, expected)
        assert [one.get("reason") for one in attempts] == ["host_lost"] * 3 + ["done"]
        assert {(one["gpu_count"], one["effective_usd_h"]) for one in found.receipts(job)[0]["attempts"]} == {
            (3, round(3 * PRICE, 6))
        }


def test_a_first_host_that_is_cut_off_and_back_changes_nothing_of_what_goes_on_without_it(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    with pool(tmp_path) as (found, hosts):
        job = submit_two(found, tmp_path, replace_within="60m")
        until(partial(trains, found, job, 0), what="all to train", within=240)
        first, healthy = parts(hosts)[0], parts(hosts)[1]
        stopped = first[0].members(first[1])
        cut_off(first[0])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        until(partial(goes_on, found, job, 1), what="the other one to go on", within=240)
        assert first[0].members(first[1]) == stopped
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        connect(first[0])
        until(lambda: len(left(hosts)) == 2, what="the former first one to end")
        until(partial(trains, found, job, 1), what="all to train", within=240)
        assert parts(hosts)[1] == healthy
        assert len(keys(hosts)) == 1, "they were bought again"
        assert len(end_of(found, tmp_path, job, expected)) == 2
        (line,) = [one for one in found.api.cost(job)["receipts"][0]["attempts"] if one["attempt"] == 2]
        assert 0 < line["kept_s"] <= 3600


STEPS = (
    CrashPoint.BEFORE_PUT_GRANT,
    CrashPoint.AFTER_PUT_GRANT,
    CrashPoint.BEFORE_PUT_NEXT,
    CrashPoint.AFTER_PUT_NEXT,
    "kept by the one that stays",
    "begun on another host",
    "another one runs",
)


def test_the_daemon_dies_at_each_step_of_a_loss_of_the_first_host_and_nothing_is_started_twice(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    with pool(tmp_path) as (found, hosts):
        job = submit_two(found, tmp_path, pace=0.4, replace_within="60m")
        until(partial(trains, found, job, 0), what="all to train", within=240)
        person, healthy = Person(found), parts(hosts)[1]
        meta = healthy[0].folder(healthy[1]) / "meta"
        for losses, step in enumerate(STEPS, start=1):
            host, name = parts(hosts)[0]
            before, folders = meta.read_text(), _folders(hosts)
            if isinstance(step, CrashPoint):
                person.arm(step)
                host.kill(name)
                person.sees(lambda: len(person.deaths) == losses, what=f"the daemon to die at {step}", within=240)  # noqa: B023 - called at once
            else:
                host.kill(name)
                until(partial(_is_at, step, meta, before, hosts, folders), what=step, within=240, every=0.001)
                person.crash_file.write_text("")
                found.kill()
                person.revive()
            person.sees(partial(trains, found, job, losses), what="all to train again", within=240)
            fresh = _folders(hosts) - folders
            assert len(fresh) == 1, f"started at {step}: {fresh}"
            until(lambda: len(left(hosts)) == 2, what="the former first one to be cleared away")
        assert parts(hosts)[1] == healthy
        assert len(keys(hosts)) == 1, "they were bought again"
        assert len(end_of(found, tmp_path, job, expected)) == len(STEPS) + 1


def _folders(hosts: dict[str, FakeHost]) -> set[Path]:
    return {one for host in hosts.values() for one in host.state.glob("machines/*")}


def _is_at(step: str, meta: Path, before: str, hosts: dict[str, FakeHost], folders: set[Path]) -> bool:
    if step == STEPS[-3]:
        return meta.read_text() != before
    fresh = _folders(hosts) - folders
    return bool(fresh) and (step == STEPS[-2] or any((one / "child").exists() for one in fresh))

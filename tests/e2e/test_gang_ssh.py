"""Two own hosts of a pool of three, over a real sshd, that train together while one of them is lost."""

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

from spotd_providers.kit.ssh import own_key
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import Lab, lab, until
from tests.e2e.test_gang_kept import events_of
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, real_sshd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lengthy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
]
NAMES = ("titan", "twin", "third")
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


@contextmanager
def pool(tmp_path: Path) -> Iterator[tuple[Lab, dict[str, FakeHost]]]:
    """Three hosts of one pool behind a real sshd, and a daemon that may log in; no process of them is left."""
    hosts = {
        name: FakeHost(name, tmp_path / name, Gpu(uuid=f"GPU-7{n}77a000-0000-0001")) for n, name in enumerate(NAMES)
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
                found.start()
                yield found, hosts
                until(lambda: not parts(hosts), what="the end")
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

"""Two own hosts of a pool of three, over a real sshd, that train together while each of them is lost in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spotd_providers.kit.ssh import own_key
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import lab, until
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


def part(hosts: dict[str, FakeHost], rank: int) -> tuple[FakeHost, str]:
    """Return the host that runs the machine of this rank, and its key."""
    found = [
        (host, machine.machine_id.partition(":")[2])
        for host in hosts.values()
        for machine in host.machines()
        if machine.running
    ]
    return next((host, key) for host, key in found if (host.folder(key) / "meta").read_text().split()[3] == str(rank))


def test_a_training_on_two_own_hosts_outlives_the_loss_of_each_bit_by_bit(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
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
                job = submit_two(found, tmp_path)
                last = 0
                for rank in (1, 0):
                    last = until(lambda: (n := saved_on_its_own(found, job)) > last and n, what="a save", within=240)  # noqa: B023 - called at once
                    host, key = part(hosts, rank)
                    host.kill(key)
                until(lambda: saved_on_its_own(found, job) > last, what="the job to go on", within=240)
                (tmp_path / "release").touch()
                found.wait_final(job, within=240)
                row = found.job(job)
                assert row["state"] == "SUCCEEDED", row
                assert found.delivered(job, "weights.sha256") == expected
                attempts = row["attempts"]
                assert {one["reason"] for one in attempts[:-1]} == {"host_lost"}
                assert all(one["resumed_from"] is not None for one in attempts[1:])
                booked = [one for receipt in found.receipts(job) for one in receipt["attempts"]]
                assert {(one["gpu_count"], one["effective_usd_h"]) for one in booked} == {(2, 2 * PRICE)}
                until(
                    lambda: not any(one.running for host in hosts.values() for one in host.machines()), what="the end"
                )
                found.stop()  # there is no bill that its receipts could be held against
    finally:
        for host in hosts.values():
            host.shut_down()

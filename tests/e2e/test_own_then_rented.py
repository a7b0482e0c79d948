"""One job from an own machine over a real sshd to Slurm to Kubernetes to vast.ai, and the bytes of a run without loss.

The owner's hours begin on the host, Slurm gives the place to another job, the cluster loses its node, and then no own
machine comes back in `rent_after`. The daemon is stopped and started once on the way, by which it gets the hours.

Here Slurm is the fake; `tests/system/test_own_then_rented.py` carries the same job through a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd_providers.kit.ssh import own_key
from spotd_providers.local.hosts import ScaledClock, read_ledger, segments, write_clock
from spotd_providers.testkit.serve import serving
from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import FINAL, Lab, lab, straight_sha256, training_folder, until
from tests.e2e.receipts import disagreements
from tests.fakes.kubernetes import KubeApi, KubeCloud
from tests.fakes.slurm import FakeNode, FakePartition, FakeSlurm, LoginNode
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.sshd import SSHD, Sshd, real_sshd
from tests.fakes.ticking import ticking
from tests.fakes.vastai import Ask, VastApi, VastCloud

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lengthy,
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
]
SCALE = 20.0
VIRTUAL0 = datetime(2026, 3, 2, 12, tzinfo=UTC)
FLAGS = "--steps 1500 --save-every 25"
VAST_KEY = "key-of-vast-canary-91d0"
KUBE_TOKEN = "token-of-kubernetes-canary-4c1b"
CARD = "NVIDIA-GeForce-RTX-4090"
HOURS = "# owner_hours"
SILENCE = 'silence_limit = "8m"'
"""A node of Kubernetes that is lost keeps its pod listed, so only silence says so: the default is 35 minutes."""
SLURM_PRICE, KUBE_PRICE = 0.05, 0.20


@dataclass(frozen=True)
class Batch:
    """A Slurm cluster whose jobs may be preempted: its settings, and another job that takes all its places."""

    settings: str
    take_all: Callable[[], None]


@contextmanager
def fake_slurm(folder: Path, clock: ScaledClock) -> Iterator[Batch]:
    """A cluster whose commands are programs, and whose jobs are processes."""
    slurm = FakeSlurm(folder, clock=clock)
    slurm.nodes = {"n1": FakeNode(name="n1", kind="h100", gpus=1)}
    slurm.partitions = {"spot": FakePartition(name="spot", nodes=("n1",), preempt="CANCEL", grace_s=120)}
    login = LoginNode(folder / "login", slurm)
    began_s, began_ms = int(clock.virtual0.timestamp()), int(clock.real0 * 1000)
    now_s = f"$(({began_s} + ($(/bin/date +%s%3N) - {began_ms}) * {int(clock.scale)} / 1000))"
    login.program("date", f'#!/bin/sh\n[ "$*" = +%s ] && exec echo {now_s}\nexec /bin/date "$@"\n')

    def take_all() -> None:
        with slurm.lock:
            slurm.nodes["n1"].state = "drain"
            for job in slurm.jobs.values():
                slurm.preempt(job)

    try:
        with ticking(slurm):
            yield Batch(settings=f'path = "{login.path}"\nfolder = "{login.shared}"', take_all=take_all)
    finally:
        slurm.shut_down()
        login.stop()


@dataclass(frozen=True)
class Places:
    lab: Lab
    clock: ScaledClock
    host: FakeHost
    slurm: Batch
    kube: KubeCloud
    vast: VastCloud

    def begin_owners_hours(self, after: timedelta) -> None:
        """Let the owner want the host back, which the daemon reads when it starts."""
        begin = self.clock.now() + after
        assert begin.date() == VIRTUAL0.date()
        config = self.lab.folder / "config.toml"
        hours = f'owner_hours = ["Mon-Sun {begin:%H:%M}-23:59"]\ntimezone = "UTC"'
        config.write_text(config.read_text().replace(HOURS, hours))
        self.lab.stop()
        self.lab.start()

    def offering(self) -> set[str]:
        return {quote["provider"] for quote in self.lab.api.prices({})["quotes"]}

    def is_saved(self, job: str, provider: str, attempt: int) -> bool:
        """The job runs there, and a checkpoint of this very attempt was accepted."""
        row = self.lab.job(job)
        assert row["state"] not in FINAL, f"it ended before {provider}: {row['attempts']}"
        if (row["state"], row["provider"]) != ("RUNNING", provider):
            return False
        return any(one["attempt"] == attempt for one in self.lab.api.checkpoints(job)["checkpoints"])


@contextmanager
def places(folder: Path, batch: Callable[[Path, ScaledClock], AbstractContextManager[Batch]]) -> Iterator[Places]:
    """A daemon with an own host, Slurm, Kubernetes and vast.ai is about to be started."""
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    host = FakeHost("titan", folder / "titan", Gpu(uuid="GPU-7177a000-0000-0001"))
    kube = KubeCloud(folder / "kube", clock=clock)
    kube.tokens[KUBE_TOKEN] = "spotd"
    kube.add_node("own-1", gpus=1, product=CARD)
    vast = VastCloud(folder / "vast", clock=clock, api_key=VAST_KEY)
    vast.stock(Ask(ask_id=23_000_001, machine_id=18_001, dph_base=0.40, min_bid=0.10))
    try:
        with (
            batch(folder / "slurm", clock) as slurm,
            real_sshd(folder / "sshd") as sshd,
            serving(KubeApi(kube)) as at_kube,
            serving(VastApi(vast)) as at_vast,
            ticking(kube),
            ticking(vast),
            lab(
                folder / "lab",
                hosts=_providers(host, sshd, slurm, at_kube.url, at_vast.url),
                daemon=SILENCE,
                market="enabled = false",
                scale=SCALE,
                virtual0=VIRTUAL0,
                poll_s=1.5,
            ) as found,
        ):
            state = found.folder / "state"
            write_clock(state / "clock.json", clock)
            found.environment = {"VAST_KEY": VAST_KEY, "KUBE_TOKEN": KUBE_TOKEN}
            found.ledgers = [vast.ledger_path]  # no other place has a bill
            _pin(state, sshd)
            yield Places(lab=found, clock=clock, host=host, slurm=slurm, kube=kube, vast=vast)
    finally:
        host.shut_down()
        kube.shut_down()
        vast.shut_down()


def _pin(state: Path, sshd: Sshd) -> None:
    """Pin the host's key and admit spotd's, as the how-to says."""
    code = "import sys; from spotd.cli.client import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "hosts", "add", "127.0.0.1", "--port", str(sshd.port), "--yes"]
    subprocess.run(command, check=True, env={**os.environ, "STATE_DIRECTORY": str(state)}, timeout=120)
    sshd.admit(f"restrict {own_key(state / 'providers' / 'ssh' / 'id_ed25519')}")


def _providers(host: FakeHost, sshd: Sshd, slurm: Batch, kube: str, vast: str) -> str:
    return f"""
[own]
rent_after = "4m"
[providers.ssh]
grace = "3m"
shares_files = true
[[providers.ssh.hosts]]
name = "titan"
address = "127.0.0.1"
port = {sshd.port}
user = "{sshd.user}"
path = "{Path(sys.executable).parent}:{host.path}"
folder = "{host.state}"
{HOURS}
[providers.slurm]
grace = "3m"
{slurm.settings}
[[providers.slurm.partitions]]
name = "spot"
gpu = "RTX_4090"
price = {SLURM_PRICE}
[providers.kubernetes]
base_url = "{kube}"
api_key = {{ env = "KUBE_TOKEN" }}
prices = [{{ gpu = "RTX_4090", price = "{KUBE_PRICE}" }}]
[providers.vast]
api_key = {{ env = "VAST_KEY" }}
base_url = "{vast}"
fee_multiplier = 1.0
"""


@pytest.mark.timeout(900)  # two minutes on two free cores
def test_a_job_leaves_an_own_host_slurm_and_kubernetes_for_vast_and_loses_no_bit(tmp_path: Path) -> None:
    carry(tmp_path, fake_slurm)


def carry(tmp_path: Path, batch: Callable[[Path, ScaledClock], AbstractContextManager[Batch]]) -> None:
    """Carry one job through the four places to its end."""
    release = tmp_path / "release"
    run = f"RELEASE={release} {sys.executable} slow_train.py {FLAGS} --pace 0.1"
    with places(tmp_path, batch) as found:
        found.lab.start()
        until(lambda: len(found.offering()) == 4, what="every place to be offered", within=120)
        job = found.lab.submit(
            "net", run, workdir=training_folder(tmp_path), image="python:3.12-slim",
            resources={"gpu": ["RTX_4090:1"], "disk": "1GB"}, price={"max_price": 0.5},
            checkpoint={"stop_grace": "60s"},
        )  # fmt: skip
        until(lambda: found.is_saved(job, "ssh", 1), what="a checkpoint on the own host", within=240, every=0.2)

        found.begin_owners_hours(timedelta(minutes=6))
        until(lambda: found.is_saved(job, "slurm", 2), what="a checkpoint in Slurm", within=300, every=0.2)
        machines = found.host.machines()
        assert [one for one in machines if one.running] == [], "something is left on the host"

        found.slurm.take_all()
        until(lambda: found.is_saved(job, "kubernetes", 3), what="a checkpoint in Kubernetes", within=300, every=0.2)

        found.kube.lose_node("own-1")
        said: set[str] = set()

        def rents() -> bool:
            said.add(str(found.lab.job(job)["verdict"]))
            return found.is_saved(job, "vast", 4)

        until(rents, what="a checkpoint at vast.ai", within=300, every=0.1)
        waits = [one for one in said if one.startswith("waits for an own machine: ")]
        assert waits, said
        assert all("after 4 min (rent_after)" in one for one in waits)
        release.touch()
        found.lab.wait_final(job, within=120)

        assert found.lab.state(job) == "SUCCEEDED", found.lab.job(job)
        assert found.lab.delivered(job, "weights.sha256") == straight_sha256(tmp_path, FLAGS)
        attempts = found.lab.job(job)["attempts"]
        assert [(one["provider"], one["market"]) for one in attempts] == [
            ("ssh", "own"), ("slurm", "own"), ("kubernetes", "own"), ("vast", "spot"),
        ]  # fmt: skip
        assert [one["reason"] for one in attempts] == ["preempted", "preempted", "host_lost", "done"]
        receipt = found.lab.api.cost(job)["receipts"][0]
        by_place = {line["provider"]: line for line in receipt["attempts"]}
        assert by_place["ssh"]["spent_usd"] == 0
        assert by_place["ssh"]["on_demand_usd"] > 0, "what renting at vast.ai would have cost"
        assert receipt["own_saved_usd"] == pytest.approx(
            sum(by_place[one]["on_demand_usd"] - by_place[one]["spent_usd"] for one in ("ssh", "slurm", "kubernetes")),
            abs=1e-5,
        )
        assert "own:" in spotctl(found.lab, "cost", job).stdout
        for name, price in (("slurm", SLURM_PRICE), ("kubernetes", KUBE_PRICE)):
            whole = price * by_place[name]["seconds"] / 3600
            spent = by_place[name]["spent_usd"]
            assert 0.8 * whole < spent <= whole + 1e-5, "what only waits or starts costs nothing there"
        until(lambda: not found.lab.open_machines(), what="every machine to be gone")
        rented = {**receipt, "attempts": [by_place["vast"]]}
        billed = segments(read_ledger(found.vast.ledger_path))
        assert disagreements([rented], billed, unseen_s=found.lab.unseen_s)[0] == []
        found.lab.stop()
        assert_no_traceback(found.lab)

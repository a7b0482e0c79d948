"""The slurm provider for the conformance suite: a login node behind one server, whose scripts and jobs run for real."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import AttemptKey, Balance, Market, MicroUsdPerHour, Offer
from spotd_providers.slurm.plugin import PLUGIN, SlurmProvider
from spotd_providers.slurm.settings import SlurmSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Canned, Served
from tests.fakes.slurm import FakeJob, FakeNode, FakePartition, FakeSlurm, LoginNode
from tests.fakes.ssh.server import SshFaults, _Thread, busy, pin, ssh_serving

SPOT_PRICE, PROD_PRICE = 0.4, 0.9
WAITS = "a full partition takes a job and lets it wait; the provider gives it up after queue_wait"


class SlurmHarness(Harness):
    """The provider, its cluster and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(
        self, slurm: FakeSlurm, login: LoginNode, faults: SshFaults, served: Served, server: _Thread, folder: Path,
        clock: FakeClock, more: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=None)
        self.slurm = slurm
        self.login = login
        self.server = server
        self.fake_clock = clock
        self.more = more
        self.partition_more: dict[str, Any] = {}
        (folder / "ssh").mkdir(exist_ok=True)
        pin(folder / "ssh" / "known_hosts", served.port, server.key)

    def settings(self) -> SlurmSettings:
        partitions = [
            {"name": "spot", "price": SPOT_PRICE, **self.partition_more},
            {"name": "prod", "price": PROD_PRICE, **self.partition_more},
        ]
        values = {"host": "127.0.0.1", "port": self.served.port, "user": "login", "path": self.login.path}
        return SlurmSettings(**{**values, "partitions": partitions, **self.more})

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        with self.slurm.lock:
            self.slurm.advance()
            jobs = {one.id: one for one in [*self.slurm.past, *self.slurm.jobs.values()]}
            return [self._machine(job) for job in jobs.values()]

    def _machine(self, job: FakeJob) -> WorldMachine:
        folder = self.login.shared / job.name
        meta = (folder / "meta").read_text().split() if (folder / "meta").exists() else []
        boot = folder / "boot.sh"
        return WorldMachine(
            machine_id=f"{job.id}:{job.name}",
            label=job.name if job.name == job.comment else None,
            exists=job.state in ("PENDING", "RUNNING", "SUSPENDED", "LEVITATING"),
            running=job.state == "RUNNING",
            market=Market.ON_DEMAND if job.partition == "prod" else Market.SPOT,
            price=MicroUsdPerHour(int(meta[0])) if meta else None,
            start_script=boot.read_text() if boot.exists() else None,
        )

    def sold(self) -> Sequence[WorldOffer]:
        rows = [("spot", "h100", "H100", n, SPOT_PRICE, Market.SPOT) for n in (1, 2)]
        rows += [("prod", "tesla_t4", "T4", n, PROD_PRICE, Market.ON_DEMAND) for n in (1, 2, 3, 4)]
        return [
            WorldOffer(
                offer_id=f"{partition}:{gpu}:{n}", gpu=gpu, gpu_count=n, market=market,
                price=MicroUsdPerHour(round(price * n * 1_000_000)),
            )
            for partition, _, gpu, n, price, market in rows
        ]  # fmt: skip

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        return busy(retry_after_s)

    def job(self, machine_id: str) -> FakeJob:
        return self.slurm.jobs[int(machine_id.partition(":")[0])]

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        raise NotApplicable("a cluster states no price: it is in the config, which is checked when it is read")

    def sell_nothing(self) -> None:
        for node in self.slurm.nodes.values():
            node.state = "drain"

    def vanish_offer(self, offer: Offer) -> None:
        del self.slurm.partitions[offer.extra["partition"]]

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        raise NotApplicable("a cluster states no price, and a changed config opens the provider anew")

    def exhaust_capacity(self, offer: Offer) -> None:
        raise NotApplicable(WAITS)

    def empty_balance(self) -> None:
        raise NotApplicable("a cluster has no balance")

    def exhaust_quota(self) -> None:
        self.slurm.quirks.submits_max = 0

    def break_auth(self) -> None:
        self.server.refuses_keys = True
        self.server.drop()

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("a job runs in the partition that it names")

    def refuse_but_leave_machine(self) -> None:
        words = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
        self.slurm.quirks.breaks["sbatch"] = (words, 1)

    def set_list_lag(self, lag: timedelta) -> None:
        raise NotApplicable("the controller knows a job before sbatch answers")

    def list_only_part(self) -> None:
        self.slurm.quirks.cut_rows = 1

    def spoil_listed_row(self, machine_id: str) -> None:
        self.slurm.quirks.spoiled.add(int(machine_id.partition(":")[0]))

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.slurm.add_job(key, key, partition="spot")

    def add_foreign_machines(self) -> Sequence[str]:
        other = f"spotd-{self.install}2-j0b1-1"
        made = [
            self.slurm.add_job("nightly", "", partition="spot"),
            self.slurm.add_job(other, other, partition="prod"),
            self.slurm.add_job("my,notebook", "spotd is nice", partition="spot"),
        ]
        for job in made:
            folder = self.login.shared / job.name
            folder.mkdir(parents=True)
            (folder / "log").write_text("nothing to see\n")
        return [f"{job.id}:{job.name}" for job in made]

    def preempt(self, machine_id: str) -> None:
        self.slurm.partitions["spot"].grace_s = 0
        self.slurm.preempt(self.job(machine_id))

    def pause(self, machine_id: str) -> None:
        self.job(machine_id).state = "SUSPENDED"

    def give_notice(self, machine_id: str) -> None:
        self.slurm.preempt(self.job(machine_id))

    def set_state(self, machine_id: str, state: OddState) -> None:
        job = self.job(machine_id)
        if state is OddState.UNHEARD_OF:
            job.state = "LEVITATING"
        elif state is OddState.PROVISION_FAILED:
            self.slurm.finish(job, "BOOT_FAIL", self.slurm.clock.now())
        else:
            self.slurm.finish(job, "COMPLETED", self.slurm.clock.now())

    def lose_contact(self, machine_id: str) -> None:
        self.slurm.lose(self.job(machine_id).node)

    def true_balance(self) -> Balance:
        raise NotApplicable("a cluster has no balance")

    def billed(self, machine_id: str) -> int:
        raise NotApplicable("Slurm sends no bill: what is booked is your price by time")


def small_cluster(root: Path, clock: FakeClock) -> FakeSlurm:
    """Two nodes that may be preempted, one that may not."""
    slurm = FakeSlurm(root, clock=clock)
    for node in (FakeNode(name="n1", kind="h100", gpus=2), FakeNode(name="n2", kind="h100", gpus=2)):
        slurm.nodes[node.name] = node
    slurm.nodes["m1"] = FakeNode(name="m1", kind="tesla_t4", gpus=4, cpus=8)
    slurm.partitions = {
        "spot": FakePartition(name="spot", nodes=("n1", "n2"), preempt="CANCEL", grace_s=60),
        "prod": FakePartition(name="prod", nodes=("m1",), tier=10, max_time="2-00:00:00"),
    }
    return slurm


@contextmanager
def open_harness(folder: Path, **settings: Any) -> Iterator[SlurmHarness]:
    """A fresh cluster, served, and no process of it left afterwards."""
    clock = FakeClock()
    slurm = small_cluster(folder / "cluster", clock)
    login = LoginNode(folder / "login", slurm)
    faults = SshFaults({"login": login}, lambda: clock.now().timestamp())
    try:
        with ssh_serving(faults, frozenset({"login"})) as (served, server):
            yield SlurmHarness(slurm, login, faults, served, server, folder, clock, settings)
    finally:
        slurm.shut_down()
        login.stop()


Story = Callable[[SlurmHarness, SlurmProvider], Awaitable[None]]


def play(folder: Path, story: Story, **settings: Any) -> None:
    """Play the story to its end; no process of its jobs is left."""
    with open_harness(folder, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SlurmProvider)
                await story(h, provider)

        run_virtually(main)

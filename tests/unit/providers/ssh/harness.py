"""The ssh provider for the conformance suite: two hosts behind one server, whose scripts run for real."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import AttemptKey, Balance, Market, MicroUsdPerHour, Offer
from spotd_providers.ssh.plugin import PLUGIN, SshProvider
from spotd_providers.ssh.settings import SshSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Canned, Served
from tests.fakes.ssh.host import FakeHost, Gpu
from tests.fakes.ssh.server import SshFaults, _Thread, busy, pin, ssh_serving

TITAN = (Gpu(uuid="GPU-7177a000-0000-0001"), Gpu(uuid="GPU-7177a000-0000-0002"))
TWIN = (Gpu(uuid="GPU-70177000-0000-0001"), Gpu(uuid="GPU-70177000-0000-0002"))
SPARE = (Gpu(uuid="GPU-59a4e000-0000-0001"), Gpu(uuid="GPU-59a4e000-0000-0002"))
ATLAS = (Gpu(uuid="GPU-a71a5000-0000-0001", name="Tesla T4", vram_mb=15360),)


class SshHarness(Harness):
    """The provider, its hosts and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(
        self,
        hosts: dict[str, FakeHost],
        faults: SshFaults,
        served: Served,
        server: _Thread,
        folder: Path,
        clock: FakeClock,
        more: dict[str, Any],
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=None)
        self.hosts = hosts
        self.server = server
        self.fake_clock = clock
        self.prices = {"titan": 0.4, "atlas": 0.1, "twin": 0.4, "spare": 0.4}
        self._more = more
        self.host_more: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        """Further names in the config, with the host that is meant."""
        self.names: dict[str, str] = {}
        """Other names in the config of hosts."""
        pin(folder / "known_hosts", served.port, server.key)

    def settings(self) -> SshSettings:
        hosts = [
            {
                "name": name, "address": "127.0.0.1", "port": self.served.port, "user": meant,
                "price": self.prices[meant], "path": self.hosts[meant].path, **self.host_more,
            }
            for name, meant in {**{self.names.get(name, name): name for name in self.hosts}, **self.aliases}.items()
        ]  # fmt: skip
        return SshSettings(hosts=hosts, known_hosts=self.folder / "known_hosts", **self._more)

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        return [machine for host in self.hosts.values() for machine in host.machines()]

    def sold(self) -> Sequence[WorldOffer]:
        titan, atlas = self.prices["titan"], self.prices["atlas"]
        rows = (("titan", "RTX_4090", 1, titan / 2), ("titan", "RTX_4090", 2, titan), ("atlas", "T4", 1, atlas))
        return [
            WorldOffer(
                offer_id=f"{host}:{gpu}:{count}",
                gpu=gpu,
                gpu_count=count,
                market=Market.ON_DEMAND,
                price=MicroUsdPerHour(round(price * 1_000_000)),
            )
            for host, gpu, count, price in rows
        ]

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        return busy(retry_after_s)

    def host_of(self, machine_id: str) -> tuple[FakeHost, str]:
        name, _, key = machine_id.partition(":")
        return self.hosts[name], key

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        raise NotApplicable("the price of an own host is in the config, which is checked when it is read")

    def sell_nothing(self) -> None:
        for host in self.hosts.values():
            host.use(*(gpu.uuid for gpu in host.gpus))

    def vanish_offer(self, offer: Offer) -> None:
        self.hosts[offer.extra["host"]].show()

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        raise NotApplicable("the price of an own host is in the config, and a changed config opens the provider anew")

    def exhaust_capacity(self, offer: Offer) -> None:
        self.hosts[offer.extra["host"]].use(*offer.extra["devices"].split(" "))

    def empty_balance(self) -> None:
        raise NotApplicable("own hosts have no account")

    def exhaust_quota(self) -> None:
        raise NotApplicable("own hosts have no quota: what is free is what the GPUs say")

    def break_auth(self) -> None:
        self.server.refuses_keys = True
        self.server.drop()

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("own hosts have one market")

    def refuse_but_leave_machine(self) -> None:
        raise NotApplicable("a launch that breaks off is undone under the host's lock, or is found by its key")

    def set_list_lag(self, lag: object) -> None:
        raise NotApplicable("a host shows at once what it runs: the list is made under the lock of launches")

    def list_only_part(self) -> None:
        self.hosts["titan"].profile = self.hosts["atlas"].profile = "exec 2>/dev/null; exit 3"

    def spoil_listed_row(self, machine_id: str) -> None:
        host, key = self.host_of(machine_id)
        (host.folder(key) / "meta").write_bytes(b"\x00\x1b[2Jfree\t-1\n")

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        self.hosts["titan"].plant(keys)

    def add_foreign_machines(self) -> Sequence[str]:
        keys = ("unlabelled", f"spotd-{self.install}2-j0b1-1", "my notebook")
        self.hosts["atlas"].plant(keys)
        return [f"atlas:{key}" for key in keys]

    def preempt(self, machine_id: str) -> None:
        raise NotApplicable("own hosts have no spot market")

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("a machine on an own host runs or has ended")

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable("own hosts have no spot market")

    def set_state(self, machine_id: str, state: OddState) -> None:
        host, key = self.host_of(machine_id)
        folder = host.folder(key)
        if state is OddState.ENDED_BY_ITSELF:
            (folder / "job" / "machine-done").touch()
            wait_for(lambda: host.leader(key) is None and not host.members(key))
        elif state is OddState.PROVISION_FAILED:
            host.kill(key)
            wait_for(lambda: host.leader(key) is None)
            for name in ("started", "child"):
                (folder / name).unlink()
        else:
            host.kill(key)
            wait_for(lambda: host.leader(key) is None)
            (folder / "exit").write_text("0 1 levitating\n")

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable("a host that cannot be reached lists nothing")

    def true_balance(self) -> Balance:
        raise NotApplicable("own hosts have no account")

    def billed(self, machine_id: str) -> int:
        raise NotApplicable("own hosts send no bill: what is booked is your price by time")


def wait_for(condition: Callable[[], bool], *, patience_s: float = 20) -> None:
    """Wait for processes of this computer, which no virtual time moves."""
    until = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the condition never came true")
        time.sleep(0.02)


@contextmanager
def open_harness(folder: Path, *, pool: bool = False, spare: bool = False, **settings: Any) -> Iterator[SshHarness]:
    """Fresh hosts, served, and no process of them left afterwards; with `pool` a third one, and all in one pool.

    Args:
        spare: a fourth one there, the third that is like titan.
    """
    clock = FakeClock()
    hosts = {
        "titan": FakeHost("titan", folder / "titan", *TITAN),
        "atlas": FakeHost("atlas", folder / "atlas", *ATLAS),
    }
    if pool:
        hosts["twin"] = FakeHost("twin", folder / "twin", *TWIN)
    if spare:
        hosts["spare"] = FakeHost("spare", folder / "spare", *SPARE)
    faults = SshFaults(hosts, lambda: clock.now().timestamp())
    try:
        with ssh_serving(faults, frozenset(hosts)) as (served, server):
            made = SshHarness(hosts, faults, served, server, folder, clock, settings)
            made.host_more = {"pool": "rack"} if pool else {}
            yield made
    finally:
        for host in hosts.values():
            host.shut_down()


Story = Callable[[SshHarness, SshProvider], Awaitable[None]]


def play(folder: Path, story: Story, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, SshProvider)
                await story(h, provider)

        run_virtually(main)

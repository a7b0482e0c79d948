"""RunPod for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Market,
    MicroUsdPerHour,
    Offer,
    Power,
    RegistryLogin,
    micro_usd,
)
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.runpod.plugin import CAPABILITIES, PLUGIN
from spotd_providers.runpod.wire import RunpodSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Call, Canned, Faults, Served, serving
from tests.fakes.ledger_sums import total_by_machine
from tests.fakes.runpod import Failure, Gpu, Phase, Pod, Quirks, RunpodApi, RunpodCloud, classify, some_gpus


class RunpodHarness(Harness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(
        self, cloud: RunpodCloud, faults: Faults, served: Served, folder: Path, clock: FakeClock, more: dict[str, Any]
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=CANARY)
        self.cloud = cloud
        self.fake_clock = clock
        self.base_url = served.url
        self._more = more

    def settings(self) -> RunpodSettings:
        return RunpodSettings(
            **{"base_url": self.base_url, "gpu_counts": (1, 2), "cluster_gpu_counts": (2,), **self._more}
        )

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        clusters = [
            WorldMachine(
                machine_id=one.cluster_id,
                label=one.name,
                exists=one.exists or any(pod.exists for pod in one.pods.values()),
                running=all(pod.phase is Phase.RUNNING for pod in one.pods.values()),
                market=Market.ON_DEMAND,
                price=MicroUsdPerHour(sum(pod.price for pod in one.pods.values())),
                start_script=next(map(_script, one.pods.values()), None),
            )
            for one in self.cloud.clusters.by_id.values()
        ]
        return [
            *clusters,
            *self._pods(),
        ]

    def _pods(self) -> list[WorldMachine]:
        return [
            WorldMachine(
                machine_id=pod.pod_id,
                label=pod.name,
                exists=pod.exists,
                running=pod.phase is Phase.RUNNING,
                market=Market.ON_DEMAND,
                price=pod.price,
                start_script=_script(pod),
                image=pod.image,
                disk_gb=pod.disk,
            )
            for pod in self.cloud.pods.values()
            if pod.cluster is None
        ]

    def sold(self) -> Sequence[WorldOffer]:
        found = []
        for gpu in self.cloud.gpus.values():
            for cloud in ("SECURE", "COMMUNITY"):
                for count in self.settings().gpu_counts:
                    price = gpu.price(cloud)
                    if price is None or gpu.availability(cloud, count) == "NONE":
                        continue
                    found.append(_sold(gpu, cloud, count, price))
            found += [
                _sold(gpu, "CLUSTER", count, gpu.cluster_price)
                for count in self.settings().cluster_gpu_counts
                if gpu.cluster_price is not None and gpu.availability("SECURE", count, product="CLUSTER") != "NONE"
            ]
        return found

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        headers = {"content-type": "application/problem+json"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        body = b'{"title":"Too Many Requests","status":429,"detail":"rate limit exceeded for the minute window"}'
        return Canned(status=429, body=body, headers=headers)

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        name, _, rest = offer_id.partition(":")
        cloud = rest.rpartition(":")[2].replace("cluster", "secure")
        gpu_id = name.replace("_", " ")
        mark = "raw-price-goes-here"

        def spoiled(row: Any, gpu: str) -> Any:
            return {**row, "price": {**row["price"], cloud: mark}} if gpu == gpu_id else row

        def write_price(true: Canned) -> Canned:
            answer = json.loads(true.body)
            answer["gpus"] = [spoiled(row, row["id"]) for row in answer["gpus"]]
            body = json.dumps(answer).encode().replace(json.dumps(mark).encode(), raw.encode())
            return Canned(status=true.status, body=body, headers=true.headers)

        self.faults.edit(Call.OFFERS, write_price, times=1000)

    def sell_nothing(self) -> None:
        for gpu in self.cloud.gpus:
            self.cloud.sell_out(gpu)

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.gpus.pop(offer.extra["gpu"])

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        gpu = self.cloud.gpus[offer.extra["gpu"]]
        gpu.secure_price = None if gpu.secure_price is None else gpu.secure_price * factor
        gpu.community_price = None if gpu.community_price is None else gpu.community_price * factor
        gpu.cluster_price = None if gpu.cluster_price is None else gpu.cluster_price * factor

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["gpu"])

    def empty_balance(self) -> None:
        self.cloud.spend_everything()

    def exhaust_quota(self) -> None:
        self.cloud.quirks.spend_limit = 0.0

    def break_auth(self) -> None:
        self.cloud.api_key = "another-key"

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("RunPod sells on-demand only")

    def refuse_but_leave_machine(self) -> None:
        raise NotApplicable("RunPod makes a pod or refuses it; no refusal that leaves a pod behind is known")

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = lag

    def list_only_part(self) -> None:
        # What older answers of the API do: one page of several, and the way to the next is not told.
        def without_last(true: Canned) -> Canned:
            page = json.loads(true.body)
            page["pods"] = page["pods"][:-1]
            page["pagination"] = {"hasNextPage": True, "nextCursor": None}
            return Canned(status=true.status, body=json.dumps(page).encode(), headers=true.headers)

        self.faults.edit(Call.LIST, without_last)

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_pod[machine_id] = "not a row"

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_foreign(key)

    def add_foreign_machines(self) -> Sequence[str]:
        names = ("untitled pod", f"spotd-{self.install}2-j0b1-1", "my notebook")
        return [self.cloud.add_foreign(name).pod_id for name in names]

    def preempt(self, machine_id: str) -> None:
        self.cloud.lose_host(machine_id)

    def pause(self, machine_id: str) -> None:
        self.cloud.lose_host(machine_id)

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable("RunPod stops pods without notice")

    def make_private(self, image: str, login: RegistryLogin) -> None:
        self.cloud.private[image] = (login.username, login.password.reveal())

    def set_state(self, machine_id: str, state: OddState) -> None:
        self.cloud.advance()
        pod = self.cloud.pods[machine_id]
        if state is OddState.UNHEARD_OF:
            self.cloud.quirks.edit_pod[machine_id] = {"status": "MEDITATING"}
        elif state is OddState.PROVISION_FAILED:
            pod.failure = Failure.CONTAINER
            self.cloud.fail(machine_id)
        else:
            self.cloud.quirks.restarts = False
            self.cloud.machines.kill(machine_id)

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable("no word of RunPod's says that the host of a pod is out of reach")

    def true_balance(self) -> Balance:
        raise NotApplicable(CAPABILITIES[Power.BALANCE].reason)

    def billed(self, machine_id: str) -> int:
        totals = total_by_machine(segments(read_ledger(self.cloud.ledger_path)), self.cloud.clock.now())
        cluster = self.cloud.clusters.by_id.get(machine_id)
        pods = [machine_id] if cluster is None else [pod.pod_id for pod in cluster.pods.values()]
        return sum(totals[pod] for pod in pods)


@contextmanager
def open_harness(folder: Path, *, quirks: Quirks | None = None, **settings: Any) -> Iterator[RunpodHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    # Virtual time stands still between requests, so a minute's quota would have to last for a whole test.
    quirks = quirks or Quirks(requests_a_minute=5000)
    cloud = RunpodCloud(folder / "cloud", clock=clock, quirks=quirks, api_key=CANARY)
    cloud.stock(*(replace(gpu, free=dict(gpu.free)) for gpu in some_gpus()))
    faults = Faults(RunpodApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield RunpodHarness(cloud, faults, served, folder, clock, settings)
    finally:
        cloud.shut_down()


def _script(pod: Pod) -> str | None:
    words = shlex.split(str(pod.body.get("args") or ""))
    return words[2] if len(words) > 2 else None


def _sold(gpu: Gpu, cloud: str, count: int, usd: float) -> WorldOffer:
    return WorldOffer(
        offer_id=f"{gpu.gpu_id.replace(' ', '_')}:{count}:{cloud.lower()}",
        gpu=canonical("runpod", gpu.gpu_id, gpu.memory * 1024),
        gpu_count=count,
        market=Market.ON_DEMAND,
        price=MicroUsdPerHour(micro_usd(round(usd * count, 9))),
    )

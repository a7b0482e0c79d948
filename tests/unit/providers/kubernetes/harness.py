"""Kubernetes for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Market,
    MicroUsdPerHour,
    Offer,
    RegistryLogin,
)
from spotd_providers.kubernetes.plugin import PLUGIN, KubernetesProvider
from spotd_providers.kubernetes.wire import KubernetesSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Canned, Faults, Served, serving
from tests.fakes.kubernetes import ADMIN, KubeApi, KubeCloud, KubeQuirks, PodFailure, classify

PRICES = {"H100_SXM": 2_000_000, "T4": 300_000}
SPOT_PRICE = 1_200_000
SPOT_LABEL = {"karpenter.sh/capacity-type": "spot"}
NO_PRICE = "a cluster states no price: what an hour counts as stands in the config"


class KubernetesHarness(Harness):
    """The provider, its cluster and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(
        self, cloud: KubeCloud, faults: Faults, served: Served, folder: Path, clock: FakeClock, more: Mapping[str, Any]
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=CANARY)
        self.cloud = cloud
        self.fake_clock = clock
        self.more = more

    def settings(self) -> KubernetesSettings:
        prices: list[dict[str, str]] = [{"gpu": gpu, "price": str(usd / 1e6)} for gpu, usd in PRICES.items()]
        prices.append({"gpu": "H100", "price": str(SPOT_PRICE / 1e6), "market": "spot"})
        return KubernetesSettings.model_validate({"base_url": self.served.url, "prices": prices, **self.more})

    async def advance(self, duration: timedelta) -> None:
        await super().advance(duration)
        self.cloud.advance()

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        jobs = {job["metadata"]["uid"]: job for job in self.cloud.objects["jobs"].rows.values()}
        pods = list(self.cloud.objects["pods"].rows.values())
        found: list[WorldMachine] = []
        for uid, job in (self.cloud.over | jobs).items():
            if job["kind"] != "Job":
                continue
            own = [pod for pod in pods if any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences", []))]
            lives = any(pod["status"]["phase"] in ("Pending", "Running") for pod in own)
            is_final = bool(job["status"].get("conditions_final"))
            label = job["metadata"].get("annotations", {}).get("spotd.dev/key")
            found.append(
                WorldMachine(
                    machine_id=f"{job['metadata']['name']}:{uid}",
                    label=label or job["metadata"]["name"],
                    exists=lives or (uid in jobs and not is_final),
                    running=any(pod["status"]["phase"] == "Running" for pod in own),
                    market=Market(job["metadata"].get("annotations", {}).get("spotd.dev/market", "on-demand")),
                    price=MicroUsdPerHour(int(job["metadata"].get("annotations", {}).get("spotd.dev/price", "0"))),
                    start_script=self._script(job),
                    image=job["spec"]["template"]["spec"]["containers"][0]["image"],
                )
            )
        return found

    def _script(self, job: Mapping[str, Any]) -> str | None:
        pods = self.cloud.pods_of(dict(job))
        return self.cloud.script_of(pods[0]) if pods else None

    def sold(self) -> Sequence[WorldOffer]:
        self.cloud.advance()
        spot, own = Market.SPOT, Market.ON_DEMAND
        kinds = (
            ("big", "H100_SXM", own, PRICES["H100_SXM"]), ("small", "T4", own, PRICES["T4"]),
            ("cheap", "H100_SXM", spot, SPOT_PRICE),
        )  # fmt: skip
        return [
            WorldOffer(
                offer_id=f"{gpu}:{market}:{count}",
                gpu=gpu,
                gpu_count=count,
                market=market,
                price=MicroUsdPerHour(price * count),
            )
            for name, gpu, market, price in kinds
            for count in (1, 2, 3, 4, 6, 8)
            if count <= self.cloud.free_gpus(name)
        ]

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        headers = {"content-type": "application/json"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        body = {"kind": "Status", "status": "Failure", "reason": "TooManyRequests", "message": "x", "code": 429}
        return Canned(status=429, body=json.dumps(body).encode(), headers=headers)

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        raise NotApplicable(NO_PRICE)

    def sell_nothing(self) -> None:
        for _, name in list(self.cloud.objects["nodes"].rows):
            self.cloud.node(name)["spec"]["unschedulable"] = True

    def vanish_offer(self, offer: Offer) -> None:
        raise NotApplicable("a Job whose nodes are gone waits for others; the provider gives it up after a while")

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        raise NotApplicable(NO_PRICE)

    def exhaust_capacity(self, offer: Offer) -> None:
        raise NotApplicable("a full cluster takes a Job and lets its pod wait; the provider gives it up after a while")

    def empty_balance(self) -> None:
        raise NotApplicable("a cluster has no balance")

    def exhaust_quota(self) -> None:
        self.cloud.quirks.quota_jobs = 0

    def break_auth(self) -> None:
        self.cloud.tokens.clear()

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("a pod runs only on nodes that have the labels that its Job asks for")

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_creation = 500

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = lag

    def list_only_part(self) -> None:
        self.add_machines([self.key()])
        self.cloud.quirks.page_rows = 1
        self.cloud.quirks.tokens_age = True

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.spoiled.add(machine_id.partition(":")[2])

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_running_job(key, {"spotd.dev/key": key}, {"spotd.dev/install": self.install})

    def add_foreign_machines(self) -> Sequence[str]:
        other = f"spotd-{self.install}2-j0b1-1"
        made = [
            self.cloud.add_running_job("nightly", {}, {}),
            self.cloud.add_running_job(other, {"spotd.dev/key": other}, {"spotd.dev/install": f"{self.install}2"}),
            self.cloud.add_running_job("my-notebook", {}, {"app": "notebook"}),
        ]
        return [f"{job['metadata']['name']}:{job['metadata']['uid']}" for job in made]

    def preempt(self, machine_id: str) -> None:
        self.cloud.evict(self._pod(machine_id), "PreemptionByScheduler", grace=timedelta(0))

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("a pod is never stopped and kept")

    def give_notice(self, machine_id: str) -> None:
        self.cloud.quirks.grace_used = timedelta(minutes=1)
        self.cloud.evict(self._pod(machine_id))

    def set_state(self, machine_id: str, state: OddState) -> None:
        pod = self._pod(machine_id)
        if state is OddState.UNHEARD_OF:
            pod["status"].update(phase="Meditating", containerStatuses=[])
        elif state is OddState.PROVISION_FAILED:
            self.cloud.machines.kill(pod["metadata"]["uid"])
            pod["status"].update(phase="Pending", fails=PodFailure.NO_CONTAINER.value)
        else:
            self.cloud.end_by_itself(pod)

    def make_private(self, image: str, login: RegistryLogin) -> None:
        self.cloud.private[image] = (login.username, login.password.reveal())

    def lose_contact(self, machine_id: str) -> None:
        self.cloud.lose_node(self._pod(machine_id)["spec"]["nodeName"])

    def true_balance(self) -> Balance:
        raise NotApplicable("a cluster has no balance")

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(machine_id.partition(":")[2])

    def _pod(self, machine_id: str) -> dict[str, Any]:
        self.cloud.advance()
        uid = machine_id.partition(":")[2]
        job = next(one for one in self.cloud.objects["jobs"].rows.values() if one["metadata"]["uid"] == uid)
        return self.cloud.pods_of(job)[0]


@contextmanager
def open_harness(folder: Path, *, quirks: KubeQuirks | None = None, **settings: Any) -> Iterator[KubernetesHarness]:
    """A fresh cluster of two nodes, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = KubeCloud(folder / "cloud", clock=clock, quirks=quirks)
    cloud.tokens[CANARY] = ADMIN
    cloud.add_node("big", gpus=8)
    cloud.add_node("small", gpus=2, product="Tesla-T4")
    cloud.add_node("cheap", gpus=4, **SPOT_LABEL)
    faults = Faults(KubeApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield KubernetesHarness(cloud, faults, served, folder, clock, settings)
    finally:
        cloud.shut_down()


Story = Callable[[KubernetesHarness, KubernetesProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: KubeQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its pods is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, KubernetesProvider)
                await story(h, provider)

        run_virtually(main)

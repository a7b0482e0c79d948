"""AWS for the conformance suite: the provider opened against the fake EC2, with every market knob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.aws.plugin import PLUGIN
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.gpus import aws_gpus, canonical
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import MICRO, AttemptKey, Balance, Market, MicroUsdPerHour, Offer, micro_usd
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Canned, Faults, Served, serving
from tests.fakes.aws import ACCESS_KEY, Ec2Api, Ec2Cloud, Phase, Quirks, classify

REGIONS = ("us-east-1", "us-west-2")
UNUSED_KINDS = ("g5g.xlarge", "g4ad.xlarge")


class AwsHarness(Harness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(self, cloud: Ec2Cloud, faults: Faults, served: Served, folder: Path, clock: FakeClock) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=f"{ACCESS_KEY}:{CANARY}")
        self.cloud = cloud
        self.fake_clock = clock
        self.changes: dict[str, Any] = {}
        """What of the provider's settings is not as usual."""

    def later(self, duration: timedelta) -> None:
        """It is `duration` later for everybody."""
        self.fake_clock.advance(duration)

    def settings(self) -> AwsSettings:
        usual = {"endpoint_url": self.served.url, "regions": REGIONS, "container": "none"}
        return AwsSettings.model_validate(usual | self.changes)

    def secrets(self) -> Sequence[str]:
        # The access key id is a name and travels in the open; the secret key signs and never travels at all.
        return [CANARY, *(secret for secret in super().secrets() if ":" not in secret)]

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        return [
            WorldMachine(
                machine_id=instance.instance_id,
                label=instance.label,
                exists=instance.phase.exists,
                running=instance.phase is Phase.RUNNING,
                market=Market.SPOT if instance.spot else Market.ON_DEMAND,
                price=self.cloud.costs(instance),
                start_script=instance.user_data or None,
                disk_gb=instance.volume_gb,
            )
            for instance in list(self.cloud.instances.values())
        ]

    def sold(self) -> Sequence[WorldOffer]:
        found = []
        for pool in sorted(self.cloud.offered):
            kind_name, _, zone = pool.partition(":")
            kind = self.cloud.kinds[kind_name]
            if kind_name in UNUSED_KINDS:
                continue
            known = aws_gpus(kind_name)
            gpu = known[0] if known else canonical("aws", kind.gpu, kind.mib)
            listed = micro_usd(self.cloud.on_demand_usd(kind, self.cloud.zones[zone].region))
            prices = {Market.SPOT: self.cloud.price_now(pool), Market.ON_DEMAND: MicroUsdPerHour(listed)}
            for market, price in prices.items():
                if price is not None:
                    found.append(
                        WorldOffer(
                            offer_id=f"{pool}:{market.value}",
                            gpu=gpu,
                            gpu_count=max(1, kind.gpus),
                            market=market,
                            price=price,
                        )
                    )
        return found

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        headers = {"content-type": "text/xml"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        body = (
            b"<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>Request limit exceeded.</Message>"
            b"</Error></Errors><RequestID>r</RequestID></Response>"
        )
        return Canned(status=503, body=body, headers=headers)

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        kind, zone, _ = offer_id.split(":")
        self.cloud.quirks.raw_prices[f"{kind}:{zone}"] = raw

    def sell_nothing(self) -> None:
        self.cloud.offered.clear()
        self.cloud.prices.clear()

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.offered.discard(offer.pool)

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        if offer.market is Market.ON_DEMAND:
            raise NotApplicable("AWS changes its on-demand price list every few months, not between poll and launch")
        self.cloud.set_price(offer.pool, f"{offer.gpu_price * factor / MICRO:.6f}")

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.quirks.pool_refusals[offer.pool] = ("InsufficientInstanceCapacity", 500, "no capacity")

    def empty_balance(self) -> None:
        raise NotApplicable("an AWS account has no balance; it is billed at the end of the month")

    def exhaust_quota(self) -> None:
        self.cloud.quirks.refuse_launch = ("MaxSpotInstanceCountExceeded", 400, "Max spot instance count exceeded")

    def break_auth(self) -> None:
        self.cloud.access_key = "AKIAANOTHERANOTHER"

    def sell_on_demand_instead(self) -> None:
        self.cloud.quirks.sells_on_demand = True

    def refuse_but_leave_machine(self) -> None:
        raise NotApplicable("RunInstances makes one machine or refuses; it never does both")

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = lag

    def list_only_part(self) -> None:
        self.cloud.quirks.failing_regions.add("us-east-1")

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_instance[machine_id] = {"instanceId": ""}

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_foreign({"spotd:install": str(self.install), "spotd:key": str(key)})

    def add_foreign_machines(self) -> Sequence[str]:
        tags: tuple[dict[str, str], ...] = (
            {},
            {"spotd:install": f"{self.install}2", "spotd:key": f"spotd-{self.install}2-j0b1-1"},
            {"Name": "my notebook"},
        )
        return [self.cloud.add_foreign(own).instance_id for own in tags]

    def preempt(self, machine_id: str) -> None:
        self.cloud.interrupt(machine_id, notice=False)

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("spotd asks AWS to terminate on interruption; nothing is kept stopped")

    def give_notice(self, machine_id: str) -> None:
        self.cloud.interrupt(machine_id)

    def set_state(self, machine_id: str, state: OddState) -> None:
        if state is OddState.UNHEARD_OF:
            self.cloud.quirks.edit_instance[machine_id] = {"instanceState": {"code": 99, "name": "meditating"}}
        elif state is OddState.PROVISION_FAILED:
            self.cloud.fail_at_launch(machine_id)
        else:
            self.cloud.shut_down_from_inside(machine_id)

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable("EC2 bills an instance whose status checks fail, and shows it as running")

    def true_balance(self) -> Balance:
        raise NotApplicable("an AWS account has no balance; it is billed at the end of the month")

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(machine_id)


@contextmanager
def open_harness(folder: Path, *, quirks: Quirks | None = None) -> Iterator[AwsHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = Ec2Cloud(folder / "cloud", clock=clock, quirks=quirks)
    cloud.stock_usual()
    faults = Faults(Ec2Api(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield AwsHarness(cloud, faults, served, folder, clock)
    finally:
        cloud.shut_down()

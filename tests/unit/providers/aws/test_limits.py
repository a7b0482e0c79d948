"""What AWS refuses is remembered as far as it goes: a pool, a zone, a subnet, or a family of types in a region."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import applied
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import launch_refused, launched
from spotd.daemon.calls import refusal_of
from spotd_jobs.spec.model import MarketChoice, Resources
from spotd_providers.aws.answers import family_of
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.errors import OfferGone, ProviderError
from spotd_providers.contract.values import LaunchRequest, Market, Offer
from spotd_providers.testkit.serve import Call
from tests.cases import every
from tests.fakes.aws import Ec2Cloud
from tests.fakes.aws.catalog import ZONES
from tests.fakes.aws.wire import Params
from tests.unit.core.builders import job
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import play

MINUTE = timedelta(minutes=1)
NOTED = (CooldownScope.TARGET, CooldownScope.JOB)
"""What is noted of each refusal besides: it keeps no other job away."""


class Buyer:
    """One job that wants any single GPU, the core that decides for it, and AWS that answers."""

    def __init__(self, h: AwsHarness, provider: AwsProvider, wanted: MarketChoice) -> None:
        self.h = h
        self.provider = provider
        self.tried: list[Offer] = []
        rules = ProviderPolicy(
            name=provider.name,
            fee_ppm=1_000_000,
            quote_ttl=timedelta(hours=9),
            reconcile_window=MINUTE,
            provision_timeout=MINUTE,
        )
        resources = Resources(min_vram_mb=15_000, gpu_count=1, disk_gb=10, market=wanted)
        owner = job(1, ceiling=99_000_000, resources=resources)
        policy = Policy(install=h.install, providers={provider.name: rules})
        self.world = World(policy=policy, jobs={owner.id: owner}, attempts={}, intents={})
        self.page: Any = None

    @property
    def now(self) -> datetime:
        return self.h.clock.now()

    async def poll(self) -> None:
        self.page = await self.provider.offers(self.h.query())

    async def try_once(self) -> Offer | ProviderError | None:
        """What the core bought, what AWS said to what it tried, or nothing because everything cools down."""
        if self.page is None:
            await self.poll()
        index = build_offer_index(self.page.offers)
        board = ProviderOffers(provider=self.provider.name, offer_index=index, at=self.page.at)
        plan = decide(self.world, MarketSnapshot(by_provider={self.provider.name: board}), self.now)
        if not plan.attempts:
            return None
        (attempt,) = plan.attempts.values()
        self.world = applied(self.world, plan)
        self.tried.append(attempt.quote.offer)
        try:
            made = await self.provider.launch(self._request(attempt))
        except ProviderError as exc:
            no = refusal_of(exc)
            assert no is not None
            said = launch_refused(self.world, attempt.id, no.failure, no.detail, self.now, no.retry_after, no.quota)
            self.world = applied(self.world, said)
            return exc
        self.world = applied(self.world, launched(self.world, attempt.id, made.instance, self.now))
        return attempt.quote.offer

    async def buy(self) -> Offer | None:
        """What it has at last; `None` when everything cools down."""
        for _ in range(40):
            done = await self.try_once()
            if done is None or isinstance(done, Offer):
                return done
            await self.h.clock.sleep(timedelta(seconds=2))
        raise AssertionError("it tries for ever")

    def kept_away(self) -> list[str]:
        """What every job leaves alone for a while."""
        return [c.subject for c in self.world.cooldowns if c.scope not in NOTED]

    def kinds_tried(self) -> list[tuple[str, str]]:
        return [(o.extra["type"].partition(".")[0], o.extra["zone"]) for o in self.tried]

    def _request(self, attempt: Attempt) -> LaunchRequest:
        return self.h.request(attempt.quote.offer, attempt.key, price_max=attempt.price_max)


def told(
    folder: Path,
    story: Callable[[Buyer], Any],
    wanted: MarketChoice = MarketChoice.SPOT,
    prepare: Callable[[Ec2Cloud], None] | None = None,
) -> None:
    async def main(h: AwsHarness, provider: AwsProvider) -> None:
        if prepare is not None:
            prepare(h.cloud)
        await story(Buyer(h, provider, wanted))

    play(folder, main)


def no_spot_for_g_in_the_east(cloud: Ec2Cloud) -> None:
    cloud.quirks.enforce_quotas = True
    cloud.quotas_in["us-east-1", "L-3819A6DF"] = 0.0


def test_a_used_up_quota_is_met_once_and_another_region_is_next(tmp_path: Path) -> None:
    async def story(buyer: Buyer) -> None:
        bought = await buyer.buy()
        assert bought is not None
        assert bought.region == "us-west-2"
        assert [offer.region for offer in buyer.tried] == ["us-east-1", "us-west-2"]

    told(tmp_path, story, prepare=no_spot_for_g_in_the_east)


def test_a_used_up_quota_of_spot_leaves_on_demand_of_the_same_types_alone(tmp_path: Path) -> None:
    def only_the_east(cloud: Ec2Cloud) -> None:
        no_spot_for_g_in_the_east(cloud)
        cloud.quotas_in["us-west-2", "L-3819A6DF"] = 0.0

    async def story(buyer: Buyer) -> None:
        bought = await buyer.buy()
        assert bought is not None
        assert bought.market is Market.ON_DEMAND
        assert [(o.region, o.market) for o in buyer.tried[:-1]] == [
            ("us-east-1", Market.SPOT),
            ("us-west-2", Market.SPOT),
        ]

    told(tmp_path, story, MarketChoice.AUTO, only_the_east)


def test_a_used_up_quota_is_tried_again_after_ever_longer_pauses(tmp_path: Path) -> None:
    def nowhere(cloud: Ec2Cloud) -> None:
        cloud.quirks.enforce_quotas = True
        cloud.quotas["L-3819A6DF"] = 0.0

    async def story(buyer: Buyer) -> None:
        assert await buyer.buy() is None
        assert len(buyer.tried) == 2, "once in each region"
        tried = []
        for _ in range(120):
            await buyer.h.advance(MINUTE)
            await buyer.buy()
            tried.append(len(buyer.tried))
        assert tried[9] > 4, "soon at first"
        assert tried[119] - tried[59] <= 2 * 4, "every quarter of an hour in each region later"
        buyer.h.cloud.quotas["L-3819A6DF"] = 64.0
        await buyer.h.advance(15 * MINUTE)
        assert isinstance(await buyer.try_once(), Offer)

    told(tmp_path, story, prepare=nowhere)


def test_a_limit_on_volumes_stops_the_whole_region(tmp_path: Path) -> None:
    def no_volumes(cloud: Ec2Cloud) -> None:
        for zone in ZONES[:3]:
            for kind in cloud.kinds:
                cloud.quirks.pool_refusals[f"{kind}:{zone.name}"] = ("VolumeLimitExceeded", 400, "no more volumes")

    async def story(buyer: Buyer) -> None:
        bought = await buyer.buy()
        assert bought is not None
        assert [offer.region for offer in buyer.tried] == ["us-east-1", "us-west-2"]
        assert buyer.kept_away() == ["us-east-1 volumes and addresses"], "on-demand, too"

    told(tmp_path, story, MarketChoice.AUTO, no_volumes)


def test_a_lack_of_capacity_cools_down_that_type_in_that_zone_only(tmp_path: Path) -> None:
    async def story(buyer: Buyer) -> None:
        await buyer.poll()
        first = min((o for o in buyer.page.offers if o.gpu == "T4" and o.gpu_count == 1), key=lambda o: o.gpu_price)
        buyer.h.exhaust_capacity(first)
        bought = await buyer.buy()
        assert bought is not None
        assert buyer.tried[0].pool == first.pool
        assert bought.pool != first.pool
        assert (bought.extra["type"], bought.region) == (first.extra["type"], first.region)
        assert buyer.kept_away() == [str(first.pool)]
        assert {c.scope for c in buyer.world.cooldowns} <= {CooldownScope.POOL, *NOTED}

    told(tmp_path, story)


def test_a_type_that_a_zone_does_not_have_is_not_asked_for_again_that_day(tmp_path: Path) -> None:
    def unsupported(cloud: Ec2Cloud) -> None:
        text = "Your requested instance type (g4dn.xlarge) is not supported in your requested Availability Zone"
        cloud.quirks.pool_refusals["g4dn.xlarge:us-east-1a"] = ("Unsupported", 400, text)

    async def story(buyer: Buyer) -> None:
        first = await buyer.try_once()
        assert isinstance(first, OfferGone)
        await buyer.h.advance(timedelta(hours=20))
        await buyer.poll()
        assert isinstance(await buyer.try_once(), Offer)
        assert [str(o.pool) for o in buyer.tried] == ["g4dn.xlarge:us-east-1a", "g4dn.xlarge:us-east-1b"]
        (cooling,) = (c for c in buyer.world.cooldowns if c.scope not in NOTED)
        assert timedelta(hours=3) < cooling.until - buyer.now < timedelta(hours=4)

    told(tmp_path, story, prepare=unsupported)


def subnets_asked(h: AwsHarness) -> list[str]:
    return [Params(request.body).get("SubnetId") for request in h.requests(Call.LAUNCH)]


def two_subnets_in_the_first_zone(h: AwsHarness) -> list[str]:
    """Only us-east-1a sells anything, and both its subnets may be launched in."""
    first = ZONES[0]
    for pool in [pool for pool in h.cloud.prices if not pool.endswith(first.name)]:
        del h.cloud.prices[pool]
        h.cloud.offered.discard(pool)
    return list(first.subnets)


BOTH_SUBNETS = tuple(subnet for zone in ZONES for subnet in zone.subnets)


def test_a_full_subnet_is_passed_over_and_another_of_its_zone_is_taken_at_once(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        big, small = two_subnets_in_the_first_zone(h)
        h.cloud.quirks.full_subnets.add(big)
        buyer = Buyer(h, provider, MarketChoice.SPOT)
        bought = await buyer.buy()
        assert bought is not None
        assert subnets_asked(h) == [big, small]
        assert {str(o.pool) for o in buyer.tried} == {str(bought.pool)}, "the pool itself is not to blame"
        other = next(o for o in buyer.page.offers if o.pool != bought.pool and o.market is Market.SPOT)
        await provider.launch(h.request(other))
        assert subnets_asked(h)[2:] == [small], "no other type of the zone is launched into the full one either"
        h.cloud.quirks.full_subnets.clear()
        await h.advance(timedelta(minutes=6))
        await provider.launch(h.request(other))
        assert subnets_asked(h)[3:] == [big]

    play(tmp_path, story, subnets=BOTH_SUBNETS)


def test_a_zone_whose_subnets_are_all_full_is_left_alone_for_minutes(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        both = two_subnets_in_the_first_zone(h)
        h.cloud.quirks.full_subnets.update(both)
        buyer = Buyer(h, provider, MarketChoice.SPOT)
        assert isinstance(await buyer.try_once(), OfferGone)
        await h.clock.sleep(timedelta(seconds=2))
        assert isinstance(await buyer.try_once(), OfferGone)
        assert subnets_asked(h) == both
        page = await provider.offers(h.query())
        assert not page.offers
        assert any("no subnet with free addresses in us-east-1a" in row.reason for row in page.rejected)
        h.cloud.quirks.full_subnets.clear()
        await h.advance(timedelta(minutes=6))
        await buyer.poll()
        assert isinstance(await buyer.try_once(), Offer)

    play(tmp_path, story, subnets=BOTH_SUBNETS)


@every(
    ("kind", "spot", "on_demand"),
    [
        ("g4dn.xlarge", "G", "G"),
        ("gr6.4xlarge", "G", "G"),
        ("g6f.large", "G", "G"),
        ("p3.2xlarge", "P2-P4", "P"),
        ("p4de.24xlarge", "P2-P4", "P"),
        ("p5en.48xlarge", "P5", "P"),
        ("p6-b200.48xlarge", "P6", "P"),
        ("trn1.2xlarge", "TRN", "TRN"),
    ],
)
def test_every_type_counts_against_the_quota_of_its_family(kind: str, spot: str, on_demand: str) -> None:
    assert family_of(kind, Market.SPOT) == spot
    assert family_of(kind, Market.ON_DEMAND) == on_demand

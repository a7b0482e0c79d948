"""Placement scores: asked seldom, put to the right zone, missing without harm, and part of the order of trying."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.aws.wire import Hardware, scores_of, sets_of_types
from spotd_providers.contract.values import Market, OfferPage, Power
from tests.cases import every
from tests.fakes.aws import Quirks
from tests.fakes.aws.wire import Params
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import play

WITHOUT = "ec2:GetSpotPlacementScores"


def scored(page: OfferPage) -> dict[str, int | None]:
    """By pool, the score of its spot offer."""
    return {o.pool: o.capacity_score for o in page.offers if o.market is Market.SPOT}


def questions(h: AwsHarness) -> list[Params]:
    asked = [Params(request.body) for request in h.requests()]
    return [params for params in asked if params.get("Action") == "GetSpotPlacementScores"]


def test_scores_reach_the_pools_of_their_zone_and_of_no_other_gpu(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        page = await provider.offers(h.query())
        found = scored(page)
        # Zone ids are not in the order of the names: use1-az6 is this account's us-east-1a.
        assert found["g5.xlarge:us-east-1a"] == 9
        assert found["g5.4xlarge:us-east-1c"] == 7
        assert found["g5.xlarge:us-west-2b"] == 8
        assert found["p5.48xlarge:us-east-1a"] is None, "one type alone would always be scored low"
        assert all(o.capacity_score is None for o in page.offers if o.market is Market.ON_DEMAND)
        for asked in questions(h):
            assert sorted(asked.many("InstanceType")) == ["g5.2xlarge", "g5.4xlarge", "g5.xlarge"]
            assert asked.get("TargetCapacity") == "1"
            assert asked.flag("SingleAvailabilityZone")
            assert len(asked.many("RegionName")) == 1

    play(tmp_path, story)


def test_the_same_few_questions_are_asked_every_twenty_minutes(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        for _ in range(5):
            await provider.offers(h.query())
        first = questions(h)
        assert len(first) == len(h.settings().regions)
        await h.advance(timedelta(minutes=21))
        h.cloud.quirks.scores["use1-az6"] = 2
        assert scored(await provider.offers(h.query()))["g5.xlarge:us-east-1a"] == 2
        again = questions(h)[len(first) :]
        assert {p.fingerprint() for p in again} == {p.fingerprint() for p in first}

    play(tmp_path, story)


def test_an_absent_permission_is_a_capability_with_its_reason_and_costs_no_offer(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        page = await provider.offers(h.query())
        assert page.complete
        assert len(page.offers) > 20
        assert set(scored(page).values()) == {None}
        said = provider.capabilities[Power.CAPACITY_SCORES]
        assert not said.available
        assert "allow ec2:GetSpotPlacementScores" in said.reason
        asked = len(questions(h))
        await provider.offers(h.query())
        assert len(questions(h)) == asked, "what is not allowed is not asked at every poll"
        h.cloud.quirks.allowed = None
        await h.advance(timedelta(hours=1, minutes=1))
        assert scored(await provider.offers(h.query()))["g5.xlarge:us-east-1a"] == 9
        assert provider.capabilities[Power.CAPACITY_SCORES].available

    play(tmp_path, story, Quirks(allowed=lambda action: action != WITHOUT))


def test_scores_that_fail_are_kept_for_a_while_and_cost_no_offer(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.offers(h.query())
        h.cloud.quirks.refusals["GetSpotPlacementScores"] = ("MaxConfigLimitExceeded", 400, "too many configurations")
        await h.advance(timedelta(minutes=21))
        page = await provider.offers(h.query())
        assert page.complete
        assert scored(page)["g5.xlarge:us-east-1a"] == 9
        await h.advance(timedelta(hours=1))
        page = await provider.offers(h.query())
        assert page.complete
        assert scored(page)["g5.xlarge:us-east-1a"] is None, "an old score says nothing"
        assert provider.capabilities[Power.CAPACITY_SCORES].available

    play(tmp_path, story)


def kind(name: str, gpu: str = "A10G", count: int = 1, sold: str = "spot") -> Hardware:
    return Hardware(
        instance_type=name,
        gpu=gpu,
        gpu_count=count,
        gpu_vram_mb=None,
        cpus=4,
        memory_mb=None,
        sold_as=frozenset({sold}),
    )


def test_only_sets_that_aws_scores_at_all_are_asked_for() -> None:
    kinds = [
        *(kind(f"g5.{n}xlarge") for n in (1, 2, 4)),
        *(kind(f"g5.{n}xlarge", count=4) for n in (12, 24)),
        *(kind(f"g6.{n}xlarge", gpu="L4", sold="on-demand") for n in (1, 2, 4)),
    ]
    assert sets_of_types(kinds) == [("g5.1xlarge", "g5.2xlarge", "g5.4xlarge")]


@every(
    "row",
    [
        {"AvailabilityZoneId": "use1-az6", "Score": 0},
        {"AvailabilityZoneId": "use1-az6", "Score": 11},
        {"AvailabilityZoneId": "use1-az6", "Score": True},
        {"AvailabilityZoneId": "use1-az6", "Score": "9"},
        {"AvailabilityZoneId": "use1-az9", "Score": 9},
        {"Region": "us-east-1", "Score": 9},
        {},
        None,
    ],
    ids=str,
)
def test_a_row_that_says_nothing_sound_of_a_zone_is_no_score(row: object) -> None:
    zones = {"use1-az6": "us-east-1a"}
    good = {"AvailabilityZoneId": "use1-az6", "Score": 4}
    assert scores_of([good], ["g5.xlarge"], zones) == {("g5.xlarge", "us-east-1a"): 4}
    assert scores_of([row], ["g5.xlarge"], zones) == {}

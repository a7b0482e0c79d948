"""A launch as EC2 sees it: one request, tagged, capped, idempotent, and found again whatever became of its answer."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.aws.doctor import client_token
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown, PriceMoved, RequestRejected, Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceId, InstanceRef, Market, MicroUsdPerHour
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.aws.wire import Params
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play


def sent(h: AwsHarness) -> Params:
    (request,) = h.requests(Call.LAUNCH)
    return Params(request.body)


def test_a_launch_says_everything_that_keeps_a_machine_from_costing_for_ever(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        request = h.request(offer, price_max=MicroUsdPerHour(200_001))
        await provider.launch(request)
        said = sent(h)
        assert said.get("InstanceInitiatedShutdownBehavior") == "terminate"
        assert said.get("ClientToken") == request.key
        assert said.get("InstanceMarketOptions.SpotOptions.MaxPrice") == "0.200001"
        assert said.get("InstanceMarketOptions.SpotOptions.SpotInstanceType") == "one-time"
        assert said.get("InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior") == "terminate"
        assert said.get("MetadataOptions.HttpTokens") == "required"
        assert said.get("MetadataOptions.HttpPutResponseHopLimit") == "2"
        assert said.get("BlockDeviceMapping.1.Ebs.DeleteOnTermination") == "true"
        assert said.get("BlockDeviceMapping.1.Ebs.VolumeSize") == "55"
        for made in ("instance", "volume", "network-interface", "spot-instances-request"):
            assert said.tags(made) == {"spotd:install": "lab", "spotd:key": request.key}
        assert not said.get("IamInstanceProfile.Arn")
        assert not said.get("IamInstanceProfile.Name")

    play(tmp_path, story)


def test_an_on_demand_launch_has_no_spot_options_and_no_spot_tags(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider, Market.ON_DEMAND)
        launched = await provider.launch(h.request(offer))
        assert launched.instance.market is Market.ON_DEMAND
        assert not sent(h).get("InstanceMarketOptions.MarketType")
        assert not sent(h).tags("spot-instances-request")
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer, price_max=MicroUsdPerHour(offer.gpu_price - 1)))

    play(tmp_path, story)


def test_capacity_that_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        h.exhaust_capacity(offer)
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == 1
        other = next(o for o in (await provider.offers(h.query())).offers if o.pool != offer.pool)
        await provider.launch(h.request(other))

    play(tmp_path, story)


def test_the_same_key_in_the_same_zone_is_the_same_machine(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = h.request(await cheapest(h, provider))
        first = (await provider.launch(request)).instance
        assert (await provider.launch(request)).instance.ref == first.ref
        changed = h.request(request.offer, request.key, start_script="echo another")
        with pytest.raises(OutcomeUnknown):
            await provider.launch(changed)
        assert len(h.live(request.key)) == 1

    play(tmp_path, story)


def test_a_machine_whose_tags_are_late_is_found_by_its_token(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.quirks.tag_lag = timedelta(minutes=3)
        request = h.request(await cheapest(h, provider))
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (found,) = await provider.find(request.key)
        assert found.key == request.key
        await h.advance(timedelta(minutes=4))
        assert [i.ref for i in (await provider.instances()).instances] == [found.ref]

    play(tmp_path, story)


def test_a_key_beyond_the_tokens_length_is_found_as_well(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        key = AttemptKey(f"spotd-lab-{'j' * 80}-1")
        assert len(client_token(key)) == 64
        assert client_token(key) != client_token(AttemptKey(f"spotd-lab-{'j' * 80}-2"))
        await provider.launch(h.request(await cheapest(h, provider), key))
        await h.settle()
        assert [i.key for i in await provider.find(key)] == [key]

    play(tmp_path, story)


def test_a_silent_region_hides_no_other_and_proves_no_absence(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        launched = (await provider.launch(h.request(await cheapest(h, provider)))).instance
        assert launched.ref.scope == "us-east-1"
        h.cloud.quirks.failing_regions.add("us-west-2")
        listing = await provider.instances()
        assert not listing.complete
        assert [i.ref for i in listing.instances] == [launched.ref]
        assert [i.ref for i in await provider.find(launched.key)] == [launched.ref]
        with pytest.raises(Unavailable, match="us-west-2"):
            await provider.find(h.key())
        page = await provider.offers(h.query())
        assert not page.complete
        assert {offer.region for offer in page.offers} == {"us-east-1"}

    play(tmp_path, story)


def test_a_reservation_without_its_machines_is_trouble_and_no_empty_list(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.launch(h.request(await cheapest(h, provider)))

        def hollow(true: Canned) -> Canned:
            body = true.body.replace(b"instancesSet>", b"otherSet>")
            return Canned(status=true.status, body=body, headers=true.headers)

        h.faults.edit(Call.LIST, hollow, times=100)
        listing = await provider.instances()  # the other region answers, with nothing
        assert not listing.complete
        assert not listing.instances

    play(tmp_path, story)


def test_another_ones_machine_is_never_ended(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        for foreign in h.add_foreign_machines():
            ref = InstanceRef(provider=provider.name, instance_id=InstanceId(foreign), scope="us-east-1")
            with pytest.raises(RequestRejected, match="tags of this installation"):
                await provider.terminate(ref)
        assert all(machine.exists for machine in h.machines())
        assert not h.requests(Call.TERMINATE)

    play(tmp_path, story)


def test_a_zone_without_a_subnet_is_rejected_with_that_reason(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.zones.pop("us-east-1c")
        for pool in [pool for pool in h.cloud.prices if pool.endswith("us-east-1c")]:
            del h.cloud.prices[pool]
            h.cloud.offered.discard(pool)
        page = await provider.offers(h.query())
        assert {o.extra["zone"] for o in page.offers} == {"us-east-1a", "us-east-1b", "us-west-2a", "us-west-2b"}
        reasons = {row.offer_id: row.reason for row in page.rejected}
        assert "AMD" in reasons["g4ad.xlarge"]
        assert "arm64" in reasons["g5g.xlarge"]
        west = [o for o in page.offers if o.region == "us-west-2"]
        assert {o.market for o in west} == {Market.SPOT, Market.ON_DEMAND}
        fraction = next(o for o in page.offers if o.extra["type"] == "g6f.large")
        assert (fraction.gpu, fraction.gpu_count, fraction.gpu_vram_mb) == ("L4_3", 1, 2861)

    play(tmp_path, story)

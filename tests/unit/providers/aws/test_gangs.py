"""Several machines that EC2 starts by one call: all or none, each with its rank, and one row for the whole."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.aws.doctor import client_token
from spotd_providers.aws.gangs import NODES_MAX, SHOWN_WITHIN
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.aws.wire import NODES_TAG
from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    Unavailable,
)
from spotd_providers.contract.provider import StartsGangs
from spotd_providers.contract.values import (
    AttemptKey,
    Instance,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    MicroUsdPerHour,
    Power,
)
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.serve import Call, Canned
from tests.cases import every
from tests.fakes.aws import FakeInstance, Phase, Quirks
from tests.fakes.aws.networks import EVERYWHERE, default_group, from_group
from tests.fakes.aws.wire import Params
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play

DEFAULT = default_group("vpc-0useast1")
MINUTE = timedelta(minutes=1)


async def several(
    h: AwsHarness, provider: AwsProvider, nodes: int = 2, market: Market = Market.SPOT, kind: str = ""
) -> LaunchRequest:
    offer = await cheapest(h, provider, market)
    if kind:
        page = await provider.offers(h.query())
        offer = next(one for one in page.offers if one.offer_id == f"{kind}:us-east-1a:{market.value}")
    return h.request(gang_of(offer, nodes))


async def row_of(provider: AwsProvider, key: AttemptKey) -> Instance:
    (found,) = [one for one in (await provider.instances()).instances if one.key == key]
    return found


def members(h: AwsHarness, key: AttemptKey) -> list[FakeInstance]:
    return [one for one in h.cloud.instances.values() if one.label == key]


def sent(h: AwsHarness) -> Params:
    return Params(h.requests(Call.LAUNCH)[-1].body)


def dropping(*indexes: int) -> Any:
    """An edit of an answer that leaves out the machines with these places in it."""

    def edit(true: Canned) -> Canned:
        head, *items = true.body.decode().split("<item><instanceId>")
        *_, tail = items[-1].rpartition("</item></instancesSet>")[1:]
        items[-1] = items[-1].partition("</item></instancesSet>")[0] + "</item>"
        kept = [item for place, item in enumerate(items) if place not in indexes]
        body = head + "".join(f"<item><instanceId>{item}" for item in kept) + "</instancesSet>" + tail
        return Canned(status=true.status, body=body.encode(), headers=true.headers)

    return edit


def test_one_call_asks_for_all_or_none_near_each_other_at_each_ones_price(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        assert isinstance(provider, StartsGangs)
        request = await several(h, provider, 3)
        made = (await provider.launch(request)).instance
        said = sent(h)
        assert (said.get("MinCount"), said.get("MaxCount")) == ("3", "3")
        assert said.get("ClientToken") == f"{request.key}/3"
        assert said.get("InstanceMarketOptions.SpotOptions.MaxPrice") == f"{request.price_max // 3 / 1e6:.6f}"
        for kind in ("instance", "volume", "network-interface", "spot-instances-request"):
            assert said.tags(kind) == {"spotd:install": "lab", "spotd:key": request.key, "spotd:nodes": "3"}
        zone = request.offer.extra["zone"]
        assert said.get("Placement.GroupName") == f"spotd-lab-{zone}"
        assert not said.get("NetworkInterface.1.DeviceIndex")
        assert made.ref.instance_id == members(h, request.key)[0].reservation
        assert made.market is Market.SPOT
        assert [one.launch_index for one in members(h, request.key)] == [0, 1, 2]

    play(tmp_path, story)


def test_a_zone_has_one_placement_group_of_the_install_however_many_are_launched(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        for _ in range(3):
            await provider.launch(await several(h, provider))
        groups = h.cloud.networks.placement_groups
        zone = (await cheapest(h, provider)).extra["zone"]
        assert list(groups) == [("us-east-1", f"spotd-lab-{zone}")]
        (group,) = groups.values()
        assert group["strategy"] == "cluster"
        assert group["tagSet"] == [{"key": "spotd:install", "value": "lab"}]
        groups.clear()  # as the user may delete it
        await provider.launch(await several(h, provider))
        assert len(groups) == 1

    play(tmp_path, story)


def test_a_placement_group_that_was_made_meanwhile_is_taken(tmp_path: Path) -> None:
    def without_rows(true: Canned) -> Canned:
        assert b"<groupName>spotd-lab-" in true.body
        body = re.sub(rb"<item>.*</item>", b"", true.body, flags=re.DOTALL)
        return Canned(status=true.status, body=body, headers=true.headers)

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.launch(await several(h, provider))
        request = await several(h, provider)
        h.faults.edit(Call.ACCOUNT, without_rows)
        await provider.launch(request)
        assert len(members(h, request.key)) == 2
        assert len(h.cloud.networks.placement_groups) == 1

    play(tmp_path, story)


def test_a_placement_group_that_ec2_does_not_know_yet_buys_nothing(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.quirks.refusals["CreatePlacementGroup"] = ("InvalidPlacementGroup.Duplicate", 400, "it exists")
        with pytest.raises(OfferGone, match="placement group") as caught:
            await provider.launch(await several(h, provider))
        assert caught.value.lasts is not None
        assert not h.machines()

    play(tmp_path, story)


def test_on_demand_ones_are_bought_by_the_same_call(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider, 2, Market.ON_DEMAND)
        made = (await provider.launch(request)).instance
        assert made.market is Market.ON_DEMAND
        assert not sent(h).get("InstanceMarketOptions.MarketType")
        assert sent(h).get("MinCount") == "2"
        await h.settle()
        assert (await row_of(provider, request.key)).state is InstanceState.RUNNING
        await provider.terminate(made.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_fewer_than_are_asked_for_are_none(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider, 3)
        h.cloud.quirks.room[str(request.offer.pool)] = 2
        with pytest.raises(NoCapacity):
            await provider.launch(request)
        assert not h.machines()
        assert await provider.find(request.key) == ()
        await provider.launch(await several(h, provider, 2))
        assert len(h.machines()) == 2

    play(tmp_path, story)


def test_the_quota_counts_every_machine(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.launch(await several(h, provider, 16))  # 4 vCPUs each of 64
        with pytest.raises(QuotaExceeded):
            await provider.launch(await several(h, provider, 2))
        assert len(h.machines()) == 16

    play(tmp_path, story, Quirks(enforce_quotas=True))


def test_so_many_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        with pytest.raises(ProviderError, match="64 machines at once are the most"):
            await provider.launch(await several(h, provider, NODES_MAX + 1))
        assert not h.requests(Call.LAUNCH)
        key = AttemptKey(f"spotd-lab-{'j' * 80}-1")
        tokens = {client_token(key, nodes) for nodes in range(1, NODES_MAX + 1)}
        assert {len(token) for token in tokens} == {64}
        assert len(tokens) == NODES_MAX

    play(tmp_path, story)


@every("long", [False, True])
def test_a_lost_answer_is_found_as_one_row_and_no_second_gang_is_bought(tmp_path: Path, long: bool) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.quirks.tag_lag = timedelta(minutes=3)
        key = AttemptKey(f"spotd-lab-{'j' * 80}-1") if long else h.key()
        request = h.request(gang_of(await cheapest(h, provider), 2), key)
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (found,) = await provider.find(request.key)
        assert (found.key, str(found.ref.instance_id)[:2]) == (key, "r-")
        # Bytes that are sent again, as after a crash, are the same gang.
        assert (await provider.launch(request)).instance.ref == found.ref
        assert len(members(h, key)) == 2
        await provider.terminate(found.ref)
        assert not h.live(key)

    play(tmp_path / str(long), story)


def test_the_row_costs_what_all_do_and_keeps_the_prices_of_the_past(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        h.cloud.set_price(str(request.offer.pool), "0.100000")
        made = (await provider.launch(request)).instance
        await h.advance(10 * MINUTE)
        h.cloud.set_price(str(request.offer.pool), "0.110000")
        await h.advance(20 * MINUTE)
        row = await row_of(provider, request.key)
        assert (row.ref, row.state, row.price) == (made.ref, InstanceState.RUNNING, 220_000)
        assert [price for _, price in row.past_prices][-2:] == [200_000, 220_000]

    play(tmp_path, story)


@every("lacks", ["clientToken", "tagSet"])
def test_either_the_token_or_the_tag_says_that_they_are_one(tmp_path: Path, lacks: str) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        for one in members(h, request.key):
            h.cloud.quirks.edit_instance[one.instance_id] = {lacks: None}
        (row,) = await provider.find(request.key)
        assert (row.ref, row.state) == (made.ref, InstanceState.PENDING)
        listing = await provider.instances()
        assert listing.complete
        assert [one.ref for one in listing.instances] == [made.ref]

    play(tmp_path / lacks, story)


@every(
    ("nodes", "long", "forged"), [(1, False, "64"), (1, True, "64"), (2, False, "64"), (2, True, "1"), (2, False, None)]
)
def test_what_somebody_writes_into_the_tag_changes_neither_number_nor_price(
    tmp_path: Path, nodes: int, long: bool, forged: str | None
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        key = AttemptKey(f"spotd-lab-{'j' * 80}-1") if long else h.key()
        offer = await cheapest(h, provider)
        made = (await provider.launch(h.request(gang_of(offer, nodes) if nodes > 1 else offer, key))).instance
        await h.settle()
        true = await row_of(provider, key)
        for one in members(h, key):
            kept = {name: value for name, value in one.tags.items() if name != NODES_TAG}
            one.tags = kept if forged is None else {**kept, NODES_TAG: forged}
        async with h.opened() as later:
            assert isinstance(later, AwsProvider)
            assert (await later.instances()).complete
            row = await row_of(later, key)
            assert (row.ref, row.state, row.price) == (made.ref, InstanceState.RUNNING, true.price)

    play(tmp_path / f"{nodes}{long}{forged}", story)


def test_without_a_limit_the_price_of_all_is_judged_before(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        h.cloud.set_price(str(request.offer.pool), f"{request.price_max / 1e6 * 0.6:.6f}")
        with pytest.raises(PriceMoved):
            await provider.launch(request)
        assert not h.machines()

    play(tmp_path, story, max_price="none")


def test_a_list_that_shows_some_of_them_is_not_complete_and_ends_none_wrongly(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider, 3)
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        first, second, third = members(h, request.key)
        h.cloud.quirks.unlisted = {first.instance_id}
        listing = await provider.instances()
        assert not listing.complete
        assert [one.state for one in listing.instances] == [InstanceState.UNKNOWN]
        (found,) = await provider.find(request.key)
        with pytest.raises(Unavailable, match="1 are not shown yet"):
            await provider.terminate(found.ref)
        assert [one.phase.exists for one in (first, second, third)] == [True, False, False]
        h.cloud.quirks.unlisted = set()
        await provider.terminate(found.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_what_was_shown_once_is_ended_though_no_list_shows_it_now(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider, 3)
        made = (await provider.launch(request)).instance
        h.cloud.quirks.unlisted = {one.instance_id for one in members(h, request.key)[:2]}
        listing = await provider.instances()
        assert not listing.complete
        await provider.terminate(made.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_one_that_a_list_leaves_out_once_is_not_taken_for_lost(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        await provider.launch(request)
        await h.advance(60 * MINUTE)
        assert (await provider.instances()).complete
        h.cloud.quirks.unlisted = {members(h, request.key)[1].instance_id}
        listing = await provider.instances()
        assert not listing.complete
        (row,) = listing.instances
        assert (row.state, row.notice_at) == (InstanceState.RUNNING, None)
        await h.advance(SHOWN_WITHIN)
        row = await row_of(provider, request.key)
        assert row.notice_at is not None
        assert row.detail == "machine 2 of 2 is lost, and all of them end"
        assert (await provider.instances()).complete

    play(tmp_path, story)


def test_what_has_ended_leaves_the_list_one_by_one_and_is_never_unknown_again(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        await h.settle()
        await provider.terminate(made.ref)
        await h.advance(MINUTE)
        assert (await row_of(provider, request.key)).state is InstanceState.GONE
        h.cloud.quirks.unlisted = {members(h, request.key)[0].instance_id}
        listing = await provider.instances()
        assert listing.complete
        assert [one.state for one in listing.instances] == [InstanceState.GONE]

    play(tmp_path, story)


def test_one_that_a_list_leaves_out_is_not_taken_for_gone_where_the_others_have_ended(
    tmp_path: Path,
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        await provider.launch(request)
        await h.advance(60 * MINUTE)
        assert (await provider.instances()).complete
        first, second = members(h, request.key)
        h.cloud.terminate([first.instance_id], "us-east-1")  # as in the console
        await h.advance(MINUTE)
        assert (await row_of(provider, request.key)).state is InstanceState.PAUSED
        h.cloud.quirks.unlisted = {second.instance_id}
        async with h.opened() as later:
            for one in (provider, provider, later):
                listing = await one.instances()
                assert [row.state for row in listing.instances] == [InstanceState.UNKNOWN]
                assert not listing.complete

    play(tmp_path, story)


def test_what_no_list_shows_yet_is_not_reported_as_ended_by_a_process_that_never_saw_it(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        async with h.opened() as later:
            h.cloud.quirks.unlisted = {one.instance_id for one in members(h, request.key)}
            with pytest.raises(Unavailable, match="does not show the machines"):
                await later.terminate(made.ref)
            assert h.live(request.key)
            h.cloud.quirks.unlisted = set()
            await later.terminate(made.ref)
            assert not h.live(request.key)
            await h.advance(2 * 60 * MINUTE)
        async with h.opened() as later:
            with pytest.raises(Unavailable):
                await later.terminate(made.ref)
            await h.advance(SHOWN_WITHIN)
            await later.terminate(made.ref)

    play(tmp_path, story)


@every("rank", [0, 1])
def test_the_interruption_of_one_is_announced_for_all_and_all_are_ended(tmp_path: Path, rank: int) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        await h.settle()
        taken, left = members(h, request.key)[rank], members(h, request.key)[1 - rank]
        h.cloud.interrupt(taken.instance_id)
        row = await row_of(provider, request.key)
        assert row.state is InstanceState.RUNNING
        assert row.notice_at is not None
        assert abs(row.notice_at - h.clock.now() - 2 * MINUTE) <= timedelta(seconds=1)
        await h.advance(2 * MINUTE)
        row = await row_of(provider, request.key)
        if rank == 0:
            assert (row.state, row.loss) == (InstanceState.PAUSED, Loss.PREEMPTED)
        else:
            assert row.state is InstanceState.RUNNING
            assert row.notice_at is not None
        assert left.phase is Phase.RUNNING
        await provider.terminate(made.ref)
        assert not h.live(request.key)
        row = await row_of(provider, request.key)
        # The other one was ended by us, so its time is billed: the row must not count as taken by EC2.
        assert row.state is InstanceState.ENDING
        assert row.loss is (Loss.HOST_LOST if rank == 0 else None)

    play(tmp_path / str(rank), story)


def test_all_that_ec2_takes_count_as_taken(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        await provider.launch(request)
        await h.settle()
        for one in members(h, request.key):
            h.cloud.interrupt(one.instance_id, notice=False)
        assert (await row_of(provider, request.key)).loss is Loss.PREEMPTED

    play(tmp_path, story)


def test_an_end_that_is_not_accepted_for_one_is_ordered_for_all_and_not_reported_as_done(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        await h.settle()
        h.faults.lose_answer(Call.TERMINATE)
        h.faults.answer(Call.TERMINATE, Canned(status=503, body=b"", headers={}))
        with pytest.raises(Unavailable):
            await provider.terminate(made.ref)
        await provider.terminate(made.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


@every("left_out", [(1,), (0,), (0, 1)])
def test_an_answer_with_fewer_is_undone_and_found_by_its_key(tmp_path: Path, left_out: tuple[int, ...]) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider, 3)
        h.faults.edit(Call.LAUNCH, dropping(*left_out))
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        shown = [one for place, one in enumerate(members(h, request.key)) if place not in left_out]
        assert not any(one.phase.exists for one in shown)
        for row in await provider.find(request.key):
            await provider.terminate(row.ref)
        assert not h.live(request.key)

    play(tmp_path / "-".join(map(str, left_out)), story)


def test_machines_without_an_order_are_ended_since_none_knows_its_rank(tmp_path: Path) -> None:
    def as_a_fleet(true: Canned) -> Canned:
        body = true.body.replace(b"<amiLaunchIndex>1<", b"<amiLaunchIndex>0<")
        return Canned(status=true.status, body=body, headers=true.headers)

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        h.faults.edit(Call.LAUNCH, as_a_fleet)
        with pytest.raises(ContractViolation, match="order"):
            await provider.launch(request)
        assert len(members(h, request.key)) == 2
        assert not h.live(request.key)

    play(tmp_path, story)


def test_a_restarted_daemon_knows_the_gang_by_its_list(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        await h.settle()
        async with h.opened() as again:
            assert isinstance(again, AwsProvider)
            assert (await row_of(again, request.key)).ref == made.ref
        async with h.opened() as again:
            await again.logs(made.ref, lines=1)  # type: ignore[attr-defined]  # a power of this provider
            await again.terminate(made.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


@every(
    ("inbound", "outbound", "way"),
    [
        ([], [EVERYWHERE], "from"),
        ([from_group("sg-0other")], [EVERYWHERE], "from"),
        ([{"ipProtocol": "tcp", "fromPort": 22, "toPort": 22, "ipRanges": [{"cidrIp": "0.0.0.0/0"}]}], [], "from"),
        ([{"ipProtocol": "-1", "ipRanges": [{"cidrIp": "10.0.0.0/8"}]}], [EVERYWHERE], "from"),
        ([from_group(DEFAULT)], [], "to"),
    ],
)
def test_a_group_that_keeps_them_apart_is_named_and_nothing_is_bought(
    tmp_path: Path, inbound: list[Any], outbound: list[Any], way: str
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.networks.rules[DEFAULT] = (inbound, outbound)
        with pytest.raises(NoCapacity, match=f"security group {DEFAULT} allows all traffic {way} itself"):
            await provider.launch(await several(h, provider))
        assert not h.machines()

    play(tmp_path / f"{way}{len(inbound)}{json.dumps(inbound).count('g')}", story)


def test_gangs_are_sold_until_the_groups_of_all_regions_keep_them_apart_and_again_once_one_does_not(
    tmp_path: Path,
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.networks.rules[DEFAULT] = ([], [EVERYWHERE])
        with pytest.raises(NoCapacity):
            await provider.launch(await several(h, provider))
        # In the other region they would reach each other.
        assert provider.capabilities[Power.GANG].available
        west = default_group("vpc-0uswest2")
        h.cloud.networks.rules[west] = ([], [])
        await h.advance(15 * MINUTE)
        await provider.offers(h.query())
        capability = provider.capabilities[Power.GANG]
        assert not capability.available
        assert DEFAULT in capability.reason
        line = next(one for one in await provider.check() if one.name == "us-east-1 gangs")
        assert line.ok, "one machine alone needs no rule"
        assert DEFAULT in line.detail
        del h.cloud.networks.rules[DEFAULT]
        await h.advance(15 * MINUTE)
        await provider.launch(await several(h, provider))
        assert len(h.machines()) == 2
        assert provider.capabilities[Power.GANG].available

    play(tmp_path, story)


@every(
    "rule",
    [
        from_group(DEFAULT),
        {"ipProtocol": "tcp", "fromPort": 0, "toPort": 65535, "groups": [{"groupId": DEFAULT}]},
        {"ipProtocol": "-1", "ipRanges": [{"cidrIp": "172.31.0.0/16"}]},
    ],
)
def test_what_lets_them_reach_each_other_is_enough(tmp_path: Path, rule: dict[str, Any]) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.networks.rules[DEFAULT] = ([rule], [EVERYWHERE])
        await provider.launch(await several(h, provider))
        assert len(h.machines()) == 2

    play(tmp_path / f"{len(json.dumps(rule))}", story)


BOTH_WAYS = ([from_group(DEFAULT)], [EVERYWHERE, from_group(DEFAULT)])


@every(
    ("kind", "private", "rules", "cards"),
    [
        ("p4d.24xlarge", False, BOTH_WAYS, 1),
        ("p4d.24xlarge", True, BOTH_WAYS, 4),
        ("p4d.24xlarge", True, ([from_group(DEFAULT)], [EVERYWHERE]), 0),
        ("g5.xlarge", False, BOTH_WAYS, 0),
    ],
)
def test_efa_is_attached_where_it_works_and_a_public_address_stays(
    tmp_path: Path, kind: str, private: bool, rules: Any, cards: int
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        h.cloud.networks.rules[DEFAULT] = rules
        request = await several(h, provider, 2, kind=kind)
        await provider.launch(request)
        said = sent(h)
        names = [f"NetworkInterface.{card + 1}" for card in range(cards)]
        assert [said.get(f"{name}.InterfaceType") for name in names] == ["efa"] * cards
        assert [said.get(f"{name}.NetworkCardIndex") for name in names] == [str(card) for card in range(cards)]
        assert not said.get(f"NetworkInterface.{cards + 1}.DeviceIndex")
        assert all(said.many(f"{name}.SecurityGroupId") == [DEFAULT] for name in names)
        assert all(said.get(f"{name}.DeleteOnTermination") == "true" for name in names)
        assert bool(said.get("SubnetId")) == (cards == 0)
        public = [said.get(f"{name}.AssociatePublicIpAddress") for name in names]
        assert public == ["" if private else "true"] * cards

    subnets: dict[str, Any] = {"subnets": ["subnet-0use1az6b"]} if private else {}
    play(tmp_path / f"{kind}{private}{len(rules[1])}", story, **subnets)


@every("action", ["ec2:CreatePlacementGroup", "ec2:DescribePlacementGroups", "ec2:DescribeSecurityGroups"])
def test_an_old_policy_costs_the_gangs_and_no_launch_of_one_machine(tmp_path: Path, action: str) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        with pytest.raises(NoCapacity, match="does not allow"):
            await provider.launch(await several(h, provider))
        assert provider.capabilities[Power.GANG].available == (action != "ec2:DescribeSecurityGroups")
        await provider.launch(h.request(await cheapest(h, provider)))
        assert len(h.machines()) == 1

    play(tmp_path / action.partition(":")[2], story, Quirks(allowed=lambda asked: asked != action))


def test_a_placement_that_the_policy_does_not_allow_refuses_no_key(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        refusal = ("UnauthorizedOperation", 403, "not authorized to perform ec2:RunInstances on placement-group/x")
        h.cloud.quirks.refusals["RunInstances"] = refusal
        with pytest.raises(NoCapacity, match="placement-group/x; attach the least policy"):
            await provider.launch(request)
        with pytest.raises(AuthFailed):
            await provider.launch(h.request(await cheapest(h, provider)))

    play(tmp_path, story)


def test_each_is_billed_by_itself_a_minute_at_least(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        request = await several(h, provider)
        made = (await provider.launch(request)).instance
        await h.advance(timedelta(seconds=25))
        h.machines()
        await provider.terminate(made.ref)
        bills = [h.cloud.billed(one.instance_id) for one in members(h, request.key)]
        one_minute = MicroUsdPerHour(request.offer.gpu_price // 2) // 60
        assert len(bills) == 2
        assert all(bill >= one_minute for bill in bills)

    play(tmp_path, story)

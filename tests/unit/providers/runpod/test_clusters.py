"""Several machines as one at RunPod: instant clusters, priced, bought, found, watched, billed and ended as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    NoCapacity,
    NotSupported,
    OutcomeUnknown,
    PriceMoved,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import (
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Loss,
    Offer,
    Power,
    RegistryLogin,
    Secret,
)
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.runpod.wire import RunpodSettings
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.runpod import Failure, Phase, Quirks
from tests.fakes.runpod.clusters import NETWORK_PRICE, Cluster
from tests.unit.providers.runpod import stories
from tests.unit.providers.runpod.harness import RunpodHarness

MANY = 5000
H100 = "NVIDIA H100 80GB HBM3"


def play(folder: Path, story: stories.Story, quirks: Quirks | None = None, **settings: Any) -> None:
    quirks = quirks or Quirks(requests_a_minute=MANY)
    stories.play(folder, story, quirks, **{"cluster_gpu_counts": (2,), **settings})


async def pair(h: RunpodHarness, provider: RunpodProvider, nodes: int = 2) -> Offer:
    """The offer of so many H100 machines as one."""
    page = await provider.offers(h.query())
    (found,) = (one for one in page.offers if one.nodes_min > 1 and one.extra["gpu"] == H100)
    return gang_of(found, nodes)


async def rent(h: RunpodHarness, provider: RunpodProvider, nodes: int = 2) -> tuple[LaunchRequest, Cluster]:
    """A cluster that is up."""
    request = h.request(await pair(h, provider, nodes), start_script="echo up $SPOTD_NODE_RANK; exec sleep 600")
    launched = await provider.launch(request)
    await h.settle()
    h.cloud.advance()
    await provider.instances()
    return request, h.cloud.clusters.by_id[launched.instance.ref.instance_id]


async def the_row(provider: RunpodProvider, request: LaunchRequest) -> Instance:
    listing = await provider.instances()
    (row,) = listing.instances
    assert (listing.complete, row.key, row.ref.scope) == (True, request.key, "clusters")
    return row


# Prices and purchases.


def test_a_cluster_has_the_price_of_its_own_catalogue_and_pods_are_sold_alone(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offers = [one for one in (await provider.offers(h.query())).offers if one.extra["gpu"] == H100]
        assert all(one.ends_itself == (one.nodes_min == 1) for one in offers)
        prices = {(one.gpu_count, one.nodes_min, one.nodes_max): one.gpu_price for one in offers}
        assert prices == {(1, 1, 1): 2_990_000, (2, 1, 1): 5_980_000, (2, 2, 250): 6_580_000}
        assert len({one.pool for one in offers}) == 3

    play(tmp_path, story)


def test_what_the_network_costs_by_the_bill_is_in_the_price_where_the_config_says_so(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offers = (await provider.offers(h.query())).offers
        assert {one.storage_fixed for one in offers if one.nodes_min == 2} == {120_000}
        assert {one.storage_fixed for one in offers if one.nodes_min == 1} == {0}

    play(tmp_path, story, cluster_network=0.12)


def test_one_request_buys_all_and_their_pods_state_the_price(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await pair(h, provider, 3))
        launched = await provider.launch(request)
        assert launched.instance.price == 3 * 6_580_000 == request.offer.gpu_price
        (sent,) = h.requests(Call.LAUNCH)
        body = json.loads(sent.body)
        assert sent.path == "/v2/clusters"
        assert body["compute"] == {"gpuTypeId": H100, "gpuCountPerPod": 2, "podCount": 3}
        assert set(body) == {"name", "type", "image", "disk", "compute", "args"}
        assert body["name"] == request.key

    play(tmp_path, story, registry="reg1")


def test_a_cluster_whose_pods_cost_more_than_was_agreed_is_ended_at_once(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await pair(h, provider))
        h.cloud.quirks.cost_factor = 1.02
        with pytest.raises(PriceMoved):
            await provider.launch(request)
        assert not h.live()

    play(tmp_path, story)


def test_a_cluster_that_shows_its_price_late_is_judged_once_it_is_listed(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await pair(h, provider))
        h.cloud.quirks.cost_factor, h.cloud.quirks.list_lag = 1.5, timedelta(minutes=1)
        assert (await provider.launch(request)).instance.price is None
        await h.advance(timedelta(minutes=2))
        row = await the_row(provider, request)
        assert (row.state, row.loss) == (InstanceState.ENDING, Loss.PROVISION_FAILED)
        assert not h.live()

    play(tmp_path, story)


def test_no_room_for_all_in_one_data_centre_is_no_capacity_and_leaves_none(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await pair(h, provider, 5)
        h.cloud.gpus[H100].free = {"US-KS-2": 4, "EU-RO-1": 4}
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        assert not h.machines()

    play(tmp_path, story)


def test_an_image_with_a_login_is_refused_with_the_reason_before_anything_is_sent(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        login = RegistryLogin(server="ghcr.io", username="me", password=Secret("canary-password"))
        with pytest.raises(NotSupported, match="no login of a private registry"):
            await provider.launch(h.request(await pair(h, provider), login=login))
        assert not h.launch_calls()

    play(tmp_path, story)


# Found, whatever became of the answer.


def test_a_cluster_whose_answer_was_lost_is_found_by_its_name_and_a_doubled_one_too(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await pair(h, provider))
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (found,) = await provider.find(request.key)
        assert found.ref.scope == "clusters"
        assert (await provider.find(h.key())) == ()
        await provider.launch(request)
        doubled = await provider.find(request.key)
        assert len({one.ref for one in doubled}) == 2
        for one in doubled:
            await provider.terminate(one.ref)
        assert not h.live()
        assert await provider.find(request.key) == ()

    play(tmp_path, story)


def test_pods_of_clusters_are_no_machines_and_none_of_them_is_ended_alone(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        for pod in cluster.pods.values():
            pod.name = request.key  # whatever RunPod calls them
        row = await the_row(provider, request)
        assert row.ref.instance_id == cluster.cluster_id
        for pod in cluster.pods.values():
            with pytest.raises(RequestRejected):
                await provider.terminate(InstanceRef(provider=PROVIDER, instance_id=InstanceId(pod.pod_id)))
        assert not h.requests(Call.TERMINATE)

    play(tmp_path, story)


def test_other_clusters_of_the_account_are_neither_shown_nor_ended(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        for name in ("my cluster", f"spotd-{h.install}2-j0b1-1", "untitled"):
            cluster = h.cloud.clusters.add_foreign(name)
            with pytest.raises(RequestRejected, match="does not carry"):
                await provider.terminate(
                    InstanceRef(provider=PROVIDER, instance_id=InstanceId(cluster.cluster_id), scope="clusters")
                )
        listing = await provider.instances()
        assert (listing.complete, listing.instances) == (True, ())
        assert not h.requests(Call.TERMINATE)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "spoiled", ["not a row", {"compute": "large"}, {"pods": None}, {"pods": {"byStatus": {"RUNNING": "all"}}}]
)
def test_a_row_that_cannot_be_read_is_still_a_machine_of_ours_or_makes_the_list_incomplete(
    spoiled: Any, tmp_path: Path
) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        h.cloud.quirks.edit_cluster[cluster.cluster_id] = spoiled
        listing = await provider.instances()
        if isinstance(spoiled, str):
            assert not listing.complete
        else:
            (row,) = listing.instances
            assert (row.key, row.ref.instance_id) == (request.key, cluster.cluster_id)
            assert row.state is InstanceState.UNKNOWN

    play(tmp_path, story)


def test_a_list_without_the_clusters_proves_nothing(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offers = (await provider.offers(h.query())).offers
        alone = await provider.launch(h.request(min(offers, key=lambda one: one.gpu_price)))
        h.cloud.quirks.refuses_clusters = 500
        listing = await provider.instances()
        assert ([one.ref for one in listing.instances], listing.complete) == ([alone.instance.ref], False)
        assert await provider.find(alone.instance.key)
        with pytest.raises(Unavailable):
            await provider.find(h.key())

    play(tmp_path, story)


# A key that may not use clusters.


def test_a_key_without_clusters_works_as_before_and_the_power_is_missing_with_the_reason(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await pair(h, provider)
        h.cloud.quirks.refuses_clusters = 403
        assert (await provider.instances()).complete
        missing = provider.capabilities[Power.GANG]
        assert (missing.available, "this key may not use clusters" in missing.reason) == (False, True)
        with pytest.raises(NotSupported, match="may not use clusters"):
            await provider.launch(h.request(offer))
        page = await provider.offers(h.query())
        assert page.complete
        assert {one.nodes_min for one in page.offers} == {1}
        h.cloud.quirks.refuses_clusters = 0
        assert (await provider.instances()).complete
        assert provider.capabilities[Power.GANG].available

    play(tmp_path, story)


def test_a_key_that_lost_its_clusters_proves_nothing_of_them(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await pair(h, provider))
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        h.cloud.quirks.refuses_clusters = 403
        assert not (await provider.instances()).complete
        with pytest.raises(Unavailable):
            await provider.find(request.key)

    play(tmp_path, story)


def test_forbidden_creates_of_clusters_say_nothing_about_the_key(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await pair(h, provider)
        h.cloud.quirks.refuses_create = (403, "access denied")
        for number in range(4):
            other = replace(offer, offer_id=f"{offer.offer_id}{number}")  # type: ignore[arg-type]  # a NewType
            with pytest.raises(NoCapacity, match="in clusters"):
                await provider.launch(h.request(other))

    play(tmp_path, story)


@pytest.mark.parametrize(
    "settings",
    [{"cluster_gpu_counts": ()}, {"secure": False}, {"cuda_min": "12.4"}, {"override_entrypoint": True}],
)
def test_settings_that_no_cluster_can_be_asked_for_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        assert not provider.capabilities[Power.GANG].available
        assert {one.nodes_min for one in (await provider.offers(h.query())).offers} == {1}
        assert (await provider.instances()).complete

    play(tmp_path, story, **settings)
    assert RunpodSettings(**{"cluster_gpu_counts": (2,), **settings}).no_clusters


def test_the_doctor_says_whether_the_key_may_use_clusters(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        lines = {line.name: line for line in await provider.check()}
        assert (lines["clusters"].ok, lines["clusters"].detail) == (True, "can list clusters, 0 there")
        h.cloud.quirks.refuses_clusters = 403
        lines = {line.name: line for line in await provider.check()}
        assert [name for name, line in lines.items() if not line.ok] == ["clusters"]
        assert "cluster_gpu_counts" in lines["clusters"].hint

    play(tmp_path, story)


# Its life.


def test_a_cluster_waits_until_all_of_its_pods_run(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.quirks.late_ranks = {1: timedelta(minutes=8)}
        request, _ = await rent(h, provider)
        row = await the_row(provider, request)
        assert (row.state, row.notice_at, row.price) == (InstanceState.PENDING, None, None)
        await h.advance(timedelta(minutes=6))
        row = await the_row(provider, request)
        assert (row.state, row.price) == (InstanceState.RUNNING, request.offer.gpu_price)

    play(tmp_path, story)


def test_a_pod_that_fails_before_all_have_run_fails_the_whole(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.fail_next_start(H100, Failure.CONTAINER)
        request, _ = await rent(h, provider)
        row = await the_row(provider, request)
        assert (row.state, row.loss, row.billing) == (InstanceState.PAUSED, Loss.PROVISION_FAILED, Billing.FULL)
        assert row.detail == "1 of its 2 pods run"

    play(tmp_path, story)


@pytest.mark.parametrize("how", ["stopped", "gone", "restarted"])
def test_one_lost_pod_is_a_notice_of_the_whole_and_the_first_one_lost_is_its_end(how: str, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider, 3)

        def lose(rank: int) -> None:
            pod = cluster.pods[rank]
            h.cloud.quirks.restart_after = timedelta(hours=9)
            if how == "restarted":
                h.cloud.machines.kill(pod.pod_id)
                h.cloud.advance()
                assert pod.phase is Phase.STARTING
            elif how == "stopped":
                h.cloud.lose_host(pod.pod_id)
            else:
                h.cloud.end_pod(pod, "its host is gone")

        assert (await the_row(provider, request)).notice_at is None
        lose(2)
        row = await the_row(provider, request)
        assert (row.state, row.notice_at) == (InstanceState.RUNNING, h.clock.now())
        assert row.detail == "2 of its 3 pods run, and all of them end"
        await h.advance(timedelta(minutes=1))
        again = await the_row(provider, request)
        assert again.notice_at == row.notice_at
        lose(0)
        row = await the_row(provider, request)
        assert (row.state, row.loss, row.billing) == (InstanceState.PAUSED, Loss.HOST_LOST, Billing.FULL)
        await provider.terminate(row.ref)
        assert not h.live()

    play(tmp_path, story)


def test_a_process_that_never_saw_all_pods_takes_an_old_cluster_in_part_for_one_that_lost_some(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        h.cloud.lose_host(cluster.pods[1].pod_id)
        await h.advance(timedelta(hours=1))
        async with h.opened() as later:
            assert isinstance(later, RunpodProvider)
            row = await the_row(later, request)
            assert (row.state, row.notice_at) == (InstanceState.RUNNING, h.clock.now())

    play(tmp_path, story)


def test_a_cluster_that_is_found_late_and_still_starts_has_lost_nothing(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.quirks.starting = timedelta(minutes=50)
        request = h.request(await pair(h, provider), start_script="exec sleep 600")
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        await h.advance(timedelta(minutes=30))
        async with h.opened() as later:
            assert isinstance(later, RunpodProvider)
            row = await the_row(later, request)
            assert (row.state, row.loss, row.billing) == (InstanceState.PENDING, None, Billing.FULL)
            await h.advance(timedelta(minutes=25))
            row = await the_row(later, request)
            assert (row.state, row.notice_at) == (InstanceState.RUNNING, None)

    play(tmp_path, story)


def test_a_word_that_was_never_documented_proves_no_loss(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        pods = {"total": 2, "byStatus": {"RUNNING": 1, "MEDITATING": 1}}
        h.cloud.quirks.edit_cluster[cluster.cluster_id] = {"pods": pods}
        row = await the_row(provider, request)
        assert (row.state, row.notice_at, "MEDITATING" in row.detail) == (InstanceState.UNKNOWN, None, True)

    play(tmp_path, story)


def test_a_row_that_counts_no_pod_and_whose_first_one_runs_stops_no_meter(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        h.cloud.quirks.edit_cluster[cluster.cluster_id] = {"pods": {"total": 2, "byStatus": {}}}
        row = await the_row(provider, request)
        assert (row.state, row.billing) == (InstanceState.RUNNING, Billing.FULL)

    play(tmp_path, story)


def test_an_image_that_the_first_pod_cannot_pull_is_named(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.fail_next_start(H100, Failure.IMAGE)
        request, _ = await rent(h, provider)
        await h.advance(timedelta(minutes=3))
        row = await the_row(provider, request)
        assert (row.state, row.loss) == (InstanceState.PAUSED, Loss.IMAGE_ERROR)
        assert "layer does not exist" in row.detail

    play(tmp_path, story)


def test_log_and_shell_are_those_of_the_first_pod(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        async with h.opened() as later:
            assert isinstance(later, RunpodProvider)
            ref = InstanceRef(provider=PROVIDER, instance_id=InstanceId(cluster.cluster_id), scope="clusters")
            assert list(await later.logs(ref, lines=5)) == ["up 0"]
            assert (await later.shell(ref)).user.startswith(cluster.pods[0].pod_id)
            foreign = h.cloud.clusters.add_foreign("theirs")
            with pytest.raises(RequestRejected):
                await later.logs(replace(ref, instance_id=InstanceId(foreign.cluster_id)), lines=5)
        assert request.key

    play(tmp_path, story)


# Its end and its bill.


def test_a_deletion_that_fails_is_no_end_and_one_whose_answer_fails_is_seen_to_be_one(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, cluster = await rent(h, provider)
        ref = (await the_row(provider, request)).ref
        error = Canned(status=500, body=b'{"title":"Internal Server Error","status":500,"detail":"oops"}')
        h.faults.answer(Call.TERMINATE, error, times=100)
        with pytest.raises(Unavailable):
            await provider.terminate(ref)
        assert cluster.exists
        h.faults.clear()
        h.faults.answer(Call.TERMINATE, error, times=100, after_effect=True)
        await provider.terminate(ref)
        assert not h.live()
        assert {sent.path for sent in h.requests(Call.TERMINATE)} == {f"/v2/clusters/{cluster.cluster_id}"}

    play(tmp_path, story)


def test_a_deletion_that_had_no_effect_is_repeated(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request, _ = await rent(h, provider)
        await provider.terminate((await the_row(provider, request)).ref)
        assert not h.live()

    play(tmp_path, story, Quirks(undead=1, requests_a_minute=MANY))


def test_pods_that_outlive_their_cluster_stay_one_machine_of_ours_until_they_are_gone(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.quirks.surviving_ranks = frozenset({1})
        request, cluster = await rent(h, provider)
        await provider.terminate((await the_row(provider, request)).ref)
        async with h.opened() as later:
            assert isinstance(later, RunpodProvider)
            row = await the_row(later, request)
            assert (row.state, row.billing) == (InstanceState.UNKNOWN, Billing.FULL)
            assert row.detail == "RunPod lists this cluster no more, and still 1 of its pods"
            await later.terminate(row.ref)
            h.cloud.end_pod(cluster.pods[1], "at last")
            assert (await later.instances()).instances == ()

    play(tmp_path, story)


def test_the_bill_of_a_cluster_has_its_network_and_clusters_are_billed_only_where_there_was_one(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        since = h.clock.now() - timedelta(hours=2)
        await provider.charges(since, h.clock.now())
        assert [sent.path for sent in h.requests(Call.ACCOUNT)] == ["/v2/billing/pods"]
        request, cluster = await rent(h, provider)
        await h.advance(timedelta(hours=3))
        await provider.terminate((await the_row(provider, request)).ref)
        charges = await provider.charges(since, h.clock.now() + timedelta(hours=1))
        assert {(row.key, row.instance_id) for row in charges} == {(request.key, cluster.cluster_id)}
        by_kind = {kind: sum(row.amount for row in charges if row.kind == kind) for kind in ("gpu", "disk", "network")}
        assert set(by_kind) == {row.kind for row in charges}
        assert sum(by_kind.values()) == pytest.approx(h.billed(cluster.cluster_id), abs=20)
        hours = timedelta(hours=3, minutes=5) / timedelta(hours=1)
        assert by_kind["network"] == pytest.approx(2 * NETWORK_PRICE * hours, rel=0.01)
        async with h.opened() as later:
            assert isinstance(later, RunpodProvider)
            assert await later.charges(since, h.clock.now() + timedelta(hours=1)) == charges

    play(tmp_path, story)


def test_an_account_without_money_loses_its_clusters_altogether(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        await rent(h, provider)
        h.empty_balance()
        listing = await provider.instances()
        assert (listing.complete, listing.instances) == (True, ())

    play(tmp_path, story)

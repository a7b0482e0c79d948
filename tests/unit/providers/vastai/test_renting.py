"""Life with a vast.ai machine: seen, outbid, resumed, rebid, billed, logged, ended."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.errors import AuthFailed, ContractViolation, RequestRejected
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerHour,
    micro_usd,
)
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import Ask, Failure, Phase, Quirks
from tests.unit.providers.local.waiting import until
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import Story, cheapest, play


def test_a_listing_of_many_pages_is_complete_and_one_with_a_lost_page_is_not(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        keys = [h.key() for _ in range(60)]
        h.add_machines(keys)
        h.add_foreign_machines()
        listing = await provider.instances()
        assert listing.complete
        assert sorted(i.key for i in listing.instances) == sorted(keys)
        assert len(h.requests(Call.LIST)) == 3

        def first_page_only(true: Canned) -> Canned:
            h.faults.answer(Call.LIST, Canned(status=503), times=9)
            return true

        h.faults.edit(Call.LIST, first_page_only)
        partial = await provider.instances()
        assert not partial.complete
        assert len(partial.instances) == 25

    play(tmp_path, story)


def test_a_listing_that_counts_more_than_it_shows_is_incomplete(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.add_machines([h.key()])
        h.cloud.quirks.total_instances = 2
        assert not (await provider.instances()).complete

    play(tmp_path, story)


@pytest.mark.parametrize("scheduling", [False, True])
def test_an_outbid_machine_is_paused_bills_its_disk_and_wakes_up_by_itself(tmp_path: Path, scheduling: bool) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        key = (await provider.launch(h.request(offer, start_script="echo booted; sleep 600"))).instance.key
        await h.settle()
        (running,) = await provider.find(key)
        assert running.state is InstanceState.RUNNING
        machine = running.ref.instance_id
        assert h.cloud.machines.alive(machine)
        h.pause(machine)
        (paused,) = await provider.find(key)
        assert (paused.state, paused.loss) == (InstanceState.PAUSED, Loss.OUTBID)
        assert not h.cloud.machines.alive(machine)
        before = h.billed(machine)
        await h.advance(timedelta(hours=720))
        disk = micro_usd(0.15) * 20
        assert h.billed(machine) - before == pytest.approx(disk, rel=0.01)
        h.cloud.set_min_bid(int(offer.extra["ask"]), 0.001)
        await h.settle()
        (awake,) = await provider.find(key)
        assert awake.state is InstanceState.RUNNING
        assert h.cloud.machines.status(machine).boots == 2
        await provider.terminate(awake.ref)
        assert not h.cloud.machines.alive(machine)
        ended = h.billed(machine)
        await h.advance(timedelta(hours=10))
        assert h.billed(machine) == ended

    # The contract must outlive the month in which its disk is billed.
    play(tmp_path, _with_long_contracts(story), Quirks(outbid_as_scheduling=scheduling))


def _with_long_contracts(story: Story) -> Story:
    async def longer(h: VastHarness, provider: VastProvider) -> None:
        for ask in h.cloud.asks.values():
            ask.duration_s = 365 * 86400.0
        await story(h, provider)

    return longer


def test_a_contract_whose_time_is_over_is_expired_not_outbid(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        key = (await provider.launch(h.request(await cheapest(h, provider)))).instance.key
        await h.advance(timedelta(days=31))
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.EXPIRED)

    play(tmp_path, story)


def test_machines_stopped_for_want_of_credit_are_not_called_outbid(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        key = (await provider.launch(h.request(await cheapest(h, provider)))).instance.key
        await h.settle()
        h.empty_balance()
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.BALANCE)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("failure", "state", "loss"),
    [
        (Failure.OCI, InstanceState.PAUSED, Loss.PROVISION_FAILED),
        (Failure.PULL, InstanceState.PAUSED, Loss.IMAGE_ERROR),
        (Failure.STUCK, InstanceState.PENDING, None),
    ],
)
def test_a_boot_that_fails_says_why(tmp_path: Path, failure: Failure, state: InstanceState, loss: Loss | None) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.cloud.fail_next_boot(int(offer.extra["ask"]), failure)
        key = (await provider.launch(h.request(offer))).instance.key
        await h.settle()
        (seen,) = await provider.find(key)
        assert (seen.state, seen.loss) == (state, loss)

    play(tmp_path, story)


@pytest.mark.parametrize("word", ["offline", "unknown"])
def test_a_host_that_is_silent_proves_nothing(tmp_path: Path, word: str) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        await h.settle()
        h.cloud.advance()
        h.cloud.lose_contact(int(launched.instance.ref.instance_id), word)
        listing = await provider.instances()
        assert listing.complete
        assert [i.state for i in listing.instances] == [InstanceState.UNKNOWN]

    play(tmp_path, story)


def test_a_bad_key_is_never_taken_for_a_machine_that_is_gone(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        h.break_auth()
        for call in (
            provider.terminate(launched.instance.ref),
            provider.find(launched.instance.key),
            provider.instances(),
            provider.balance(),
        ):
            with pytest.raises(AuthFailed):
                await call
        (contract,) = h.cloud.contracts.values()
        assert contract.phase is not Phase.GONE

    play(tmp_path, story)


def test_a_machine_of_somebody_else_is_not_destroyed_whoever_asks(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        for machine in h.add_foreign_machines():
            with pytest.raises(RequestRejected):
                await provider.terminate(InstanceRef(provider=PROVIDER, instance_id=InstanceId(machine)))
        assert all(contract.phase is Phase.RUNNING for contract in h.cloud.contracts.values())

    play(tmp_path, story)


def _four_gpus() -> Ask:
    return Ask(ask_id=900, machine_id=99, slots=frozenset(range(4)), machine_gpus=4, dph_base=1.6, min_bid=0.01)


@pytest.mark.parametrize("per_gpu", [False, True])
def test_a_bid_for_several_gpus_ends_at_the_price_of_the_machine(tmp_path: Path, per_gpu: bool) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.asks.clear()
        h.cloud.stock(_four_gpus())
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        await provider.change_bid(launched.instance.ref, MicroUsdPerHour(800_000))
        (contract,) = h.cloud.contracts.values()
        assert contract.price == 800_000

    play(tmp_path, story, Quirks(bid_is_per_gpu=per_gpu))


@pytest.mark.parametrize("price", [1, 33 * MICRO])
def test_a_bid_out_of_bounds_is_refused_before_it_is_sent(tmp_path: Path, price: int) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        with pytest.raises(RequestRejected):
            await provider.change_bid(launched.instance.ref, MicroUsdPerHour(price))
        assert not [r for r in h.requests() if "bid_price" in r.path]

    play(tmp_path, story)


def test_raising_the_bid_brings_an_outbid_machine_back(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        await h.settle()
        h.pause(launched.instance.ref.instance_id)
        assert launched.instance.price is not None
        await provider.change_bid(launched.instance.ref, MicroUsdPerHour(launched.instance.price * 2))
        await h.settle()
        (seen,) = await provider.find(launched.instance.key)
        assert seen.state is InstanceState.RUNNING

    play(tmp_path, story)


def test_charges_and_balance_agree_with_the_books(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.add_foreign_machines()
        start = h.clock.now()
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        machine = launched.instance.ref.instance_id
        await h.advance(timedelta(hours=10))
        charges = await provider.charges(start - timedelta(days=1), h.clock.now() + timedelta(days=1))
        assert {c.key for c in charges} == {launched.instance.key}
        assert {c.kind for c in charges} == {"gpu", "disk", "bwd", "bwu"}
        assert sum(c.amount for c in charges) == pytest.approx(h.billed(machine), abs=4)
        balance = await provider.balance()
        assert balance.available == pytest.approx(h.true_balance().available, abs=2)

    play(tmp_path, story)


def test_many_charges_come_in_pages(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        keys = [h.key() for _ in range(230)]
        h.add_machines(keys)
        await h.advance(timedelta(hours=1))
        charges = await provider.charges(h.clock.now() - timedelta(days=1), h.clock.now())
        assert {c.key for c in charges} == set(keys)

    play(tmp_path, story)


def test_a_log_is_fetched_without_the_key_and_shown_without_secrets(tmp_path: Path) -> None:
    script = 'echo "fetching https://store.example/grant.json?X-Amz-Signature=abc"; echo "api_key=hush"; echo plain'

    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
        await h.settle()
        h.cloud.advance()
        machine = launched.instance.ref.instance_id
        until(lambda: not h.cloud.machines.alive(machine), what="the end of the script")
        lines = await provider.logs(launched.instance.ref, lines=10)
        assert lines == ("fetching https://store.example/grant.json?...", "api_key=***", "plain")
        assert await provider.logs(launched.instance.ref, lines=1) == ("plain",)
        fetches = [r for r in h.requests() if r.path.startswith("/logs/")]
        assert fetches
        assert not any("authorization" in r.headers for r in fetches)

    play(tmp_path, story)


def test_a_log_on_an_address_that_is_not_https_is_not_fetched_from_the_real_service(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        answer = Canned(status=200, body=b'{"success":true,"result_url":"http://169.254.169.254/latest"}')
        h.faults.answer(Call.OTHER, answer)
        with pytest.raises(ContractViolation):
            await provider.logs(launched.instance.ref, lines=5)

    play(tmp_path, story)


def test_find_asks_by_label_and_then_believes_only_the_whole_list(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        assert await provider.find(h.key()) == ()
        queries = [r.query for r in h.requests(Call.LIST)]
        assert "label" in queries[0]
        assert "label" not in queries[1]
        before = len(h.requests())
        assert await provider.find(AttemptKey("somebody-else-1")) == ()
        assert len(h.requests()) == before

    play(tmp_path, story)


def test_an_ordinary_day_meets_no_rate_limit(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        for _ in range(6):
            await provider.offers(h.query())
        launched = [await provider.launch(h.request(await cheapest(h, provider, m))) for m in Market]
        for _ in range(5):
            await provider.instances()
        for one in launched:
            await provider.find(one.instance.key)
            await provider.terminate(one.instance.ref)
        await provider.check()
        assert not [r for r in h.requests() if r.status == 429]

    play(tmp_path, story)

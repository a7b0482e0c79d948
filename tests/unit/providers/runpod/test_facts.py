"""What became known of RunPod in the autumn of 2026, and an end that never waits for a window of a day."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.errors import AuthFailed, NoCapacity, RateLimited
from spotd_providers.contract.values import AttemptKey, InstanceState, OfferId
from spotd_providers.kit.calls import RequestPace, Rest
from spotd_providers.kit.rest import Meaning, RefusalWords, RestRefused
from spotd_providers.runpod.offers import UnexplainedRefusals, refusal_of_create
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.runpod import Quirks
from tests.fakes.runpod.gpus import Gpu
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

ODD_ID = "NVIDIA RTX PRO 4500 Blackwell Server Edition"
DAY_USED_UP = {"ratelimit": '"minute";r=50;t=12, "day";r=0;t=45012', "content-type": "application/json"}


def test_a_gpu_whose_catalogue_id_a_create_does_not_know_is_bought_by_the_name_it_knows(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.gpus.clear()
        for name in (ODD_ID, "NVIDIA RTX PRO 4500 Blackwell"):
            h.cloud.gpus[name] = Gpu(gpu_id=name, name="RTX PRO 4500", memory=32, secure_price=0.5)
        h.cloud.gpus["NVIDIA RTX PRO 4500 Blackwell"].max_count = 0
        page = await provider.offers(h.query())
        offer = min(page.offers, key=lambda o: o.gpu_price)
        assert offer.offer_id.startswith(ODD_ID.replace(" ", "_"))
        assert (offer.extra["gpu"], offer.gpu) == ("NVIDIA RTX PRO 4500 Blackwell", "RTX_PRO_4500")

    play(tmp_path, story)


def test_a_pod_that_is_called_running_without_a_gpu_is_not_believed(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        await h.clock.sleep(timedelta(minutes=1))
        (before,) = (await provider.instances()).instances
        assert before.state is InstanceState.RUNNING
        h.cloud.quirks.edit_pod[made.instance.ref.instance_id] = {"gpu": {"count": 0}}
        (after,) = (await provider.instances()).instances
        assert (after.state, "no GPU" in after.detail) == (InstanceState.UNKNOWN, True)

    play(tmp_path, story)


def test_a_key_that_may_only_read_is_told_apart_from_a_pool_that_may_not_be_used(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        lines = {line.name: line for line in await provider.check()}
        assert lines["key"].ok
        assert not lines["create"].ok
        assert "write access" in lines["create"].hint
        offers = (await provider.offers(h.query())).offers
        failures = []
        for number, offer in enumerate(offers[:3]):
            with pytest.raises((NoCapacity, AuthFailed)) as refused:
                await provider.launch(h.request(offer, key=AttemptKey(f"spotd-{h.install}-j{number}-1")))
            failures.append(type(refused.value))
        assert failures == [NoCapacity, NoCapacity, AuthFailed]

    play(tmp_path, story, Quirks(read_only_key=True))


def test_the_check_of_a_key_that_may_create_makes_no_pod(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        assert "create" not in {line.name for line in await provider.check()}
        assert not h.machines()

    play(tmp_path, story)


def test_one_forbidden_pool_says_nothing_about_the_key(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await cheapest(h, provider))
        unexplained = UnexplainedRefusals()
        no = RestRefused("RunPod", status=403, meaning=Meaning.REJECTED, problem=RefusalWords(text="forbidden"))
        kinds = [type(refusal_of_create(no, request, unexplained)) for _ in range(5)]
        assert set(kinds) == {NoCapacity}
        unexplained.is_suspect("key", OfferId("x"))
        unexplained.forget()
        assert type(refusal_of_create(no, request, unexplained)) is NoCapacity

    play(tmp_path, story)


def test_a_day_that_is_used_up_holds_back_neither_an_end_nor_the_list_that_proves_it(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        h.faults.answer(Call.OFFERS, Canned(status=200, body=b'{"gpus": []}', headers=DAY_USED_UP))
        await provider.offers(h.query())
        with pytest.raises(RateLimited):
            await provider.launch(h.request(await cheapest(h, provider)))
        assert (await provider.instances()).complete
        await provider.terminate(made.instance.ref)
        assert not [machine for machine in h.machines() if machine.exists]

    play(tmp_path, story)


def test_a_create_does_not_wait_for_the_next_minute_and_is_not_sent(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await cheapest(h, provider))
        used_up = {"ratelimit": '"minute";r=0;t=12', "content-type": "application/json"}
        h.faults.answer(Call.OFFERS, Canned(status=200, body=b'{"gpus": []}', headers=used_up), times=20)
        with suppress(RateLimited):
            await provider.offers(h.query())
        before = h.clock.now()
        with pytest.raises(RateLimited):
            await provider.launch(request)
        assert h.clock.now() == before
        assert not h.launch_calls()

    play(tmp_path, story)


# --- rests -----------------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_makes_no_rest_longer() -> None:
    clock = FakeClock()
    rest = Rest(clock)
    rest.take(timedelta(seconds=30))
    clock.advance(timedelta(hours=-8))
    assert rest.left() == timedelta(seconds=30)
    clock.advance(timedelta(seconds=31))
    assert rest.left() == timedelta(0)
    rest.take(timedelta(seconds=30))
    rest.take(timedelta(seconds=5))
    assert rest.left() == timedelta(seconds=30)
    clock.advance(timedelta(hours=8))
    assert rest.left() == timedelta(0)


def test_calls_come_at_their_interval_after_the_clock_was_set_back() -> None:
    clock = FakeClock()

    async def main() -> None:
        pace = RequestPace(clock)
        await pace.turn("list", timedelta(seconds=2))
        clock.advance(timedelta(hours=-8))
        before = clock.now()
        await pace.turn("list", timedelta(seconds=2))
        assert clock.now() - before <= timedelta(seconds=2)

    run_virtually(main)

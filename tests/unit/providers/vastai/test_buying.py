"""Buying on vast.ai: what is sent, what is checked afterwards, and what every refusal leaves behind."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    ContractViolation,
    NoBalance,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
)
from spotd_providers.contract.values import MICRO, InstanceState, Loss, Market, MicroUsdPerHour
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.vastai.offers import SCRIPT_CHARS_MAX
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import Phase, Quirks
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play


def purchase_sent(h: VastHarness) -> dict[str, Any]:
    (request,) = h.requests(Call.LAUNCH)
    body = json.loads(request.body)
    assert isinstance(body, dict)
    return body


def test_a_bid_is_sent_with_its_price_its_label_and_no_stopped_contract_wanted(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        request = h.request(offer, price_max=MicroUsdPerHour(offer.gpu_price + 10_000))
        launched = await provider.launch(request)
        body = purchase_sent(h)
        assert body["price"] == (offer.gpu_price + 10_000) / MICRO
        assert body["label"] == request.key
        assert body["cancel_unavail"] is True
        assert (body["runtype"], body["onstart"], body["args"]) == ("args", "/bin/sh", ["-c", request.start_script])
        assert body["env"] == {}
        assert launched.instance.market is Market.SPOT

    play(tmp_path, story)


def test_an_on_demand_purchase_names_no_price(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider, Market.ON_DEMAND)))
        assert "price" not in purchase_sent(h)
        assert launched.instance.market is Market.ON_DEMAND

    play(tmp_path, story)


def test_what_was_sold_on_demand_for_a_bid_is_destroyed(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        with pytest.raises(ContractViolation, match="on-demand"):
            await provider.launch(h.request(await cheapest(h, provider)))
        assert [contract.phase for contract in h.cloud.contracts.values()] == [Phase.GONE]
        assert any(line.event == "vast.wrong_purchase" for line in h.log.lines)

    play(tmp_path, story, Quirks(sells_on_demand=True))


def test_what_was_sold_on_demand_is_destroyed_even_if_it_is_listed_late(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        request = h.request(await cheapest(h, provider))
        launched = await provider.launch(request)
        assert (launched.instance.state, launched.instance.market) == (InstanceState.PENDING, None)
        await h.advance(timedelta(minutes=3))
        (seen,) = (await provider.instances()).instances
        assert (seen.state, seen.market) == (InstanceState.ENDING, Market.ON_DEMAND)
        assert not h.live(request.key)

    play(tmp_path, story, Quirks(sells_on_demand=True, list_lag=timedelta(minutes=2)))


@pytest.mark.parametrize("status", [200, 400, 410, 500])
def test_a_bid_too_low_leaves_no_contract_behind(tmp_path: Path, status: int) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.refuse_but_leave_machine()
        request = h.request(offer)
        with pytest.raises(PriceMoved):
            await provider.launch(request)
        assert [contract.phase for contract in h.cloud.contracts.values()] == [Phase.GONE]
        assert not h.live(request.key)

    play(tmp_path, story, Quirks(low_bid_status=status))


def test_a_leftover_that_cannot_be_destroyed_is_an_unknown_outcome_that_find_settles(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.refuse_but_leave_machine()
        request = h.request(offer)
        h.faults.answer(Call.TERMINATE, Canned(status=503), times=50)
        with pytest.raises(OutcomeUnknown) as unknown:
            await provider.launch(request)
        assert unknown.value.key == request.key
        h.faults.clear()
        (left,) = await provider.find(request.key)
        assert (left.state, left.loss) == (InstanceState.PAUSED, Loss.OUTBID)
        await provider.terminate(left.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_a_leftover_survives_a_rate_limit_on_its_destruction(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.refuse_but_leave_machine()
        h.faults.answer(Call.TERMINATE, h.rate_limit_answer(None), times=3)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert [contract.phase for contract in h.cloud.contracts.values()] == [Phase.GONE]

    play(tmp_path, story)


@pytest.mark.parametrize("gone_status", [404, 410])
def test_an_offer_that_vanished_is_gone_and_no_auth_failure(tmp_path: Path, gone_status: int) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.vanish_offer(offer)
        with pytest.raises(OfferGone):
            await provider.launch(h.request(offer))

    play(tmp_path, story, Quirks(gone_status=gone_status))


def test_an_on_demand_price_that_rose_is_not_paid(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider, Market.ON_DEMAND)
        h.raise_price(offer)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert [contract.phase for contract in h.cloud.contracts.values()] == [Phase.GONE]

    play(tmp_path, story)


def test_an_account_without_credit_and_one_that_may_not_spend_so_fast_are_told_apart(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.exhaust_quota()
        with pytest.raises(QuotaExceeded):
            await provider.launch(h.request(offer))
        h.cloud.quirks.spend_rate_limit = False
        h.empty_balance()
        with pytest.raises(NoBalance):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


def test_a_fresh_contract_that_answers_404_at_first_is_waited_for(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        assert launched.instance.market is Market.SPOT

    play(tmp_path, story, Quirks(first_shows_missing=2))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start_script": "x" * (SCRIPT_CHARS_MAX + 1)}, "start_script"),
        ({"image": ""}, "image"),
        ({"image": "i" * 1025}, "image"),
        ({"price_max": MicroUsdPerHour(129 * MICRO)}, "price_max"),
        ({"price_max": MicroUsdPerHour(1)}, "price_max"),
        ({"key": "spotd-lab-" + "k" * 300 + "-1"}, "key"),
    ],
)
def test_what_vast_would_refuse_for_ever_is_not_even_sent(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        request = h.request(await cheapest(h, provider), **changes)
        with pytest.raises(RequestRejected) as rejected:
            await provider.launch(request)
        assert rejected.value.field == field
        assert h.launch_calls() == 0

    play(tmp_path, story)


def test_the_longest_start_script_is_bought(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        script = "#" + "x" * (SCRIPT_CHARS_MAX - 1)
        await provider.launch(h.request(await cheapest(h, provider), start_script=script))
        assert [contract.args[1] for contract in h.cloud.contracts.values()] == [script]

    play(tmp_path, story)


def test_a_rate_limited_purchase_says_how_long_to_wait_and_bought_nothing(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        text = b"API requests too frequent: endpoint threshold=17.5 ..."
        h.faults.answer(Call.LAUNCH, Canned(status=429, body=text, headers={"content-type": "text/plain"}))
        with pytest.raises(RateLimited) as limited:
            await provider.launch(h.request(offer))
        assert timedelta(seconds=17.5) < limited.value.retry_after < timedelta(seconds=19)
        assert not h.cloud.contracts

    play(tmp_path, story)


@pytest.mark.parametrize("case", ["lost before", "lost after", "502 after", "nonsense after"])
def test_an_unanswered_purchase_is_unknown_sent_once_and_settled_by_find(tmp_path: Path, case: str) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        request = h.request(await cheapest(h, provider))
        if case.startswith("lost"):
            h.faults.lose_answer(Call.LAUNCH, after_effect=case.endswith("after"))
        else:
            answer = Canned(status=502 if case.startswith("502") else 200, body=b"<html>")
            h.faults.answer(Call.LAUNCH, answer, after_effect=True)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert h.launch_calls() == 1
        assert len(await provider.find(request.key)) == len(h.live(request.key))

    play(tmp_path, story)

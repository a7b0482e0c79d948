"""Buying on RunPod: what is sent, what every refusal means, and that nothing dearer than agreed is kept."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import MICRO, MicroUsdPerHour
from spotd_providers.runpod.offers import PART_AGE_MAX, SCRIPT_BYTES_MAX
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.runpod import Quirks
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

PARTS = 4
"""Requests of one poll: two clouds, two sizes."""
NO_INSTANCES = "There are no longer any instances available with the requested specifications. Please refresh."


def sent(h: RunpodHarness) -> dict[str, Any]:
    body = json.loads(h.requests(Call.LAUNCH)[-1].body)
    assert isinstance(body, dict)
    return body


def problem(status: int, detail: str, *errors: str) -> Canned:
    body = {"title": "No", "status": status, "detail": detail, "errors": list(errors)}
    return Canned(status=status, body=json.dumps(body).encode(), headers={"content-type": "application/problem+json"})


def test_a_pod_is_asked_for_with_its_key_as_name_and_nothing_that_is_not_needed(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        request = h.request(offer, start_script='echo "it\'s $HOME"\nsleep 600\n')
        await provider.launch(request)
        body = sent(h)
        assert set(body) == {"name", "image", "cloud", "gpu", "disk", "args"}
        assert body["name"] == request.key
        assert body["gpu"] == {"id": "NVIDIA GeForce RTX 3090", "count": 1}
        assert (body["cloud"], body["disk"]) == ("COMMUNITY", 20)
        assert shlex.split(body["args"]) == ["/bin/sh", "-c", request.start_script]

    play(tmp_path, story)


def test_settings_narrow_the_request_as_they_narrow_the_offers(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        assert {offer.region for offer in page.offers} == {"EU-RO-1"}
        assert all("minCudaVersion=12.4" in request.query for request in h.requests(Call.OFFERS))
        await provider.launch(h.request(page.offers[0]))
        body = sent(h)
        assert body["dataCenterIds"] == ["EU-RO-1"]
        assert body["gpu"]["minCudaVersion"] == "12.4"
        assert body["registry"] == "reg1"
        assert body["entrypoint"] == ["/bin/sh", "-c"]
        assert "args" not in body

    quirks = Quirks(knows_entrypoint=True, requests_a_minute=500)
    more = {"data_centers": ["EU-RO-1"], "cuda_min": "12.4", "registry": "reg1", "override_entrypoint": True}
    play(tmp_path, story, quirks, **more)


def test_what_is_out_of_stock_is_not_offered(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.sell_out("NVIDIA GeForce RTX 3090")
        page = await provider.offers(h.query())
        assert "RTX_3090" not in {offer.gpu for offer in page.offers}
        assert {"none in stock now"} == {row.reason for row in page.rejected if "3090" in row.offer_id}

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        pytest.param(problem(400, NO_INSTANCES), NoCapacity, id="no instances"),
        pytest.param(problem(400, "There are not enough free GPUs on the host machine"), NoCapacity, id="host full"),
        pytest.param(problem(400, "Something is off today"), NoCapacity, id="words never heard"),
        pytest.param(problem(400, "You have reached your spend limit"), QuotaExceeded, id="spend limit"),
        pytest.param(problem(400, "Your balance is too low"), NoBalance, id="balance by words"),
        pytest.param(problem(402, "payment required"), NoBalance, id="balance by status"),
        pytest.param(problem(401, "invalid api key"), AuthFailed, id="bad key"),
        pytest.param(problem(403, "access denied"), NoCapacity, id="not this kind of GPU"),
        pytest.param(problem(403, "key lacks scope pods:write"), AuthFailed, id="key without scope"),
        pytest.param(problem(404, "gpu type not found"), OfferGone, id="unknown GPU"),
        pytest.param(problem(413, "request body exceeds 102400 bytes"), RequestRejected, id="too large"),
        pytest.param(
            problem(422, "Request validation failed.", "$: additional properties 'bidPerGpu' not allowed"),
            RequestRejected,
            id="closed schema",
        ),
        pytest.param(problem(429, "rate limit exceeded"), RateLimited, id="too often"),
        pytest.param(problem(500, "internal"), OutcomeUnknown, id="server error"),
        pytest.param(problem(408, "too slow"), OutcomeUnknown, id="time-out of the server"),
        pytest.param(problem(500, f"create pod: {NO_INSTANCES}"), NoCapacity, id="empty shelf as a server error"),
        pytest.param(problem(503, "at capacity"), OutcomeUnknown, id="server error with a word of it"),
        pytest.param(problem(503, "overloaded"), OutcomeUnknown, id="unavailable"),
        pytest.param(Canned(status=403, body=b"error code: 1010"), Unavailable, id="the edge"),
        pytest.param(Canned(status=302, headers={"location": "https://x.example/"}), Unavailable, id="redirect"),
        pytest.param(Canned(status=201, body=b'{"name":"x"}'), OutcomeUnknown, id="a pod without an id"),
    ],
)
def test_every_refusal_has_its_meaning(tmp_path: Path, answer: Canned, kind: type[ProviderError]) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await cheapest(h, provider))
        h.faults.answer(Call.LAUNCH, answer)
        with pytest.raises(kind):
            await provider.launch(request)
        assert h.launch_calls() == 1
        assert not h.live(request.key)

    play(tmp_path, story)


def test_offer_after_offer_refused_in_unknown_words_is_the_request_and_not_the_market(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offers = (await provider.offers(h.query())).offers
        h.faults.answer(Call.LAUNCH, problem(400, "computer says no"), times=9)
        kinds: list[type[Exception]] = []
        for offer in offers[:3]:
            with pytest.raises(ProviderError) as refused:
                await provider.launch(h.request(offer))
            kinds.append(refused.type)
        assert kinds == [NoCapacity, NoCapacity, RequestRejected]

    play(tmp_path, story)


def test_a_rate_limit_without_advice_is_waited_out_by_its_window(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        headers = {"ratelimit": '"minute";r=0;t=42, "hour";r=2800;t=1812'}
        h.faults.answer(Call.LAUNCH, Canned(status=429, body=b"{}", headers=headers))
        with pytest.raises(RateLimited) as limited:
            await provider.launch(h.request(offer))
        assert timedelta(seconds=42) < limited.value.retry_after < timedelta(seconds=43)

    play(tmp_path, story)


def test_nothing_is_sent_while_a_window_is_known_to_be_used_up(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        left = h.cloud.quirks.requests_a_minute - len(h.requests())
        for _ in range(left // 2):
            await provider.instances()
        before = len(h.requests())
        with pytest.raises(RateLimited):
            await provider.launch(h.request(offer))
        with pytest.raises(RateLimited):
            await provider.instances()
        assert len(h.requests()) == before
        await h.advance(timedelta(minutes=2))
        await provider.launch(h.request(offer))

    play(tmp_path, story, Quirks(requests_a_minute=8))


def test_polling_prices_leaves_requests_for_machines(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        polls = [await provider.offers(h.query()) for _ in range(4)]
        assert [page.complete for page in polls] == [True, True, True, False]
        with pytest.raises(RateLimited):
            await provider.offers(h.query())
        request = h.request(offer)
        launched = await provider.launch(request)
        assert (await provider.instances()).complete
        await provider.terminate(launched.instance.ref)
        assert not h.live(request.key)
        assert all(sent.status != 429 for sent in h.requests())
        await h.advance(timedelta(minutes=2))
        assert (await provider.offers(h.query())).complete

    play(tmp_path, story, Quirks(requests_a_minute=22))


def test_what_the_minute_left_no_request_for_is_told_from_the_poll_before_and_asked_first_next_time(
    tmp_path: Path,
) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        whole = await provider.offers(h.query())
        for _ in range(2):
            await provider.instances()
        short = await provider.offers(h.query())
        asked = len([one for one in h.requests() if "/catalog/" in one.path])
        assert 0 < asked - PARTS < PARTS
        assert (short.complete, short.offers) == (False, whole.offers)

        h.cloud.gpus.clear()
        await h.advance(timedelta(seconds=61))
        emptied = await provider.offers(h.query())
        assert (emptied.complete, emptied.offers) == (True, ())

    play(tmp_path, story, Quirks(requests_a_minute=13))


def test_what_could_not_be_asked_for_long_is_not_told_any_more(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        whole = await provider.offers(h.query())

        def then_fail(true: Canned) -> Canned:
            h.faults.answer(Call.OFFERS, Canned(status=503))
            return true

        await h.advance(PART_AGE_MAX + timedelta(seconds=1))
        h.faults.edit(Call.OFFERS, then_fail)
        one_part = await provider.offers(h.query())
        assert 0 < len(one_part.offers) < len(whole.offers)

    play(tmp_path, story)


def test_a_price_that_rose_is_not_paid_and_one_above_the_agreement_is_not_even_asked_for(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer, price_max=MicroUsdPerHour(offer.gpu_price - 1)))
        assert h.launch_calls() == 0
        h.cloud.quirks.cost_factor = 1.5
        request = h.request(offer)
        with pytest.raises(PriceMoved):
            await provider.launch(request)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_a_cost_that_holds_the_disk_is_no_rise(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.cloud.quirks.cost_factor = 1 + 0.0027 * MICRO / offer.gpu_price
        request = h.request(offer)
        await provider.launch(request)
        assert h.live(request.key)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start_script": "x" * (SCRIPT_BYTES_MAX + 1)}, "start_script"),
        ({"start_script": "'" * SCRIPT_BYTES_MAX}, "start_script"),
        ({"start_script": "a\0b"}, "start_script"),
        ({"image": ""}, "image"),
        ({"key": "spotd-lab-" + "k" * 300 + "-1"}, "key"),
    ],
)
def test_what_runpod_would_refuse_for_ever_is_not_even_sent(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        with pytest.raises(RequestRejected) as rejected:
            await provider.launch(h.request(await cheapest(h, provider), **changes))
        assert rejected.value.field == field
        assert h.launch_calls() == 0

    play(tmp_path, story)


def test_every_request_names_its_agent(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        await provider.launch(h.request(await cheapest(h, provider)))
        assert {request.headers["user-agent"] for request in h.requests()} == {"spotd/0.1 (+runpod)"}

    play(tmp_path, story)


def test_a_catalogue_that_breaks_off_is_an_incomplete_page(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        def then_fail(true: Canned) -> Canned:
            h.faults.answer(Call.OFFERS, Canned(status=503))
            return true

        h.faults.edit(Call.OFFERS, then_fail)
        page = await provider.offers(h.query())
        assert page.offers
        assert not page.complete
        assert (await provider.offers(h.query())).complete

    play(tmp_path, story)

"""Answers that no documentation knows: each costs its row or its reading, and none proves that a machine is gone."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import OutcomeUnknown, RateLimited
from spotd_providers.contract.values import OfferQuery
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.serve import Call, Canned
from tests.unit.providers.odd_answers import absence_proofs, end_after, readings
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

JSON = {"content-type": "application/json"}
PAGE = b"<html><body><h1>Just a moment...</h1></body></html>"
ODD_BODIES = {
    "an-html-page": PAGE,
    "nothing": b"",
    "null": b"null",
    "a-number": b"7",
    "a-list": b"[]",
    "cut-off": b'{"pods": [{"id": "x", "na',
    "null-rows": b'{"pods": null, "gpus": null, "data": null}',
    "an-object-for-rows": b'{"pods": {"0": {}}, "gpus": {"0": {}}, "data": []}',
    "pages-that-never-end": b'{"pods": [], "pagination": {"hasNextPage": true}}',
    "the-same-page-again": b'{"pods": [], "pagination": {"hasNextPage": true, "nextCursor": "one"}}',
    "too-deep": b"[" * 200_000,
    "not-utf-8": b'{"pods": ["\xff\xfe"]}',
}


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
def test_a_body_that_is_no_answer_costs_its_reading_and_nothing_else(body: bytes, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        found = await readings(h, provider, Canned(status=200, body=body, headers=JSON))
        assert not absence_proofs(found), "it proves that something is gone"
        assert (await provider.instances()).complete

    play(tmp_path, story)


GOOD: dict[str, Any] = {
    "id": "NVIDIA GeForce RTX 4090", "name": "RTX 4090", "memory": 24, "manufacturer": "NVIDIA", "secure": True,
    "community": True, "price": {"secure": 0.6, "community": 0.4}, "maxCount": {"secure": 8, "community": 8},
    "availability": "HIGH",
}  # fmt: skip
ODD_VALUES: list[Any] = [
    None,
    "0.2",
    "",
    [],
    {},
    -1,
    0,
    float("1e308"),
    1e400,
    True,
    "\ud800",
    "x" * 10_000,
    {"secure": "free"},
]


@pytest.mark.parametrize("field", GOOD)
def test_an_odd_value_costs_its_row(field: str, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        odd = [{**GOOD, "id": f"{GOOD['id']} {n}", field: value} for n, value in enumerate(ODD_VALUES)]
        missing = {name: value for name, value in GOOD.items() if name != field}
        body = json.dumps({"gpus": [GOOD, *odd, missing, None, 7, [], "x", GOOD]}).encode()
        h.faults.answer(Call.OFFERS, Canned(status=200, body=body, headers=JSON), times=20)
        page = await provider.offers(OfferQuery())
        assert "NVIDIA_GeForce_RTX_4090:1:secure" in {offer.offer_id for offer in page.offers}
        assert all(0 < offer.gpu_price < 10**10 for offer in page.offers)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "change",
    [
        {"status": "HIBERNATING"}, {"status": 7}, {"status": None}, {"cost": "free"}, {"cost": -1}, {"cost": 1e308},
        {"createdAt": "yesterday"}, {"createdAt": 7}, {"gpu": []}, {"gpu": {"count": "one"}}, {"image": {}},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_pod_is_still_listed(change: dict[str, Any], tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        h.cloud.quirks.edit_pod[made.instance.ref.instance_id] = change
        listing = await provider.instances()
        assert [machine.ref for machine in listing.instances] == [made.instance.ref]

    play(tmp_path, story)


@pytest.mark.parametrize("body", [PAGE, b"", b"null", b"{}", b'{"id": 7}', b'{"id": ""}'])
def test_an_odd_answer_to_a_create_is_an_unknown_outcome(body: bytes, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, Canned(status=201, body=body, headers=JSON))
        with pytest.raises(OutcomeUnknown):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


@pytest.mark.parametrize("wait", ["86400", "999999", "soon", "-5", ""])
def test_an_end_that_is_told_to_wait_a_day_is_sent_again_at_the_next_call(wait: str, tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        throttle = Canned(status=429, body=b"{}", headers={"retry-after": wait})
        assert await end_after(h, provider, made.instance.ref, throttle, RateLimited) <= timedelta(minutes=1)
        assert not [machine for machine in h.machines() if machine.exists]

    play(tmp_path, story)

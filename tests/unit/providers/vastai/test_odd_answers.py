"""Answers that no documentation knows: each costs its row or its reading, and an end is never held back by one."""

from __future__ import annotations

import gzip
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import AuthFailed, OutcomeUnknown, RateLimited, Unavailable
from spotd_providers.contract.values import Market, OfferQuery
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import Failure, Quirks
from tests.unit.providers.odd_answers import end_after, readings
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play

JSON = {"content-type": "application/json"}
PAGE = b"<html><body><h1>Just a moment...</h1></body></html>"
DEEP = b"[" * 200_000
ODD_BODIES = {
    "an-html-page": PAGE,
    "nothing": b"",
    "null": b"null",
    "a-number": b"7",
    "a-text": b'"ok"',
    "a-list": b"[]",
    "cut-off": b'{"offers": [{"id": 1, "machine_id',
    "null-rows": b'{"offers": null, "instances": null, "results": null, "credit": null}',
    "an-object-for-rows": b'{"offers": {"0": {}}, "instances": {"0": {}}, "results": {}, "credit": {}}',
    "a-text-for-rows": b'{"offers": "none", "instances": "none", "results": "none", "credit": "100"}',
    "success-false": b'{"success": false}',
    "an-error-of-lists": b'{"success": false, "error": [], "msg": {}}',
    "too-deep": DEEP,
    "not-utf-8": b'{"offers": ["\xff\xfe"]}',
    "an-endless-number": b'{"offers": [' + b"9" * 100_000 + b"]}",
    "packed-twice": gzip.compress(b"{}"),
}  # fmt: skip


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
def test_a_body_that_is_no_answer_costs_its_reading_and_nothing_else(body: bytes, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        found = await readings(h, provider, Canned(status=200, body=body, headers=JSON))
        assert Call.LIST not in {call for call, _ in found}, "it proves that something is gone"
        assert (await provider.instances()).complete

    play(tmp_path, story)


GOOD: dict[str, Any] = {
    "id": 1, "machine_id": 7, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_ram": 24564, "dph_base": 0.4,
    "dph_total": 0.41, "min_bid": 0.2, "storage_cost": 0.1, "inet_up_cost": 0.0, "inet_down_cost": 0.0,
    "duration": 900_000.0, "verification": "verified", "rentable": True, "cpu_arch": "amd64",
}  # fmt: skip
ODD_VALUES: list[Any] = [None, "0.2", "", [], {}, -1, 0, float("1e308"), 1e400, True, "\ud800", "x" * 10_000]


def rows_with(*rows: Any) -> bytes:
    return json.dumps({"offers": list(rows)}).encode()


@pytest.mark.parametrize("field", GOOD)
def test_an_odd_value_costs_its_row(field: str, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        query = OfferQuery(markets=(Market.SPOT,))
        others = [{**GOOD, "id": n, "machine_id": n} for n in (100, 101)]
        odd = [{**GOOD, "id": 2 + n, "machine_id": 2 + n, field: value} for n, value in enumerate(ODD_VALUES)]
        missing = {name: value for name, value in {**GOOD, "id": 50}.items() if name != field}
        body = rows_with(others[0], *odd, missing, None, 7, [], "x", others[1], others[1])
        h.faults.answer(Call.OFFERS, Canned(status=200, body=body, headers=JSON))
        page = await provider.offers(query)
        shown = [offer.offer_id for offer in page.offers]
        assert {"100:bid", "101:bid"} <= set(shown)
        assert len(shown) == len(set(shown))
        assert len(page.rejected) >= 5

    play(tmp_path, story)


@pytest.mark.parametrize(
    "change",
    [
        {"actual_status": "hibernating"}, {"actual_status": 7}, {"cur_state": []}, {"start_date": "yesterday"},
        {"start_date": 1e300}, {"end_date": -1}, {"dph_base": "free"}, {"is_bid": "perhaps"}, {"machine_id": None},
        {"status_msg": {"text": "x"}}, {"num_gpus": -4},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_an_odd_instance_is_still_listed(change: dict[str, Any], tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        await h.settle()
        h.cloud.quirks.edit_instance[int(made.instance.ref.instance_id)] = change
        listing = await provider.instances()
        assert [machine.ref for machine in listing.instances] == [made.instance.ref]

    play(tmp_path, story)


@pytest.mark.parametrize(
    "body", [PAGE, b"", b"null", b"{}", b'{"success": true}', b'{"success": true, "new_contract": "7"}']
)
def test_an_odd_answer_to_a_purchase_is_an_unknown_outcome(body: bytes, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, Canned(status=200, body=body, headers=JSON))
        with pytest.raises(OutcomeUnknown):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


@pytest.mark.parametrize("wait", ["86400", "1e9", "-5", "soon", "999999", ""])
def test_an_end_that_is_told_to_wait_a_day_is_sent_again_within_a_minute(wait: str, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        throttle = Canned(status=429, body=b"slow down", headers={"retry-after": wait})
        assert await end_after(h, provider, made.instance.ref, throttle, RateLimited) <= timedelta(seconds=30)
        assert not [machine for machine in h.machines() if machine.exists]

    play(tmp_path, story)


def test_a_list_that_is_told_to_wait_a_day_is_asked_for_again_within_minutes(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.faults.answer(Call.LIST, Canned(status=429, body=b"slow down", headers={"retry-after": "86400"}), times=5)
        with pytest.raises(RateLimited):
            await provider.instances()
        h.faults.clear()
        began = h.clock.now()
        assert (await provider.instances()).complete
        assert h.clock.now() - began <= timedelta(minutes=5)

    play(tmp_path, story)


def test_a_key_without_a_second_factor_is_told_apart_by_an_account_call(tmp_path: Path) -> None:
    said = b'{"success": false, "error": "forbidden", "msg": "Your key lacks proper privileges: Two Factor Login"}'

    async def story(h: VastHarness, provider: VastProvider) -> None:
        for status in (400, 401, 403, 404):
            h.faults.answer(Call.ACCOUNT, Canned(status=status, body=said, headers=JSON), times=9)
            with pytest.raises(AuthFailed, match="two-factor login"):
                await provider.balance()
            (line,) = await provider.check()
            assert (line.name, line.ok, "two-factor login" in line.detail) == ("key", False, True)
            h.faults.clear()

    play(tmp_path, story)


def test_a_boot_that_fails_on_the_host_looks_as_it_was_recorded(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.cloud.fail_next_boot(int(offer.extra["ask"]), Failure.OCI)
        await provider.launch(h.request(offer))
        await h.settle()
        (row,) = (await provider._client.instance_page(label=None, after=None)).instances
        words = {name: row[name] for name in ("actual_status", "cur_state", "next_state", "intended_status")}
        assert words == {
            "actual_status": "created",
            "cur_state": "stopped",
            "next_state": "stopped",
            "intended_status": "stopped",
        }
        assert "OCI runtime create failed" in row["status_msg"]

    play(tmp_path, story, Quirks())


def test_unavailable_is_what_a_page_without_a_row_of_sense_is(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.faults.answer(Call.OFFERS, Canned(status=200, body=PAGE * 100, headers=JSON))
        with pytest.raises(Unavailable):
            await provider.offers(OfferQuery())

    play(tmp_path, story)

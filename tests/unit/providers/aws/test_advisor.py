"""The Spot Advisor is a prior: read row by row, never in the way, and worth the last word between equal prices only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.decide import decide
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.aws.prices import read_advisor
from spotd_providers.contract.values import Market
from tests.cases import every
from tests.unit.core.builders import NOW, market, offer
from tests.unit.core.domain.test_cooldowns import empty
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import play

RANGES = [
    {"index": 0, "label": "<5%", "dots": 0, "max": 5},
    {"index": 1, "label": "5-10%", "dots": 1, "max": 11},
    {"index": 2, "label": ">20%", "dots": 4, "max": 100},
]


def document(**rows: Any) -> bytes:
    return json.dumps({"ranges": RANGES, "spot_advisor": {"us-east-1": {"Linux": rows}}}).encode()


def test_a_row_that_cannot_be_read_costs_itself_only() -> None:
    bands = read_advisor(
        document(good={"s": 60, "r": 1}, text={"r": "1"}, unheard={"r": 9}, none=None, flag={"r": True})
    )
    assert {kind: band.label for (_, kind), band in bands.items()} == {"good": "5-10%"}


@every("content", [b"", b"[]", b"{}", b"not json", b"\x1f\x8bno", b'{"ranges": [], "spot_advisor": {}}'])
def test_what_is_no_spot_advisor_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"no copy of spot-advisor-data\.json"):
        read_advisor(content)


@given(st.binary(max_size=40), st.integers(0, 200))
def test_a_damaged_copy_is_refused_or_read_in_part(noise: bytes, at: int) -> None:
    whole = document(a={"r": 0}, b={"r": 2})
    damaged = whole[:at] + noise + whole[at + len(noise) :]
    try:
        bands = read_advisor(damaged)
    except ValueError:
        return
    assert all(0 < band.hazard_ppm < 10_000 for band in bands.values())


def test_a_saved_copy_says_how_often_a_types_machines_are_taken(tmp_path: Path) -> None:
    copy = tmp_path / "advisor.json.gz"
    copy.write_bytes(gzip.compress(document(**{"g5.xlarge": {"s": 59, "r": 2}})))

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offers = (await provider.offers(h.query())).offers
        told = {o.offer_id: o.hazard_ppm for o in offers if o.hazard_ppm is not None}
        assert set(told) == {f"g5.xlarge:us-east-1{zone}:spot" for zone in "abc"}
        assert len(set(told.values())) == 1
        assert any(o.extra["type"] == "g5.xlarge" and o.market is Market.ON_DEMAND for o in offers)

    play(tmp_path, story, spot_advisor=str(copy))


def test_a_copy_that_is_not_there_is_told_once_and_nothing_stops(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        assert (await provider.offers(h.query())).offers
        assert [line.event for line in h.log.lines].count("aws.spot_advisor_unreadable") == 1

    play(tmp_path, story, spot_advisor=str(tmp_path / "absent.json"))


@every(
    ("safe", "risky", "bought"),
    [(400_000, 400_000, "safe"), (400_400, 400_000, "risky"), (400_000, 400_100, "safe")],
    ids=["equal-prices", "a-tenth-of-a-percent-dearer", "dearer-and-risky"],
)
def test_of_two_at_one_price_the_one_that_stays_is_bought(safe: int, risky: int, bought: str) -> None:
    offers = (offer("risky", price=risky, hazard_ppm=549), offer("safe", price=safe, hazard_ppm=70))
    (item,) = decide(empty(), market(*offers), NOW).attempts.values()
    assert item.quote.offer.offer_id == bought

"""`spotctl history import`: from a list or a provider into what `history` shows, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.market.guarded import guarded
from spotd_providers.contract.errors import NotSupported, ProviderError, Unavailable
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import (
    Capability,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    OfferId,
    PoolId,
    Power,
    ProviderName,
)
from tests.unit.cli.conftest import Ctl
from tests.unit.daemon.shop import Shop

HEAD = "at,provider,offer,gpu,count,price,market\n"


class Archive(Shop):
    """A shop that knows its past, in pages of a day each."""

    known_as: ProviderName
    now: Callable[[], datetime]
    fails_after: int | None = None
    failure: ProviderError = Unavailable("the archive is closed")
    power = Capability(available=True)
    bad_rows = False
    endless = False
    pages = 3

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, Power.PRICE_HISTORY: self.power}

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        number = int(after or 0)
        if self.fails_after is not None and number >= self.fails_after:
            raise self.failure
        now = self.now()
        row = OfferPriceHistory(
            provider=self.known_as, offer_id=OfferId(f"o{number}"), pool=PoolId(f"o{number}"), market=Market.SPOT,
            gpu="H100_SXM", gpu_count=1, storage_price=MicroUsdPerGbMonth(0),
            changes=((since, MicroUsdPerHour(1_000_000 * (number + 1))),),
        )  # fmt: skip
        bad = replace(row, offer_id=OfferId("bad"), changes=((since, float("nan")),))  # type: ignore[arg-type] # as a plugin may
        following = number if self.endless else number + 1
        return PriceHistoryPage(
            offers=(row, bad) if self.bad_rows else (row,), since=since, until=now,
            next=str(following) if self.endless or following < self.pages else "",
        )  # fmt: skip


@pytest.fixture
def archive(ctl: Ctl) -> Archive:
    made = Archive(ctl.rig.clock)
    entries: Any = ctl.place.handlers.context.providers
    made.known_as = name = ctl.rig.shop.name
    made.now = ctl.rig.clock.now
    entries[name] = replace(entries[name], provider=guarded(made, clock=ctl.rig.clock, log=ctl.rig.log, name=name))
    return made


def lows(ctl: Ctl, *flags: str) -> list[tuple[str, float, float]]:
    answer = json.loads(ctl("history", "-o", "json", *flags).out)
    return [
        (prices["gpu"], bucket["low_usd_gpu_h"], bucket["imported"])
        for prices in answer["prices"]
        for bucket in prices["buckets"]
    ]


def list_of(ctl: Ctl, folder: Path, *prices: str) -> Path:
    now = ctl.rig.clock.now()
    lines = [f"{(now - timedelta(hours=10 - i)).isoformat()},gone,1,H100,8,{usd},spot" for i, usd in enumerate(prices)]
    place = folder / "list.csv"
    place.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return place


def test_a_recorded_list_is_shown_as_imported(ctl: Ctl, tmp_path: Path) -> None:
    place = list_of(ctl, tmp_path, "16", "8", "24")
    result = ctl("history", "import", str(place))
    assert (result.code, result.out) == (0, f"{place}: 3 prices imported\n")
    assert lows(ctl) == [("H100", 1.0, 1.0)]
    assert "imported and not polled by this daemon: 100% of what is shown" in ctl("history").err


def test_twice_is_as_once(ctl: Ctl, tmp_path: Path) -> None:
    place = list_of(ctl, tmp_path, "16", "8", "24")
    ctl("history", "import", str(place))
    once = ctl("history", "--gpu", "h100", "-o", "json").out
    ctl("history", "import", str(place))
    assert ctl("history", "--gpu", "h100", "-o", "json").out == once


def test_a_providers_own_records_come_page_by_page(ctl: Ctl, archive: Archive) -> None:
    result = ctl("history", "import", str(archive.known_as))
    assert (result.code, result.out) == (0, f"{archive.known_as}: 3 prices imported\n")
    assert lows(ctl)[0][0] == "H100_SXM"


def test_what_came_before_a_failure_stays_and_the_command_can_be_repeated(ctl: Ctl, archive: Archive) -> None:
    archive.fails_after = 2
    result = ctl("history", "import", str(archive.known_as))
    assert result.code == 5
    assert "the archive is closed" in result.err
    half = lows(ctl)
    assert half
    archive.fails_after = None
    assert ctl("history", "import", str(archive.known_as)).code == 0
    assert lows(ctl) == half


def test_rows_that_cannot_be_used_cost_themselves_only(ctl: Ctl, archive: Archive) -> None:
    archive.bad_rows = True
    result = ctl("history", "import", str(archive.known_as))
    assert (result.code, result.out) == (0, f"{archive.known_as}: 3 prices imported\n")
    assert "warning: 3 rows could not be used" in result.err


def test_pages_that_do_not_end_are_an_error(ctl: Ctl, archive: Archive) -> None:
    archive.endless = True
    result = ctl("history", "import", str(archive.known_as))
    assert result.code == 5
    assert "do not end" in result.err


@pytest.mark.parametrize("where", ["declared", "raised"])
def test_a_provider_without_records_says_so_and_how_else(ctl: Ctl, archive: Archive, where: str) -> None:
    if where == "declared":
        archive.power = Capability(available=False, reason="the shop keeps no old prices")
    else:
        archive.fails_after, archive.failure = 0, NotSupported("the shop keeps no old prices")
    result = ctl("history", "import", str(archive.known_as))
    assert result.code == 2
    assert "the shop keeps no old prices" in result.err
    assert "recorded list" in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "2026-10-30T00:00:00Z,gone,1,H100,1,nan,spot\n", "list.csv:2"),
        (HEAD + "9999-12-30T00:00:00Z,gone,1,H100,1,1,spot\n", "list.csv:2"),
        ("no,list\n", "the column at is missing"),
        (
            HEAD + "2022-01-01T00:00:00Z,gone,1,H100,1,1,spot\n2022-01-02T00:00:00Z,gone,1,H100,1,2,spot\n",
            "list.csv ends on 2022-01-02, before the time to import",
        ),
    ],
    ids=["NaN", "9999", "other columns", "older than what is kept"],
)
def test_a_list_that_cannot_be_read_is_refused_and_changes_nothing(
    ctl: Ctl, tmp_path: Path, text: str, message: str
) -> None:
    place = tmp_path / "list.csv"
    place.write_text(text, encoding="utf-8")
    result = ctl("history", "import", str(place))
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert lows(ctl) == []


def test_what_is_neither_a_provider_nor_a_file_is_refused(ctl: Ctl) -> None:
    result = ctl("history", "import", "nowhere")
    assert result.code == 2
    assert "there is no provider and no file 'nowhere'" in result.err
    assert "a list is given as a file" in result.err


@pytest.mark.parametrize(
    "body",
    [
        {"since_s": 0, "until_s": 10, "offers": []},
        {"since_s": 1_790_000_000, "until_s": 1_780_000_000, "offers": []},
        {"since_s": "1", "until_s": True, "offers": []},
        {"since_s": 1_763_600_000, "until_s": 1e308, "offers": []},
        {"since_s": 1_763_600_000, "until_s": 1_763_700_000, "offers": {}},
    ],
    ids=["1970", "backwards", "types", "1e308", "no list"],
)
def test_a_body_that_is_no_list_is_refused(ctl: Ctl, body: dict[str, Any]) -> None:
    from spotd.client.daemon import Daemon
    from spotd.client.transport import DaemonRefused

    with pytest.raises(DaemonRefused):
        Daemon().import_offers(body)


@pytest.mark.parametrize(
    "change",
    [
        {"changes": [[0, -1]]},
        {"changes": [[10**30, 1]]},
        {"changes": [[1_795_000_000, 10**18]]},
        {"changes": "xx"},
        {"changes": [1, 2]},
        {"count": 0},
        {"count": 10**9},
        {"gpu": "a\nb"},
        {"provider": ""},
        {"market": "reserved"},
        {"offer": "x" * 10_000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_offer_that_cannot_be_used_is_counted_and_costs_no_other(ctl: Ctl, change: dict[str, Any]) -> None:
    from spotd.client.daemon import Daemon

    until = int(ctl.rig.clock.now().timestamp())
    good = {
        "provider": "gone", "offer": "1", "pool": "1", "gpu": "H100_SXM", "count": 1, "market": "spot",
        "changes": [[until - 3600, 1_000_000]],
    }  # fmt: skip
    body = {"since_s": until - 3600, "until_s": until, "offers": [good, {**good, "offer": "2", **change}, 7]}
    answer = Daemon().import_offers(body)
    assert (answer["offers"], answer["prices"], answer["rejected"]) == (1, 1, 2)

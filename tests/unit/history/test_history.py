"""What is recorded is what is answered: across restarts, gaps and the rolling up of the past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.pricing import Needs, quote
from spotd.history import (
    DISK_GB,
    Bucket,
    History,
    HistoryUnavailable,
    PriceTerms,
    Retained,
    SeriesQuery,
    SeriesResult,
    TooManyBuckets,
)
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, Offer, OfferId
from tests.unit.core.builders import NOW, SHOP, offer
from tests.unit.history.market import VAST, Bazaar

DAY_S, HOUR_S, MINUTE_S = 86_400, 3_600, 60
START = 1_790_000_000 // DAY_S * DAY_S
TERMS = PriceTerms(fee_ppm={SHOP: 1_200_000, VAST: 1_200_000})
FREE = PriceTerms()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    found = History(tmp_path / "prices.sqlite")
    yield found
    found.close()


def recorded(history: History, at: int, *offers: Offer, complete: bool = True) -> int:
    return history.record(SHOP, offers, complete=complete, at=at)


def watched(history: History, start: int, end: int, *offers: Offer, every: int = HOUR_S // 2) -> None:
    """The same offers at every poll of the span."""
    for at in range(start, end, every):
        recorded(history, at, *offers)


def rolled(history: History, now: int) -> None:
    while history.step(now):
        pass


def buckets(answer: SeriesResult) -> tuple[Bucket, ...]:
    assert len(answer.groups) == 1
    return answer.groups[0].buckets


def asked(history: History, since: int, until: int, terms: PriceTerms = FREE, **narrowed: Any) -> SeriesResult:
    return history.ask(SeriesQuery(since=since, until=until, **narrowed), terms)


def test_only_what_changed_is_written(history: History) -> None:
    assert recorded(history, START, offer("a"), offer("b")) == 2
    assert recorded(history, START + 60, offer("a"), offer("b")) == 0
    assert recorded(history, START + 120, offer("a", price=1), offer("b")) == 1
    assert recorded(history, START + 180, offer("b")) == 1
    assert recorded(history, START + 240, offer("b")) == 0
    assert recorded(history, START + 300, offer("a", price=1), offer("b")) == 1


def test_percentiles_weigh_each_price_by_its_time_on_offer(history: History) -> None:
    watched(history, START, START + 9 * MINUTE_S, offer("a", price=300_000), every=60)
    watched(history, START + 9 * MINUTE_S, START + 10 * MINUTE_S + 1, offer("a", price=900_000), every=60)
    (bucket,) = buckets(asked(history, START, START + 10 * MINUTE_S))
    assert (bucket.low, bucket.high, bucket.quantiles) == (300_000, 900_000, (300_000,) * 5)
    assert bucket.offers == pytest.approx(1.0)
    watched(history, START + 10 * MINUTE_S, START + 20 * MINUTE_S + 1, offer("a", price=900_000), every=60)
    (bucket,) = buckets(asked(history, START, START + 20 * MINUTE_S))
    assert bucket.quantiles == (300_000, 300_000, 900_000, 900_000, 900_000)


def test_a_stored_price_is_the_effective_price_that_is_shown_now(history: History) -> None:
    item = offer("a", price=1_234_567, gpu_count=3, storage_price=MicroUsdPerGbMonth(177_777))
    watched(history, START, START + HOUR_S, item)
    needs = Needs(disk_gb=DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
    shown = quote(item, needs, TERMS.fee_ppm[SHOP], NOW).price.per_gpu
    (bucket,) = buckets(asked(history, START, START + HOUR_S, TERMS))
    assert (bucket.low, bucket.high) == (shown, shown)


def test_an_answer_that_holds_one_gpu_whole_takes_away_what_is_gone_of_that_gpu_alone(history: History) -> None:
    held = [offer("a"), replace(offer("b"), gpu="L40S"), replace(offer("c"), gpu="L40S", gpu_count=2)]
    history.record(SHOP, held, complete=True, at=START)
    assert history.record(SHOP, [], complete=True, at=START + 60, whole=frozenset({("L40S", 2)})) == 1
    assert history.record(SHOP, [], complete=False, at=START + 120, whole=frozenset({("L40S", 0)})) == 1
    assert history.record(SHOP, [], complete=True, at=START + 180) == 1


def test_an_incomplete_answer_takes_nothing_away(history: History) -> None:
    recorded(history, START, offer("a"), offer("b"))
    recorded(history, START + 60, offer("a"), complete=False)
    recorded(history, START + 120, offer("a"), offer("b"))
    (bucket,) = buckets(asked(history, START, START + 120))
    assert bucket.offers == pytest.approx(2.0)


def test_what_nobody_looked_at_counts_for_nothing(history: History) -> None:
    """The daemon was away for ten hours, and the price was another when it came back."""
    watched(history, START, START + HOUR_S + 1, offer("a", price=100))
    watched(history, START + 11 * HOUR_S, START + 12 * HOUR_S + 1, offer("a", price=300))
    found = buckets(asked(history, START, START + 12 * HOUR_S, every_s=HOUR_S))
    assert [(b.start - START) // HOUR_S for b in found] == [0, 1, 11]
    (bucket,) = buckets(asked(history, START, START + 12 * HOUR_S))
    assert bucket.quantiles[1:4] == (100, 100, 300)


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    first = History(tmp_path / "prices.sqlite")
    recorded(first, START, offer("a"), offer("b"), offer("c"))
    recorded(first, START + 60, offer("a"), offer("b"))
    first.close()
    second = History(tmp_path / "prices.sqlite")
    assert recorded(second, START + 120, offer("a"), offer("b", price=7)) == 1
    assert recorded(second, START + 180, offer("a"), offer("b", price=7), offer("c")) == 1
    second.close()


def test_a_range_asked_for_begins_with_the_price_that_held_then(history: History) -> None:
    watched(history, START, START + 5 * HOUR_S, offer("a", price=5))
    found = buckets(asked(history, START + 3 * HOUR_S, START + 4 * HOUR_S))
    assert found[0].low == 5
    assert found[0].offers == pytest.approx(1.0)


def test_gpus_markets_offers_and_pools_are_told_apart(history: History) -> None:
    items = [
        offer("a", price=100),
        offer("b", price=200, gpu="H100_SXM"),
        offer("c", price=300, market=Market.ON_DEMAND),
    ]
    watched(history, START, START + HOUR_S, *items)
    until = START + HOUR_S
    everything = asked(history, START, until)
    assert [(g.gpu, g.market, g.buckets[0].low) for g in everything.groups] == [
        ("H100_SXM", "spot", 200), ("RTX_4090", "on-demand", 300), ("RTX_4090", "spot", 100),
    ]  # fmt: skip
    assert history.gpus() == {"H100_SXM", "RTX_4090"}
    assert [g.gpu for g in asked(history, START, until, gpus=frozenset({"H100_SXM"})).groups] == ["H100_SXM"]
    assert [g.market for g in asked(history, START, until, market=Market.ON_DEMAND).groups] == ["on-demand"]
    assert buckets(asked(history, START, until, offer="a"))[0].high == 100
    assert buckets(asked(history, START, until, pool="pool-c"))[0].high == 300
    assert asked(history, START, until, provider=VAST).groups == ()


def test_rolling_up_changes_no_answer_beyond_its_own_precision(tmp_path: Path) -> None:
    """The same days, rolled up as they passed and not at all: same extremes and numbers, medians close."""
    bazaar = Bazaar(150)
    kept, rolling = History(tmp_path / "kept.sqlite"), History(tmp_path / "rolling.sqlite")
    days = 3
    while bazaar.now < days * DAY_S:
        for history in (kept, rolling):
            history.record(VAST, bazaar.offers(), complete=True, at=START + bazaar.now)
        rolling.step(START + bazaar.now)
        bazaar.pass_time(HOUR_S)
    rolled(rolling, START + days * DAY_S)
    whole = SeriesQuery(since=START, until=START + days * DAY_S, every_s=DAY_S)
    compared = 0
    # Kept was never stepped, so that all of it is read from changes.
    exact, coarse = kept.ask(whole, TERMS), rolling.ask(whole, TERMS)
    assert [g.gpu for g in exact.groups] == [g.gpu for g in coarse.groups]
    for true, found in zip(exact.groups, coarse.groups, strict=True):
        for one, other in zip(true.buckets, found.buckets, strict=True):
            assert (other.start, other.low, other.high) == (one.start, one.low, one.high)
            assert other.offers == pytest.approx(one.offers, rel=1e-3)
            if one.offers > 30:
                assert other.quantiles[2] == pytest.approx(one.quantiles[2], rel=0.1)
                compared += 1
    assert compared >= days
    offer_id = bazaar.offers()[0].offer_id
    alone = replace(whole, offer=offer_id, provider=VAST)
    for true, found in zip(kept.ask(alone, TERMS).groups, rolling.ask(alone, TERMS).groups, strict=True):
        assert [(b.start, b.low, b.high) for b in true.buckets] == [(b.start, b.low, b.high) for b in found.buckets]
    kept.close()
    rolling.close()


def test_after_a_week_changes_are_slots_and_after_ninety_days_nothing(history: History) -> None:
    watched(history, START, START + DAY_S, offer("a", price=100), offer("gone"))
    watched(history, START + DAY_S, START + 9 * DAY_S, offer("a", price=200))
    rolled(history, START + 9 * DAY_S)
    fine = asked(history, START, START + 9 * DAY_S, every_s=HOUR_S, offer="a")
    assert fine.bucket_s == DAY_S // 4
    assert [b.low for b in buckets(fine)] == [100] * 4 + [200] * 32
    recent = asked(history, START + 8 * DAY_S, START + 9 * DAY_S, every_s=HOUR_S, offer="a")
    assert (recent.bucket_s, len(buckets(recent))) == (HOUR_S, 24)
    assert buckets(asked(history, START, START + 9 * DAY_S, offer="gone"))[0].start == START
    later = START + 91 * DAY_S
    watched(history, later - HOUR_S, later + 1, offer("a", price=300))
    rolled(history, later)
    assert asked(history, START, later, offer="gone").groups == ()
    assert buckets(asked(history, START, later, every_s=DAY_S, offer="a"))[0].low == 200
    count = history._open()[0].execute("SELECT count(*) FROM series").fetchone()
    assert count == (1,)


def test_a_step_is_bounded_and_a_pass_survives_a_crash_at_any_step(tmp_path: Path) -> None:
    offers = [offer(f"o{n}", price=1_000 + n) for n in range(700)]
    path = tmp_path / "prices.sqlite"
    history = History(path)
    watched(history, START, START + DAY_S, *offers, every=HOUR_S)
    end, steps = START + DAY_S, 0
    while history.step(end):
        steps += 1
        history.close()  # as a crash would: the place in the pass is lost, so a pass begins anew each time
        history = History(path)
        if steps == 3:
            break
    rolled(history, end)
    found = buckets(asked(history, START, end, every_s=DAY_S // 4))
    assert [(b.low, b.high, round(b.offers)) for b in found] == [(1_000, 1_699, 700)] * 4
    assert steps == 3
    history.close()


def test_too_many_buckets_are_refused_with_a_length_that_would_do(history: History) -> None:
    recorded(history, START, offer("a"))
    with pytest.raises(TooManyBuckets, match="take at least 15m"):
        asked(history, START, START + 20 * DAY_S, every_s=60)


def test_polls_of_an_earlier_time_are_taken_as_of_the_newest(history: History) -> None:
    """A clock that was set back by minutes: nothing is lost and nothing stands before what was there."""
    watched(history, START, START + HOUR_S, offer("a", price=5), every=60)
    recorded(history, START + HOUR_S - 600, offer("a", price=9))
    watched(history, START + HOUR_S, START + 2 * HOUR_S, offer("a", price=9), every=60)
    found = buckets(asked(history, START, START + 2 * HOUR_S, every_s=HOUR_S))
    assert [b.quantiles[2] for b in found] == [5, 9]


@pytest.mark.long
def test_a_market_in_which_every_price_changes_every_minute_stays_within_its_bytes(tmp_path: Path) -> None:
    """The limits win over the ages, whatever a provider sends: here also new ids for a fifth."""
    limit = 400_000
    history = History(tmp_path / "prices.sqlite", Retained(bytes_max=limit))
    number, at, refused = 0, START, 0
    shelf = [offer(f"o{n}") for n in range(40)]
    for _ in range(220):
        for place in range(0, 40, 5):
            number += 1
            shelf[place] = replace(shelf[place], offer_id=OfferId(f"n{number}"))
        shelf = [replace(o, gpu_price=MicroUsdPerHour(o.gpu_price % 9_000_000 + 17)) for o in shelf]
        try:
            recorded(history, at, *shelf)
        except HistoryUnavailable:
            refused += 1
        for _ in range(3):
            history.step(at)
        at += 10 * MINUTE_S
        assert history.path.stat().st_size <= limit
    assert refused < 110, "it must go on recording what is new most of the time"
    assert buckets(asked(history, at - DAY_S, at))[0].offers > 1
    history.close()


def test_ages_grow_back_when_there_is_room_again(tmp_path: Path) -> None:
    history = History(tmp_path / "prices.sqlite", Retained(bytes_max=1_000_000, everything=timedelta(days=3)))
    roller = history._open()[2]
    roller.changes_s = DAY_S / 4
    at = START
    for _ in range(60):
        recorded(history, at, offer("a"))
        rolled(history, at)
        at += DAY_S // 4
    assert roller.changes_s == 7 * DAY_S
    history.close()


def test_when_a_provider_last_offered_a_kind_outlives_a_restart(history: History) -> None:
    watched(history, START, START + 2 * HOUR_S, offer("a"), offer("b"))
    recorded(history, START + 2 * HOUR_S, offer("a"))
    kind = ("RTX_4090", 1)
    assert history.last_offers([SHOP, VAST]) == {SHOP: {kind: pytest.approx(START + 2 * HOUR_S, abs=1)}}, (
        "up to the newest poll"
    )
    recorded(history, START + 3 * HOUR_S)
    recorded(history, START + 9 * HOUR_S)
    history.close()
    assert history.last_offers([SHOP]) == {SHOP: {kind: START + 3 * HOUR_S}}, "until it was gone"
    assert history.last_offers([VAST]) == {}

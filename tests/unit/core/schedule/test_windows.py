"""Windows as instants: over changes of clocks, midnight, the week's end and a leap day, and always in bounded time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.schedule import OpenSpan, instant_of, open_spans, zone_of
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.model import Window
from tests.cases import every

KYIV = ZoneInfo("Europe/Kyiv")
PHOENIX = ZoneInfo("America/Phoenix")
APIA = ZoneInfo("Pacific/Apia")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")
"""Its clocks change by half an hour."""


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def spans(zone: ZoneInfo, at: str, *windows: str) -> list[tuple[str, str]]:
    """The first spans, in local time."""
    found = open_spans(tuple(map(parse_window, windows)), zone, utc(at))

    def local(instant: datetime | None) -> str:
        return "never" if instant is None else f"{instant.astimezone(zone):%a %m-%d %H:%M %z}"

    return [(local(span.opens), local(span.closes)) for span in found[:2]]


@every(
    ("zone", "at", "windows", "expected"),
    [
        pytest.param(
            KYIV, "2026-03-02T12:00", ["Mon-Fri 22:00-08:00"],
            [("Mon 03-02 22:00 +0200", "Tue 03-03 08:00 +0200"), ("Tue 03-03 22:00 +0200", "Wed 03-04 08:00 +0200")],
            id="over midnight",
        ),
        pytest.param(
            KYIV, "2026-03-06T23:00", ["Mon-Fri 22:00-08:00", "Sat,Sun"],
            [("Fri 03-06 22:00 +0200", "Mon 03-09 00:00 +0200"), ("Mon 03-09 22:00 +0200", "Tue 03-10 08:00 +0200")],
            id="overlapping ones are one",
        ),
        pytest.param(
            KYIV, "2026-03-07T23:00", ["Sun 20:00-06:00", "Mon 06:00-07:00"],
            [("Sun 03-08 20:00 +0200", "Mon 03-09 07:00 +0200"), ("Sun 03-15 20:00 +0200", "Mon 03-16 07:00 +0200")],
            id="over the week's end, and one that touches",
        ),
        pytest.param(
            KYIV, "2026-03-04T10:00", ["Wed 18:00-24:00"],
            [("Wed 03-04 18:00 +0200", "Thu 03-05 00:00 +0200"), ("Wed 03-11 18:00 +0200", "Thu 03-12 00:00 +0200")],
            id="until 24:00",
        ),
        pytest.param(
            KYIV, "2028-02-28T12:00", ["Tue 10:00-12:00"],
            [("Tue 02-29 10:00 +0200", "Tue 02-29 12:00 +0200"), ("Tue 03-07 10:00 +0200", "Tue 03-07 12:00 +0200")],
            id="on a leap day",
        ),
        pytest.param(
            KYIV, "2026-03-28T20:00", ["Sat 22:00-08:00"],
            [("Sat 03-28 22:00 +0200", "Sun 03-29 08:00 +0300"), ("Sat 04-04 22:00 +0300", "Sun 04-05 08:00 +0300")],
            id="clocks go forward: nine hours",
        ),
        pytest.param(
            KYIV, "2026-10-24T20:00", ["Sat 22:00-08:00"],
            [("Sat 10-24 22:00 +0300", "Sun 10-25 08:00 +0200"), ("Sat 10-31 22:00 +0200", "Sun 11-01 08:00 +0200")],
            id="clocks go back: eleven hours",
        ),
        pytest.param(
            KYIV, "2026-03-28T20:00", ["Sun 03:30-06:00"],
            [("Sun 03-29 04:00 +0300", "Sun 03-29 06:00 +0300"), ("Sun 04-05 03:30 +0300", "Sun 04-05 06:00 +0300")],
            id="a begin that does not exist is when clocks skip it",
        ),
        pytest.param(
            KYIV, "2026-03-28T20:00", ["Sun 03:10-03:50"],
            [("Sun 04-05 03:10 +0300", "Sun 04-05 03:50 +0300"), ("Sun 04-12 03:10 +0300", "Sun 04-12 03:50 +0300")],
            id="one that is skipped as a whole comes a week later",
        ),
        pytest.param(
            KYIV, "2026-10-24T20:00", ["Sun 03:30-06:00"],
            [("Sun 10-25 03:30 +0300", "Sun 10-25 06:00 +0200"), ("Sun 11-01 03:30 +0200", "Sun 11-01 06:00 +0200")],
            id="a begin that comes twice is the first",
        ),
        pytest.param(
            KYIV, "2026-10-24T20:00", ["Sun 01:00-03:30"],
            [("Sun 10-25 01:00 +0300", "Sun 10-25 03:30 +0300"), ("Sun 11-01 01:00 +0200", "Sun 11-01 03:30 +0200")],
            id="an end that comes twice is the first, and it opens only once",
        ),
        pytest.param(
            KYIV, "2026-10-24T20:00", ["Sun 01:00-03:30", "Sun 03:30-04:00"],
            [("Sun 10-25 01:00 +0300", "Sun 10-25 04:00 +0200"), ("Sun 11-01 01:00 +0200", "Sun 11-01 04:00 +0200")],
            id="what touches on other days touches there",
        ),
        pytest.param(
            PHOENIX, "2026-03-07T20:00", ["Sun 02:30-03:30"],
            [("Sun 03-08 02:30 -0700", "Sun 03-08 03:30 -0700"), ("Sun 03-15 02:30 -0700", "Sun 03-15 03:30 -0700")],
            id="a zone without daylight saving",
        ),
        pytest.param(
            LORD_HOWE, "2026-10-03T00:00", ["Sun 02:15-05:00"],
            [("Sun 10-04 02:30 +1100", "Sun 10-04 05:00 +1100"), ("Sun 10-11 02:15 +1100", "Sun 10-11 05:00 +1100")],
            id="clocks that change by half an hour",
        ),
        pytest.param(
            APIA, "2011-12-29T00:00", ["Fri 10:00-12:00"],
            [("Fri 01-06 10:00 +1400", "Fri 01-06 12:00 +1400"), ("Fri 01-13 10:00 +1400", "Fri 01-13 12:00 +1400")],
            id="a day that is skipped as a whole",
        ),
        pytest.param(KYIV, "2026-03-02T12:00", ["Mon-Sun"], [("Fri 02-27 00:00 +0200", "never")], id="always open"),
        pytest.param(
            KYIV, "2026-03-02T12:00", ["08:00-20:00", "20:00-08:00"], [("Fri 02-27 08:00 +0200", "never")],
            id="always open, of two",
        ),
    ],
)  # fmt: skip
def test_windows_open_and_close_by_local_clocks(
    zone: ZoneInfo, at: str, windows: list[str], expected: list[tuple[str, str]]
) -> None:
    assert spans(zone, at, *windows) == expected


def test_the_end_of_the_calendar_and_a_window_of_nothing_are_searched_in_bounded_time() -> None:
    night = (parse_window("22:00-08:00"),)
    assert open_spans(night, KYIV, datetime.max.replace(tzinfo=UTC)) == ()
    assert open_spans(night, KYIV, datetime.min.replace(tzinfo=UTC)) == ()
    assert open_spans((), KYIV, utc("2026-03-02T12:00")) == ()
    never = Window(days=(), start_min=0, end_min=60)
    stored_by_somebody = Window(days=(9, -1), start_min=10**6, end_min=-5)
    assert open_spans((never, stored_by_somebody), KYIV, utc("2026-03-02T12:00")) == ()


@every("name", ["Nowhere/City", "../../etc/passwd", "Europe", "\0", "a" * 300])
def test_a_zone_that_this_computer_does_not_know_is_none(name: str) -> None:
    assert zone_of(name) is None


ZONES = st.sampled_from([KYIV, PHOENIX, APIA, LORD_HOWE, ZoneInfo("America/New_York"), ZoneInfo("Africa/Casablanca")])
WINDOWS = st.lists(
    st.builds(
        Window,
        days=st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True).map(lambda days: tuple(sorted(days))),
        start_min=st.integers(0, 1439),
        end_min=st.integers(0, 1440),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
INSTANTS = st.datetimes(datetime(2011, 1, 1), datetime(2036, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds are naive by the strategy's rule


@given(zone=ZONES, windows=WINDOWS, at=INSTANTS)
def test_spans_are_in_order_apart_and_after_the_instant(
    zone: ZoneInfo, windows: tuple[Window, ...], at: datetime
) -> None:
    found = open_spans(windows, zone, at)
    assert found  # each window comes within two weeks
    for span, following in zip(found, (*found[1:], None), strict=True):
        assert span.closes is None or span.opens < span.closes
        assert span.closes is None or span.closes > at
        assert following is None or (span.closes is not None and span.closes < following.opens)


@given(zone=ZONES, windows=WINDOWS, at=INSTANTS)
def test_on_a_day_without_a_change_it_is_open_exactly_when_the_clocks_say_so(
    zone: ZoneInfo, windows: tuple[Window, ...], at: datetime
) -> None:
    local = at.astimezone(zone)
    calm = {
        (local + timedelta(hours=hours)).astimezone(UTC).astimezone(zone).utcoffset() for hours in range(-54, 54, 6)
    }
    if len(calm) > 1:
        return
    minute = 60 * local.hour + local.minute

    def holds(window: Window) -> bool:
        end = window.end_min if window.end_min > window.start_min else window.end_min + 1440
        today, before = local.weekday() in window.days, (local.weekday() - 1) % 7 in window.days
        return (today and window.start_min <= minute < end) or (before and window.start_min <= minute + 1440 < end)

    found = open_spans(windows, zone, at)
    assert (found[0].opens <= at) == any(map(holds, windows))


@given(zone=ZONES, local=st.datetimes(datetime(2011, 1, 1), datetime(2036, 1, 1)), more=st.integers(0, 3 * 1440))  # noqa: DTZ001 - as above
def test_a_later_time_of_clocks_is_never_an_earlier_instant(zone: ZoneInfo, local: datetime, more: int) -> None:
    earlier = local.replace(microsecond=0, second=0)
    assert instant_of(earlier, zone) <= instant_of(earlier + timedelta(minutes=more), zone)


def test_what_is_left_of_a_span_counts_from_its_begin_where_it_is_not_open_yet() -> None:
    at = utc("2026-03-02T12:00")
    assert OpenSpan(at + timedelta(hours=1), at + timedelta(hours=3)).left(at) == timedelta(hours=2)
    assert OpenSpan(at - timedelta(hours=1), at + timedelta(hours=3)).left(at) == timedelta(hours=3)

"""Windows and zones as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec.fields import parse_window, window_words
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import Schedule, Window
from spotd_jobs.spec.parse import parse_job
from spotd_jobs.spec.problems import SpecError
from tests.cases import every

LEAST: dict[str, Any] = {"name": "a", "run": "true", "image": "scratch", "resources": {"gpu": ["H100:1"]}}


def schedule_of(**schedule: Any) -> Schedule:
    return parse_job({**LEAST, "schedule": schedule}, "").schedule


def problems(**schedule: Any) -> dict[str, tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        schedule_of(**schedule)
    return {one.key: (one.message, one.hint) for one in caught.value.problems}


@every(
    ("text", "days", "start", "end", "words"),
    [
        ("Mon-Fri 22:00-08:00", (0, 1, 2, 3, 4), 1320, 480, "Mon-Fri 22:00-08:00"),
        ("Sat,Sun", (5, 6), 0, 1440, "Sat,Sun"),
        ("sunday", (6,), 0, 1440, "Sun"),
        ("Fri-Mon 9:00-17:30", (0, 4, 5, 6), 540, 1050, "Mon,Fri-Sun 09:00-17:30"),
        ("22:00 - 24:00", (0, 1, 2, 3, 4, 5, 6), 1320, 1440, "22:00-24:00"),
        (" Mon-Wed, Fri  00:00-24:00 ", (0, 1, 2, 4), 0, 1440, "Mon-Wed,Fri"),
        ("Mon-Sun", (0, 1, 2, 3, 4, 5, 6), 0, 1440, "Mon-Sun"),
        ("23:59-00:00", (0, 1, 2, 3, 4, 5, 6), 1439, 0, "23:59-00:00"),
    ],
)
def test_a_window_is_days_and_times(text: str, days: tuple[int, ...], start: int, end: int, words: str) -> None:
    window = parse_window(text)
    assert window == Window(days=days, start_min=start, end_min=end)
    assert window_words(window) == words
    assert parse_window(words) == window


@given(
    st.builds(
        Window,
        days=st.lists(st.integers(0, 6), min_size=1, unique=True).map(lambda days: tuple(sorted(days))),
        start_min=st.integers(0, 1439),
        end_min=st.integers(0, 1440),
    ).filter(lambda window: window.start_min != window.end_min)
)
def test_every_window_is_read_back_as_it_is_shown(window: Window) -> None:
    assert parse_window(window_words(window)) == window


@every(
    ("text", "message", "hint"),
    [
        ("Mo 22:00-08:00", '"Mo 22:00-08:00" names "Mo", which is no day of the week', 'did you mean "Mon"?'),
        ("Xyz", '"Xyz" names "Xyz", which is no day of the week', "the days are Mon, Tue, Wed, Thu, Fri, Sat, Sun"),
        ("Mon-", '"Mon-" names "", which is no day of the week', "the days are Mon, Tue, Wed, Thu, Fri, Sat, Sun"),
        ("22:00", '"22:00" has no time from and to', "write the times as 22:00-08:00"),
        ("22:00-25:00", '"22:00-25:00" has a time that no clock shows', "a window begins at 00:00"),
        ("24:00-08:00", '"24:00-08:00" has a time that no clock shows', "a window begins at 00:00"),
        ("10:60-11:00", '"10:60-11:00" has a time that no clock shows', "a window begins at 00:00"),
        ("10:00-10:00", '"10:00-10:00" ends when it begins', "the whole day is 00:00-24:00"),
        ("", '"" is not a window of days and times', 'write windows = ["Mon-Fri 22:00-08:00", "Sat,Sun"]'),
        ("Mon 1" * 40, "is not a window of days and times", "write windows"),
        (7, "must be text, not a number", "write windows"),
    ],
)
def test_what_is_no_window_is_refused_with_a_way_out(text: object, message: str, hint: str) -> None:
    [(found, way_out)] = problems(windows=[text], timezone="UTC").values()
    assert message in found
    assert hint in way_out


def test_windows_and_their_zone_go_together() -> None:
    one = schedule_of(windows="Sat,Sun", timezone="Europe/Kyiv")
    assert one == Schedule(windows=(parse_window("Sat,Sun"),), timezone="Europe/Kyiv")
    assert problems(windows=["Sat"])["schedule.timezone"][0] == "is missing, and windows are times of its clocks"
    assert problems(timezone="UTC")["schedule.timezone"][0] == "has no windows that it is for"
    assert problems(windows=[], timezone="UTC")["schedule.windows"][0] == "must not be empty"
    assert (
        problems(windows=["Sat", "saturday"], timezone="UTC")["schedule.windows[1]"][0] == '"saturday" is given twice'
    )


@every(
    ("zone", "hint"),
    [
        ("Europe/Kyjiv", 'did you mean "Europe/Kyiv"?'),
        ("new york", 'did you mean "America/New_York"?'),
        ("Kyiv", 'did you mean "Europe/Kyiv"?'),
        ("../../etc/passwd", 'write timezone = "Europe/Kyiv", or "UTC"'),
        ("Europe", "did you mean"),
        ("x" * 10_000, 'write timezone = "Europe/Kyiv", or "UTC"'),
        (2, 'write timezone = "Europe/Kyiv", or "UTC"'),
    ],
)
def test_an_unknown_zone_is_refused_with_the_nearest(zone: object, hint: str) -> None:
    assert hint in problems(windows=["Sat"], timezone=zone)["schedule.timezone"][1]


def test_a_job_is_shown_with_its_windows() -> None:
    spec = parse_job({**LEAST, "schedule": {"windows": ["mon-fri 22:00-8:00"], "timezone": "UTC"}}, "")
    assert job_file(spec)["schedule"] == {"windows": ["Mon-Fri 22:00-08:00"], "timezone": "UTC", "priority": 0}
    assert job_file(parse_job(LEAST, ""))["schedule"] == {"priority": 0}

"""What stands on the screen, and what the keys do to a real daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotd.top.screens import Snapshot
from spotd_providers.kit.boundary import install_command
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.top.conftest import Driver

Run = Callable[..., None]


def test_jobs_machines_market_and_events_are_shown(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()

    async def course(view: Driver) -> None:
        assert "no jobs" not in view.screen(), "nothing is known yet"
        await view.ask()
        text = view.screen()
        assert "spotd lab  1 machine  $2.31/h  1 running  1 waiting" in text
        assert text.index("llama-lora") < text.index("prep") < text.index("old")
        assert "llama-lora (6k0a1b2c3d): runs on local h3" in text
        await view.press("down")
        assert "is $0.2100 above the ceiling" in view.screen()
        await view.press("2")
        assert "local/h3" in view.screen()
        await view.press("tab")
        assert "local/h4" in view.screen()
        await view.press("4")
        assert "job.waiting_price" in view.screen()
        await view.press("question_mark")
        assert "its checkpoints stay" in view.screen()

    play(course)


def test_a_job_is_cancelled_only_after_a_yes(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()

    def state() -> Any:
        return ctl("ls", "-o", "table").out.splitlines()

    async def course(view: Driver) -> None:
        await view.ask()
        await view.press("down", "c")
        assert "cancel prep (6k0a9zzzzz)?" in view.screen()
        await view.press("enter")
        assert not any("prep" in line and "CANCELLED" in line for line in state())
        await view.press("c", "y")
        await view.until(lambda: "prep is CANCELLED" in view.screen())
        await view.ask()
        await view.press("end", "home", "down", "c")

    play(course)
    assert any("prep" in line and "CANCELLED" in line for line in state())


def test_an_ended_job_is_not_cancelled_and_its_row_says_so(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()

    async def course(view: Driver) -> None:
        await view.ask()
        await view.press("end", "c")
        assert "old has ended already" in view.screen()

    play(course)


def test_a_key_that_means_nothing_changes_nothing(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()
    before = ctl("ls", "-o", "json").out

    async def course(view: Driver) -> None:
        await view.ask()
        await view.press("down")
        shown = view.screen()
        unknown = ("x", "Z", "0", "9", "f5", "f12", "ctrl+r", "ctrl+x", "alt+q", "delete", "insert", "space", "ü", "%")
        for key in unknown:
            await view.press(key)
            assert view.screen() == shown, key
        await view.press("c", *unknown)
        assert "cancel prep (6k0a9zzzzz)?" in view.screen(), "a question is answered by its own keys alone"
        await view.press("n")
        assert "cancel prep" not in view.screen()

    play(course)
    assert [job["state"] for job in json.loads(before)["jobs"]] == [
        job["state"] for job in json.loads(ctl("ls", "-o", "json").out)["jobs"]
    ]


def test_a_ceiling_is_changed_after_it_was_typed_and_confirmed(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()

    async def course(view: Driver) -> None:
        await view.ask()
        await view.press("down", "p", *"2.5", "enter")
        assert "change the ceiling of prep (6k0a9zzzzz) from $2.400 per GPU-hour to 2.5?" in view.screen()
        await view.press("y")
        await view.until(lambda: "ceiling 2.5: prep is" in view.screen())
        await view.press("p", *"much", "enter", "y")
        await view.until(lambda: "much" in view.screen())

    play(course)
    assert "ceiling:    $2.500 per GPU-hour" in ctl("show", "prep").out


def test_an_array_is_one_line_until_a_filter_asks_for_its_jobs(ctl: Ctl, play: Run, tmp_path: Path) -> None:
    ctl.place.write_three_jobs()
    file = tmp_path / "sweep.toml"
    file.write_text('name = "sweep"\nrun = "true"\nimage = "scratch"\n[resources]\ngpu = ["H100:1"]\n')
    assert ctl("submit", str(file), "--array", "0-3", "-y").code == 0

    async def course(view: Driver) -> None:
        await view.ask()
        assert "sweep 4/4" in view.screen()
        assert view.rows("jobs") == 4
        await view.press("slash", "slash")
        assert view.rows("jobs") == 1, "the machine of local/h3"
        await view.press("escape", "slash", *"SWEEP")
        assert view.rows("jobs") == 4
        assert "llama-lora" not in view.screen()
        assert "sweep 4/4" not in view.screen()
        await view.press(*"-no", "enter")
        assert "no row has sweep-no in it" in view.screen()
        await view.press("escape")
        assert "sweep 4/4" in view.screen()
        await view.until(lambda: view.app.focused is not None and view.app.focused.id == "jobs")
        await view.press("home", "down", "l")
        assert "an array has no log of its own" in view.screen()
        await view.press("c")
        assert ": every job of the array" in view.screen()
        await view.press("y")
        await view.until(lambda: "every job of array sweep" in view.screen())

    play(course)
    assert ctl("ls").out.count("CANCELLED") == 1


def test_a_log_is_shown_without_what_a_terminal_would_obey(ctl: Ctl, play: Run) -> None:
    ctl.place.write_three_jobs()
    wide = "w" * 1_000_000
    ctl.place.streams("logs.stream", [
        made_responses.log("\x1b[31mstep 1\x1b]0;owned\x07\n", cursor=1),
        made_responses.log(f"{wide}\nstep [bold]2\n", cursor=2),
        made_responses.log("", kind="end", state="RUNNING", cursor=3),
    ])  # fmt: skip

    async def course(view: Driver) -> None:
        from textual.widgets import Log

        await view.ask()
        await view.press("l")
        await view.until(lambda: "step [bold]2" in view.screen())
        lines = list(view.app.screen.query_one(Log).lines)
        assert lines[:3] == ["step 1", "w" * 2_000, "step [bold]2"]
        await view.press("c")
        assert "cancel" not in view.screen(), "the tables are covered"
        await view.press("escape")
        assert "llama-lora" in view.screen()

    play(course)


def test_a_daemon_that_is_away_is_said_to_be_and_comes_back(ctl: Ctl, play: Run, tmp_path: Path) -> None:
    ctl.place.write_three_jobs()
    socket = tmp_path / "s.sock"
    socket.symlink_to(ctl.place.socket)

    async def course(view: Driver) -> None:
        await view.ask()
        socket.unlink()
        await view.ask()
        text = view.screen()
        assert "the daemon is not running" in text
        assert "below is what it was" in " ".join(text.split())
        assert "llama-lora" in text
        await view.press("c", "y")
        await view.until(lambda: view.screen().count("the daemon is not running") == 2)
        socket.symlink_to(ctl.place.socket)
        await view.ask()
        assert "asked again" not in view.screen()

    play(course, socket=socket)


def test_names_and_reasons_cannot_steer_the_terminal(ctl: Ctl, play: Run) -> None:
    ctl.place.write(worlds.running(host="h\x1b[31m3\x1b]0;owned\x07\u202eevil\nline", reason="a\x9b2J[bold]b[/bold]"))

    async def course(view: Driver) -> None:
        await view.ask()
        text = view.screen()
        assert not {char for char in text if char in "\x1b\x07\x9b\u202e"}
        assert "local/h3evil line" in text
        await view.press("c")
        assert "on local/h3evil line?" in view.screen()

    play(course)


@pytest.mark.parametrize("size", [(80, 24), (12, 5), (1, 1)], ids=str)
def test_a_thousand_jobs_fit_any_terminal(play: Run, size: tuple[int, int]) -> None:
    jobs = [made_responses.job(id=f"j{n:04d}", name=f"job-{n:04d}", state="WAITING_PRICE") for n in range(1000)]
    odd = made_responses.job(
        id="odd", name="n" * 100_000, effective_usd_h=1e308, spent_usd=float("nan"), submitted_at="soon", saved_usd=None
    )

    async def course(view: Driver) -> None:
        status = {"install": "lab", "machines": 1, "jobs": {}, "spent_day_usd": 1e308, "spent_month_usd": 0.0}
        view.app.take(Snapshot(now=made_responses.NOW, asked_at=1.0, status=status, jobs=[odd, *jobs]))
        for keys in (("end", "pageup"), ("2",), ("3",), ("1", "c")):
            await view.press(*keys)
            lines = view.screen().splitlines()
            assert len(lines) <= size[1]
            assert max(map(len, lines), default=0) <= size[0]
        await view.press("n")
        await view.press("end")
        view.app.take(Snapshot(now=made_responses.NOW, asked_at=1.0, status=status, jobs=[odd, *jobs][:500]))
        await view.pilot.pause()
        assert view.rows("jobs") == 500

    play(course, size=size)


def test_the_cursor_stays_on_its_job_while_others_come_and_go(play: Run) -> None:
    def shown(*names: str) -> Snapshot:
        return Snapshot(
            now=made_responses.NOW, asked_at=1.0, jobs=[made_responses.job(id=name, name=name) for name in names]
        )

    async def course(view: Driver) -> None:
        view.app.take(shown("a", "b", "c"))
        await view.press("down")
        view.app.take(shown("new", "a", "b", "c"))
        await view.press("c")
        assert "cancel b (b)" in view.screen()

    play(course)


def test_without_a_terminal_or_its_library_the_way_out_is_named(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ctl("top")
    assert (result.code, result.out) == (2, "")
    assert "this view needs a terminal" in result.err
    monkeypatch.setattr("spotd.cli.inputs.options.find_spec", lambda name: None)
    assert f"hint: {install_command('tui')}" in ctl("top").err

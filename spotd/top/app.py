"""The application: four tables over one feed, and the keys that change something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final, cast

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import ContentSwitcher, Footer, Input, Static

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.lists import is_line_of_array, with_arrays_as_one
from spotd.top.columns import EVENT_COLUMNS, MARKET_COLUMNS, Sheet, job_columns, machine_columns, machines, sentence
from spotd.top.screens import Confirm, Feed, Help, LogScreen, NewCeiling, Questions, Snapshot
from spotd.words import FINAL_STATES, clean, count, dollars, money, price, short_span, where_text

VIEWS: Final = ("jobs", "machines", "market", "events")
_OF_TABLES: Final = frozenset({"view", "next_view", "cancel", "log", "ceiling", "now", "help", "filter", "unfilter"})
STALE_S: Final = 10.0
_TABS_WIDE: Final = 56
_RANK: Final = {"RUNNING": 0, "STARTING": 0, "PROVISIONING": 0, "CANCELLING": 0, "RECOVERING": 1}


class Top(App[None]):
    """A live view of one daemon."""

    TITLE = "spotctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; }
    #error { height: auto; max-height: 3; color: $text-error; }
    #tabs { height: 1; }
    ContentSwitcher { height: 1fr; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #sentence { height: 2; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view('{name}')", name.title(), show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("tab", "next_view", "View", priority=True),
        Binding("c", "cancel", "Cancel"),
        Binding("l", "log", "Log"),
        Binding("p", "ceiling", "Ceiling"),
        # Before the next key is given to anything: that is part of the text, and no order.
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("escape", "unfilter", "All", show=False),
        Binding("r", "now", "Now"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    class Polled(Message):
        """The newest answer of the daemon."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

    class Done(Message):
        """What came of something that the user asked for."""

        def __init__(self, words: str, *, failed: bool = False) -> None:
            super().__init__()
            self.words = words
            self.failed = failed

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self._daemon = daemon
        self.questions = Questions(daemon)
        self._feed = Feed(self.questions, lambda snapshot: self.post_message(self.Polled(snapshot)))
        self.snapshot = Snapshot()
        self._is_busy = False
        self._summary, self._error, self._tabs = Static(id="summary"), Static(id="error"), Static(id="tabs")
        self._sentence = Static(id="sentence")
        self._switcher = ContentSwitcher(initial="jobs")
        self._filter = Input(
            id="filter", placeholder="a text of any column; Enter keeps it, Escape shows all", max_length=80
        )
        self._sheets = {
            "jobs": Sheet(job_columns(self._now), key=lambda job: job["id"], name="jobs",
                          empty="no jobs; queue one with spotctl submit"),
            "machines": Sheet(machine_columns(self._now), key=lambda row: f"{row[0]['id']}#{row[1]['attempt']}",
                              name="machines", empty="no machine is rented now"),
            "market": Sheet(MARKET_COLUMNS, key=lambda quote: f"{quote['provider']}/{quote['offer']}", name="market",
                            empty="nothing is offered now"),
            "events": Sheet(EVENT_COLUMNS, key=lambda event: str(event["id"]), name="events",
                            empty="nothing happened yet"),
        }  # fmt: skip

    def compose(self) -> ComposeResult:
        yield self._summary
        yield self._error
        yield self._tabs
        yield self._filter
        with self._switcher:
            yield from self._sheets.values()
        yield self._sentence
        yield Footer()

    def on_mount(self) -> None:
        self._sheets["jobs"].focus()
        self._show()
        self.set_interval(1.0, self._show_head)
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    def on_top_polled(self, message: Polled) -> None:
        self.take(message.snapshot)

    def take(self, snapshot: Snapshot) -> None:
        """Show an answer."""
        self.snapshot = snapshot
        self._show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the tables mean nothing while something else covers them."""
        del parameters
        if action == "filter" and self._filter.has_focus:
            return False
        return action == "quit" or len(self.screen_stack) == 1 or action not in _OF_TABLES

    # --- what is shown ---

    @property
    def view(self) -> str:
        return self._switcher.current or VIEWS[0]

    def row_count(self, name: str) -> int:
        return self._sheets[name].row_count

    def _now(self) -> str:
        return self.snapshot.now

    def _show(self) -> None:
        snapshot, wanted = self.snapshot, self._filter.value.strip().casefold()
        jobs: Any = sorted(snapshot.jobs, key=_rank)
        rows = {
            "jobs": jobs if wanted else with_arrays_as_one(jobs, cast("Any", snapshot.arrays)),
            "machines": machines(snapshot),
            "market": snapshot.quotes,
            "events": snapshot.events,
        }
        for name, items in rows.items():
            self._sheets[name].show_items(items, is_known=snapshot.asked_at > 0, wanted=wanted)
        self._show_head()
        self._show_sentence()

    def _show_head(self) -> None:
        snapshot = self.snapshot
        self._summary.update(summary(snapshot))
        age = time.monotonic() - snapshot.asked_at if snapshot.asked_at else 0.0
        error = ""
        if snapshot.error:
            old = f"; below is what it was {short_span(age)} ago" if snapshot.asked_at else ""
            hint = f": {snapshot.hint}" if snapshot.hint else ""
            error = f"{snapshot.error}{hint}{old}; asked again every {snapshot.retry_s:.0f} s"
        elif snapshot.paused:
            error = f"nothing is launched now: {snapshot.paused}"
        elif snapshot.asked_at and age > STALE_S + snapshot.retry_s:
            error = f"the daemon has not answered for {short_span(age)}"
        elif snapshot.silences and self.view == "market":
            error = "; ".join(snapshot.silences)
        elif not snapshot.asked_at:
            error = "asking the daemon"
        self._error.display = bool(error)
        self._error.update(Text(clean(error)))
        tabs = Text(no_wrap=True, overflow="ellipsis")
        for number, name in enumerate(VIEWS, 1):
            rows = f" {self.row_count(name)}" if self.size.width >= _TABS_WIDE else ""
            tabs.append(f" {number} {name}{rows} ", style="reverse" if name == self.view else "")
        self._tabs.update(tabs)

    def _show_sentence(self) -> None:
        item = self._sheets[self.view].current
        words = "" if item is None else clean(sentence(self.view, item, self.snapshot.now))
        self._sentence.update(Text(words))

    def on_sheet_moved(self, message: Sheet.Moved) -> None:
        del message
        self._show_sentence()

    # --- keys ---

    def action_view(self, name: str) -> None:
        self._switcher.current = name
        self.questions.wants_prices = name == "market"
        if name == "market":
            self._feed.soon()
        self._sheets[name].focus()
        self._show_head()
        self._show_sentence()

    def action_next_view(self) -> None:
        self.action_view(VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)])

    def action_filter(self) -> None:
        self._filter.display = True
        self.screen.set_focus(self._filter)

    def action_unfilter(self) -> None:
        self._filter.value = ""
        self._filter.display = False
        self._sheets[self.view].focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input is self._filter:
            self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is self._filter:
            self._filter.display = bool(event.value.strip())
            self._sheets[self.view].focus()

    def action_now(self) -> None:
        self._feed.soon()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_log(self) -> None:
        if (job := self._job()) is None:
            return
        if is_line_of_array(job):
            self._say("an array has no log of its own; / and a part of its name list its jobs", failed=True)
        else:
            self.push_screen(LogScreen(job, self._daemon))

    def action_cancel(self) -> None:
        job = self._job()
        if job is None:
            return
        if job["state"] in FINAL_STATES:
            self._say(f"{job['name']} has ended already: {job['reason']}", failed=True)
            return
        machine = f" on {where_text(job)}" if job["provider"] else ""
        if is_line_of_array(job):
            machine = ": every job of the array"
        question = f"cancel {job['name']} ({job['id']}){machine}? {money_words(job)}; its checkpoints stay"
        self._ask(question, lambda: _outcome_text(self._daemon.cancel(job["id"])))

    def action_ceiling(self) -> None:
        job = self._job()
        if job is None:
            return

        def chosen(limit: str | None) -> None:
            if not limit:
                return
            before = "" if (usd := job.get("ceiling_usd_gpu_h")) is None else f" from ${price(usd)} per GPU-hour"
            question = f"change the ceiling of {job['name']} ({job['id']}){before} to {limit}?"
            self._ask(question, lambda: f"ceiling {limit}: {_outcome_text(self._daemon.set_ceiling(job['id'], limit))}")

        self.push_screen(NewCeiling(job), chosen)

    def _job(self) -> Any | None:
        """Return the job of the row, saying so where the row has none."""
        item = self._sheets[self.view].current
        if self.view == "machines" and item is not None:
            return item[0]
        if self.view == "jobs" and item is not None:
            return item
        if self.view == "events" and item is not None:
            job = next((job for job in self.snapshot.jobs if job["id"] == item["job"]), None)
            if job is not None:
                return job
        self._say("no job has this row", failed=True)
        return None

    # --- changes ---

    def _ask(self, question: str, act: Callable[[], str]) -> None:
        self.push_screen(Confirm(question), lambda yes: self._do(act) if yes else None)

    def _do(self, act: Callable[[], str]) -> None:
        """Do it in a thread of its own, one at a time: the daemon may take its time."""
        if self._is_busy:
            self._say("the daemon has not answered what was asked before", failed=True)
            return
        self._is_busy = True

        def work() -> None:
            try:
                message = self.Done(act())
            except ClientError as exc:
                message = self.Done(f"{exc.message}: {exc.hint}" if exc.hint else exc.message, failed=True)
            with suppress(RuntimeError):  # the screen went away meanwhile
                self.post_message(message)

        threading.Thread(target=work, name="change", daemon=True).start()

    def on_top_done(self, message: Done) -> None:
        self._is_busy = False
        self._say(message.words, failed=message.failed)
        self._feed.soon()

    def _say(self, words: str, *, failed: bool = False) -> None:
        self.notify(clean(words), severity="error" if failed else "information", markup=False)


def money_words(job: Any) -> str:
    return f"{dollars(job['spent_usd'])} is spent"


def _outcome_text(answer: Any) -> str:
    if "array" in answer:
        return f"every job of array {answer['array']['name']}"
    job = answer["job"]
    return f"{job['name']} is {job['state']}: {job['reason']}"


def _rank(job: Any) -> int:
    """Order jobs: with a machine, recovering, waiting, ended; within each as the daemon lists them, newest first."""
    return 3 if job["state"] in FINAL_STATES else _RANK.get(job["state"], 2)


def summary(snapshot: Snapshot) -> Text:
    status = snapshot.status
    if not status:
        return Text("spotd", style="bold")
    per_hour = sum(job["effective_usd_h"] or 0 for job in snapshot.jobs)
    jobs = status["jobs"]
    waiting = jobs.get("WAITING_PRICE", 0) + jobs.get("QUEUED", 0)
    parts = [
        f"spotd {clean(status['install'])}",
        count(status["machines"], "machine"),
        f"${money(per_hour)}/h",
        f"{jobs.get('RUNNING', 0)} running",
        f"{waiting} waiting",
        *([f"{jobs['RECOVERING']} recovering"] if jobs.get("RECOVERING") else []),
        f"today {dollars(status['spent_day_usd'])}",
        f"month {dollars(status['spent_month_usd'])}",
    ]
    return Text("  ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")

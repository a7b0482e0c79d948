"""What opens above the tables: a question, a new ceiling, a log, and the help."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Log, Static

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.words import ControlFilter, clean, silence_texts

LOG_LINES_MAX: Final = 5_000
LINE_CHARS_MAX: Final = 2_000
LOG_TAIL: Final = 300
RECORDS_MAX: Final = 200
"""Of one question: what a log has more of comes with the next."""
LOG_EVERY_S: Final = 3.0
LOG_AWAY_S: Final = 10.0

HELP: Final = """\
1 2 3 4    jobs, machines, market, events; Tab goes on
Up Down    the row; Page Up, Page Down, Home, End
c          cancel the job of the row: its machine is ended, its checkpoints stay
l          the log of the job, as it is written
p          another ceiling for the job
/          only rows with a text in them, each job of an array on its own; Escape shows all
r          ask the daemon now
?          this help
q          leave; jobs and the daemon go on

Each question that changes something is asked again before it is done.
"""


class Confirm(ModalScreen[bool]):
    """A question; only `y` is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes"),
        Binding("n,escape,enter,q", "no", "No"),
    ]
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 90%; max-width: 76; height: auto; border: round $warning; padding: 0 1; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = clean(question)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._question))
            yield Static(Text("y: yes   n: no", style="bold"))

    def action_yes(self) -> None:
        self.dismiss(True)  # noqa: FBT003 - the result of a screen has no name in textual

    def action_no(self) -> None:
        self.dismiss(False)  # noqa: FBT003 - as above


class NewCeiling(ModalScreen[str]):
    """A line for a ceiling; empty where it is left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]
    DEFAULT_CSS = """
    NewCeiling { align: center middle; }
    NewCeiling > Vertical { width: 90%; max-width: 76; height: auto; border: round $accent; padding: 0 1; }
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self._name = clean(job["name"])

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(f"ceiling of {self._name}: 2.40 per GPU-hour, 19.20/h, or config"))
            yield Input(placeholder="2.40", max_length=40)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        self.dismiss("")


class Help(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "app.pop_screen", "Back")]
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 95%; max-width: 90; height: auto; max-height: 95%; border: round $accent; }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(HELP))


class LogScreen(Screen[None]):
    """What a job writes. A thread of its own asks, so that a daemon which hangs holds up neither screen nor end."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,l", "leave", "Back")]

    class Written(Message):
        """More of the log, cleaned, or why there is none now."""

        def __init__(self, text: str, error: str = "") -> None:
            super().__init__()
            self.text = text
            self.error = error

    def __init__(self, job: Mapping[str, Any], daemon: Daemon) -> None:
        super().__init__()
        self._job = job["id"]
        self._title = clean(f"log of {job['name']} ({job['id']})")
        self._reader = LogReader(daemon, self._job)
        self._over = threading.Event()

    def compose(self) -> ComposeResult:
        yield Static(Text(self._title, style="bold"), id="title")
        yield Log(max_lines=LOG_LINES_MAX)
        yield Footer()

    def on_mount(self) -> None:
        threading.Thread(target=self._read, name="log", daemon=True).start()

    def action_leave(self) -> None:
        self._over.set()
        self.app.pop_screen()

    def on_unmount(self) -> None:
        self._over.set()

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                message = self.Written(self._reader.more())
            except ClientError as exc:
                message = self.Written("", exc.message)
            if self._over.is_set():
                return
            with suppress(RuntimeError):  # the screen went away meanwhile
                self.post_message(message)
            self._over.wait(LOG_AWAY_S if message.error else LOG_EVERY_S)

    def on_log_screen_written(self, message: Written) -> None:
        if self._over.is_set():
            return
        log = self.query_one(Log)
        if message.text:
            log.write(message.text)
        waits = "" if log.line_count > 1 or message.text else ": nothing is written yet"
        words = f": {clean(message.error)}" if message.error else waits
        self.query_one("#title", Static).update(
            Text(self._title + words, style="bold red" if message.error else "bold")
        )


class LogReader:
    """The log of one job from its last lines on, each part once, as text that no terminal obeys."""

    def __init__(self, daemon: Daemon, job: str) -> None:
        self._daemon = daemon
        self._job = job
        self._cursor = ""
        self._controls = ControlFilter()
        self._column = 0

    def more(self) -> str:
        """Return what was written since the last call, a bounded part of it.

        Raises:
            ClientError
        """
        query: dict[str, Any] = {"after": self._cursor} if self._cursor else {"tail": LOG_TAIL}
        parts: list[str] = []
        for number, record in enumerate(self._daemon.logs(self._job, query)):
            if record["kind"] == "end" or number >= RECORDS_MAX:
                break
            self._cursor = record["cursor"]
            if record["kind"] == "log":
                parts.append(self._cut(self._controls.feed(record["text"])))
            elif record["text"]:
                parts.append(("\n" if self._column else "") + f"--- {clean(record['text'])} ---\n")
                self._column = 0
        return "".join(parts)

    def _cut(self, text: str) -> str:
        """Cut lines that no screen shows, also where they come in parts."""
        lines = text.split("\n")
        kept = []
        for place, line in enumerate(lines):
            room = max(0, LINE_CHARS_MAX - (self._column if place == 0 else 0))
            kept.append(line[:room])
        self._column = len(lines[-1]) + (self._column if len(lines) == 1 else 0)
        return "\n".join(kept)


# What the daemon says, asked for at a pace that never holds it up. Knows nothing of the screen.
#
# One thread asks, one question at a time. It pauses ten times as long as the last answers took, two seconds at least,
# and doubles its pause while the daemon is away. So a view costs the daemon a tenth of its time at most, however many
# jobs there are.


PAUSE_S: Final = 2.0
PAUSE_MAX_S: Final = 30.0
REST_FACTOR: Final = 10.0
ENDED_MAX: Final = 50
QUOTES_MAX: Final = 200
EVENTS_MAX: Final = 500
PRICES_EVERY_S: Final = 15.0

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is shown, as of one moment.

    Attributes:
        now: the daemon's clock, as text of the API.
        asked_at: when it was asked, by this process's steady clock.
        error, hint: why there is no newer answer; empty while the daemon answers.
        retry_s: when it is asked again.
    """

    now: str = ""
    asked_at: float = 0.0
    status: Row = field(default_factory=dict)
    jobs: Sequence[Row] = ()
    arrays: Sequence[Row] = ()
    """Sums of those of which not all jobs are listed."""
    paused: str = ""
    quotes: Sequence[Row] = ()
    silences: Sequence[str] = ()
    """Sentences on providers whose prices are missing."""
    events: Sequence[Row] = ()
    error: str = ""
    hint: str = ""
    retry_s: float = PAUSE_S


class Questions:
    """Asks the daemon, and remembers what need not be asked for each time."""

    def __init__(self, daemon: Daemon, *, ticks: Callable[[], float] = time.monotonic) -> None:
        self._daemon = daemon
        self._ticks = ticks
        self._events: deque[Row] = deque(maxlen=EVENTS_MAX)
        self._prices_at: float | None = None
        self._newest = Snapshot()
        self._failures = 0
        self.wants_prices = False
        """Whether the market is on the screen."""

    def snapshot(self) -> Snapshot:
        """Return the newest answers; where the daemon is away those of before, and why."""
        began = self._ticks()
        try:
            self._newest = self._ask(began)
        except ClientError as exc:
            return self.failed(exc.message, exc.hint)
        self._failures = 0
        return self._newest

    def failed(self, error: str, hint: str) -> Snapshot:
        """Return the answers of before, and why there are no newer ones."""
        self._failures += 1
        pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(self._failures - 1, 10))
        return replace(self._newest, error=error, hint=hint, retry_s=pause)

    def _ask(self, began: float) -> Snapshot:
        status = self._daemon.status()
        page = self._daemon.jobs({"limit": ENDED_MAX})
        query: dict[str, Any] = {"limit": EVENTS_MAX}
        if self._events:
            query["after"] = self._events[-1]["id"]
        self._events.extend(self._daemon.events(query))
        quotes, silences = self._newest.quotes, self._newest.silences
        if self._prices_at is None or (self.wants_prices and began - self._prices_at >= PRICES_EVERY_S):
            answer = self._daemon.prices({"limit": QUOTES_MAX})
            quotes, silences, self._prices_at = answer["quotes"], silence_texts(answer), began
        took = self._ticks() - began
        return Snapshot(
            now=page["now"],
            asked_at=self._ticks(),
            status=status["status"],
            jobs=page["jobs"],
            arrays=page.get("arrays", ()),
            paused=page["paused"],
            quotes=quotes,
            silences=silences,
            events=tuple(reversed(self._events)),
            retry_s=min(PAUSE_MAX_S, max(PAUSE_S, REST_FACTOR * took)),
        )


class Feed:
    """The thread that asks. It never outlives the process: an answer that hangs does not hold up the end."""

    def __init__(self, questions: Questions, deliver: Callable[[Snapshot], object]) -> None:
        self._questions = questions
        self._deliver = deliver
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Ask again at once, for instance since the user changed something."""
        self._wake.set()

    def stop(self) -> None:
        self._is_over = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_over:
            self._wake.clear()
            try:
                snapshot = self._questions.snapshot()
            except Exception as exc:  # noqa: BLE001 - a thread that died in silence would leave an old screen as if it were new
                snapshot = self._questions.failed(f"a defect of spotd itself: {type(exc).__name__}: {exc}", "")
            if self._is_over:
                return
            with suppress(RuntimeError):  # the screen went away meanwhile
                self._deliver(snapshot)
            self._wake.wait(snapshot.retry_s)

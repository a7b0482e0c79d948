"""What opens above the tables: a question, a new ceiling, a log, and the help."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Log, Static

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError
from spotd.words import ControlFilter, clean

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
                parts.append(self._bounded(self._controls.feed(record["text"])))
            elif record["text"]:
                parts.append(("\n" if self._column else "") + f"--- {clean(record['text'])} ---\n")
                self._column = 0
        return "".join(parts)

    def _bounded(self, text: str) -> str:
        """Cut lines that no screen shows, also where they come in parts."""
        lines = text.split("\n")
        kept = []
        for place, line in enumerate(lines):
            room = max(0, LINE_CHARS_MAX - (self._column if place == 0 else 0))
            kept.append(line[:room])
        self._column = len(lines[-1]) + (self._column if len(lines) == 1 else 0)
        return "\n".join(kept)

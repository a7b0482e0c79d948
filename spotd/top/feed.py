"""What the daemon says, asked for at a pace that never holds it up. Knows nothing of the screen.

One thread asks, one question at a time. It pauses ten times as long as the last answers took, two seconds at least,
and doubles its pause while the daemon is away. So a view costs the daemon a tenth of its time at most, however many
jobs there are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError
from spotd.words import silence_texts

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
            self._newest = self._asked(began)
        except ClientError as exc:
            return self.failed(exc.message, exc.hint)
        self._failures = 0
        return self._newest

    def failed(self, error: str, hint: str) -> Snapshot:
        """Return the answers of before, and why there are no newer ones."""
        self._failures += 1
        pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(self._failures - 1, 10))
        return replace(self._newest, error=error, hint=hint, retry_s=pause)

    def _asked(self, began: float) -> Snapshot:
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

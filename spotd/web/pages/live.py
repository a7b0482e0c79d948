"""Parts of a page that are drawn anew when an answer they show has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final

from nicegui import ui

from spotd.web.charts.base import Options
from spotd.web.markup import Node, el
from spotd.web.poller import KnownAnswer, SharedPoller
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views.parts import problem, waiting_for

TICK_S: Final = 1.0
_log = logging.getLogger("spotd.web")


class Page:
    """What is live on one page in one tab."""

    def __init__(self, poller: SharedPoller) -> None:
        self.poller = poller
        self.title = TreeElement()
        """Its heading; the frame puts its own in this place."""
        self._parts: list[_Part] = []
        ui.timer(TICK_S, self.tick)

    def part(
        self, topics: Callable[[], Sequence[WatchTopic]] | Sequence[WatchTopic], draw: Callable[..., None]
    ) -> None:
        """Call `draw` with the answers to the topics, now and whenever one has changed; `None` for one to come."""
        asked = topics if callable(topics) else lambda: topics
        self._parts.append(_Part(asked, draw))
        self._parts[-1].tick(self.poller)

    def section(self, topics: Sequence[WatchTopic], view: Callable[..., Node], *, name: str) -> None:
        """Add a part of the page that a view makes of values, once all of them are there.

        Args:
            view: gets the value of each topic, and the daemon's time as `now` if it takes that.
            name: what is waited for, in words.
        """
        tree = TreeElement(waiting_for(name))

        def draw(*answers: KnownAnswer | None) -> None:
            tree.show(*drawn(answers, view, name))

        self.part(topics, draw)

    def tick(self) -> None:
        """Draw what has changed."""
        for part in self._parts:
            part.tick(self.poller)

    def redraw(self) -> None:
        """Draw everything: what the user chose has changed."""
        for part in self._parts:
            part.last = None
        self.tick()


class _Part:
    """One part, with the answers that it shows."""

    def __init__(self, topics: Callable[[], Sequence[WatchTopic]], draw: Callable[..., None]) -> None:
        self.topics, self.draw = topics, draw
        self.last: list[KnownAnswer | None] | None = None

    def tick(self, poller: SharedPoller) -> None:
        answers = [poller.watch(topic) for topic in self.topics()]
        known = self.last
        if known is not None and len(known) == len(answers) and all(map(is_, known, answers)):
            return
        self.last = answers
        try:
            self.draw(*answers)
        except Exception:  # noqa: BLE001 - what one part cannot show is logged, and the other parts of the page go on
            _log.exception("a part of a page cannot be drawn")


def drawn(answers: Sequence[KnownAnswer | None], view: Callable[..., Node], name: str) -> list[Node]:
    """Return the view of the answers' values, after what was refused; or that an answer is waited for."""
    known = [one for one in answers if one is not None]
    refused = [problem(one.error, one.hint) for one in known if one.error]
    values = [one.value for one in known]
    if len(known) < len(answers) or any(value is None for value in values):
        return refused or [waiting_for(name)]
    now = max(one.now for one in known)
    wants_now = "now" in view.__code__.co_varnames[: view.__code__.co_argcount]
    return [*refused, view(*values, **({"now": now} if wants_now else {}))]


class Chart:
    """A picture with a title, what it shows in words, and what stands in its place where there is nothing to draw."""

    def __init__(self, title: str, *, height: str = "280px") -> None:
        with ui.element("figure").classes("chart"):
            self._caption = TreeElement(el("h2", title))
            self._chart = ui.echart({}, renderer="svg").style(f"height:{height}")
            self._chart.props["role"] = "img"
            self._words = TreeElement()
        self._title = title
        self.wait()

    def wait(self) -> None:
        """Say that the answer is not there yet, which is not the same as nothing to draw."""
        self._chart.set_visibility(False)
        self._words.show(waiting_for(self._title.lower()))

    def show(self, options: Options, words: str, *, empty: str, more: Sequence[Node] = (), title: str = "") -> None:
        """Draw the options, or say why nothing is drawn."""
        self._caption.show(el("h2", title or self._title))
        if options and self._chart.props["options"] != options:
            self._chart.props["options"] = options
            self._chart.props["aria-label"] = f"{self._title}. {words}"[:1000]
            self._chart.update()
        self._chart.set_visibility(bool(options))
        alternative = el("details", el("summary", "In words"), el("p", words, cls="muted"), *more)
        self._words.show(alternative if options else el("p", empty, cls="empty"))


def value(answer: KnownAnswer | None) -> Any:
    return None if answer is None else answer.value

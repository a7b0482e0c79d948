"""Parts of a page that are drawn anew when an answer they show has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from operator import is_
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element
from starlette.requests import Request

from spotd.web.charts import Options
from spotd.web.markup import Node, el, problem, waiting_for
from spotd.web.poller import Connection, KnownAnswer, SharedPoller, WatchTopic
from spotd.web.views.jobs import PAGE, page_of
from spotd.words import clean, count

# The element that draws a tree, keeping what has not changed: focus and selection stay where they are.


class TreeElement(Element, component="tree.js"):
    """A part of a page that is drawn from plain values."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__()
        self.props["tree"] = list(nodes)

    def on_pick(self, picked: Callable[[str, bool], None]) -> None:
        """Call `picked` with the `data-pick` of a checkbox, and whether it is ticked now."""

        def take(event: Any) -> None:
            what = event.args
            if isinstance(what, dict) and isinstance(what.get("id"), str):
                picked(what["id"], what.get("on") is True)

        self.on("pick", take)

    def show(self, *nodes: Node) -> None:
        """Draw this instead; nothing is sent where nothing differs."""
        if self.props["tree"] != list(nodes):
            self.props["tree"] = list(nodes)
            self.update()


TICK_S: Final = 1.0
ANY: Final = "any"
"""What a choice offers where it narrows nothing."""
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


# Fields, selections and lists of several pages, with labels.


_TEXT_MAX: Final = 200


def search(label: str, changed: Callable[[str], None]) -> ui.input:
    """Add a field that filters as it is typed in."""
    field = ui.input(label, on_change=lambda event: changed(str(event.value or "")[:_TEXT_MAX]))
    return field.props("outlined dense clearable debounce=250 type=search maxlength=200").classes("search")


def select(label: str, names: Sequence[str], value: str, changed: Callable[[str], None]) -> ui.select:
    """Add a choice of one."""
    field = ui.select(
        list(names),
        label=label,
        value=value if value in names else None,
        on_change=lambda event: changed(str(event.value or "")),
    )
    return field.props("outlined dense options-dense").classes("select")


class PagedList:
    """A long list, a page at a time: what was refused, the rows, and the buttons to the pages before and behind."""

    def __init__(
        self,
        page: Page,
        topic: WatchTopic | Callable[[], Sequence[WatchTopic]],
        noun: str,
        rows: Callable[[Any], Sequence[Any]],
        view: Callable[[Sequence[Any], datetime], Node],
        *,
        notices: Callable[[Any], Sequence[str]] = lambda _answer: (),
        picked: Callable[[str, bool], None] | None = None,
    ) -> None:
        self._page, self._noun = page, noun
        self._rows, self._view, self._notices = rows, view, notices
        self._number = 1
        self._tree = TreeElement(waiting_for(f"the {noun}s"))
        if picked is not None:
            self._tree.on_pick(picked)
        with ui.element("nav").classes("pager") as self._nav:
            self._nav.props["aria-label"] = "Pages of the list"
            self._before = ui.button("Back", on_click=lambda: self.turn_to(self._number - 1))
            self._where = TreeElement("")
            self._behind = ui.button("Next", on_click=lambda: self.turn_to(self._number + 1))
        for button in (self._before, self._behind):
            button.props("outline no-caps dense")
        page.part(topic if callable(topic) else [topic], self._draw)

    def redraw(self) -> None:
        self._page.redraw()

    def turn_to(self, number: int) -> None:
        """Show this page; the first where other rows are asked for."""
        self._number = number
        self._page.redraw()

    def _draw(self, answer: KnownAnswer | None) -> None:
        if answer is None:
            self._tree.show(waiting_for(f"the {self._noun}s"))
            self._nav.set_visibility(False)
            return
        found = self._rows(answer.value) if answer.value else ()
        self._number, pages = page_of(self._number, len(found))
        refused = [problem(answer.error, answer.hint)] if answer.error else []
        notices = [problem(text) for text in (self._notices(answer.value) if answer.value else ())]
        shown = found[(self._number - 1) * PAGE : self._number * PAGE]
        self._tree.show(*refused, *notices, self._view(shown, answer.now))
        total = count(len(found), self._noun)
        self._before.set_enabled(self._number > 1)
        self._behind.set_enabled(self._number < pages)
        self._nav.set_visibility(len(found) > 0)
        self._where.show(f"page {self._number} of {pages}, {total}" if pages > 1 else total)
        self._before.set_visibility(pages > 1)
        self._behind.set_visibility(pages > 1)


class SecretFields:
    """A field for the value of each secret that a job names; no value is kept once the fields are gone."""

    def __init__(self) -> None:
        self._box = ui.element("div").classes("secrets")
        self._fields: dict[str, ui.input] = {}

    def ask_for(self, names: Sequence[str]) -> None:
        """Show an empty field for each of these names instead."""
        self._box.clear()
        with self._box:
            self._fields = {name: ui.input(f"Secret {name}", password=True) for name in names}
        for field in self._fields.values():
            field.props("outlined dense autocomplete=off")

    def missing(self) -> list[str]:
        """Return the names without a value."""
        return [name for name, field in self._fields.items() if not field.value]

    def values(self) -> dict[str, str]:
        return {name: str(field.value) for name, field in self._fields.items()}


# The frame of every page: navigation, whether the daemon answers, theme, and where the keyboard goes first.


NAVIGATION: Final = (
    ("Overview", "/"),
    ("Jobs", "/jobs"),
    ("Market", "/market"),
    ("Providers", "/providers"),
    ("Events", "/events"),
    ("Submit", "/submit"),
)
THEMES: Final[dict[str, bool | None]] = {"auto": None, "dark": True, "light": False}
_THEME: Final = "spotd_theme"
STATUS: Final = WatchTopic("status")


@contextmanager
def shell(poller: SharedPoller, request: Request, title: str, here: str, *, has_login: bool) -> Iterator[Page]:
    """Draw the frame; the block draws the content."""
    theme = request.cookies.get(_THEME, "auto")
    dark = ui.dark_mode(THEMES.get(theme))
    ui.page_title(f"{title} - spotd")
    page = Page(poller)
    with ui.element("header").classes("top"):
        links = [el("a", name, href=href, aria_current="page" if href == here else None) for name, href in NAVIGATION]
        TreeElement(el("a", "spotd", href="/", cls="brand")).classes("brand-tree")
        with ui.element("nav") as nav:
            nav.props["aria-label"] = "Pages"
            TreeElement(*links)
        live = TreeElement().classes("link-state")
        live.props["aria-live"] = "polite"
        _theme_button(dark, theme)
        if has_login:
            ui.button("Log out", on_click=lambda: ui.run_javascript(_LOGOUT)).props("flat no-caps dense")
    banner = TreeElement().classes("banner")
    with ui.element("div").classes("content") as content:
        ui.skip_link("Skip to the content", target=content)
        page.title = TreeElement(el("h1", title)).classes("title")

        def draw(status: KnownAnswer | None) -> None:
            state = poller.state()
            live.show(*_link_state(state, status))
            banner.show(*_banner(state, status))

        # The connection is no answer, so this part is drawn at every tick; a tree that is the same is not sent.
        ui.timer(1.0, lambda: draw(poller.watch(STATUS)))
        draw(poller.watch(STATUS))
        yield page


_LOGOUT: Final = "fetch('/logout', {method: 'POST'}).then(() => location.reload())"


def _theme_button(dark: ui.dark_mode, theme: str) -> None:
    """Add the button that goes from one theme to the next; the browser remembers it."""
    names = list(THEMES)
    button = ui.button(f"Theme: {theme if theme in THEMES else 'auto'}").props("flat no-caps dense").classes("theme")

    def change() -> None:
        now = next((name for name, setting in THEMES.items() if setting is dark.value), "auto")
        chosen = names[(names.index(now) + 1) % len(names)]
        dark.value = THEMES[chosen]
        button.text = f"Theme: {chosen}"
        ui.run_javascript(f"document.cookie = '{_THEME}={chosen}; path=/; max-age=31536000; SameSite=Strict'")

    button.on_click(change)


def _link_state(state: Connection, status: KnownAnswer | None) -> list[Node]:
    known = (value(status) or {}).get("status")
    if not state.is_up:
        return [el("span", el("span", "✕", aria_hidden="true", cls="sign"), "no daemon", cls="state bad")]
    if known is None:
        return [el("span", "connecting", cls="state idle")]
    scale = f", {known['clock_scale']:g} x time" if known["clock_scale"] > 1 else ""
    words = f"{clean(known['install'])}{scale}"
    return [
        el("span", el("span", "●", aria_hidden="true", cls="sign"), words, cls="state good", title="the daemon answers")
    ]


def _banner(state: Connection, status: KnownAnswer | None) -> list[Node]:
    if not state.is_up:
        seen = "Nothing is known yet."
        if state.seen_at is not None:
            local = state.seen_at.astimezone()
            seen = f"Showing what was last known at {local:%H:%M} ({local:%Y-%m-%d})."
        start: list[Node] = [el("code", "systemctl --user start spotd"), " where it is a service, else "]
        return [
            el(
                "div",
                el("p", el("strong", "No answer: "), f"{clean(state.reason)}. ", el("strong", seen)),
                el("p", "Start it with ", *start, el("code", "spotd run"), ". This page goes on by itself."),
                cls="down",
                role="alert",
            )
        ]
    if status is not None and status.error:
        return [problem(status.error, status.hint)]
    paused = (value(status) or {}).get("status", {}).get("paused", "")
    return [el("p", f"Nothing is launched now: {clean(paused)}", cls="problem", role="status")] if paused else []

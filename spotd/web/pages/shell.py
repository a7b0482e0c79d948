"""The frame of every page: navigation, whether the daemon answers, theme, and where the keyboard goes first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from nicegui import ui
from starlette.requests import Request

from spotd.web.markup import Node, el
from spotd.web.pages.live import Page, value
from spotd.web.poller import Connection, KnownAnswer, SharedPoller
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views.parts import problem
from spotd.words import clean

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

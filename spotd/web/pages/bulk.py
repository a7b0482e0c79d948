"""Several jobs at once: those that are selected, what can be done with them, and what came of it for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nicegui import ui

from spotd.client.errors import ClientError
from spotd.web.bulk import AT_ONCE, JOBS_MAX, ORDERS, Order, OrderOutcome, names_of, perform, report
from spotd.web.markup import Node, el, job_href
from spotd.web.pages.live import Page
from spotd.web.tree import TreeElement
from spotd.web.views.parts import problem
from spotd.words import clean, count

_CHANGED = ("status", "jobs", "array", "cost", "events")


class Selected:
    """The jobs and arrays that are selected, with their names, and the bar of what can be done with them."""

    def __init__(self, page: Page, redraw: Callable[[], None]) -> None:
        self._page, self._redraw = page, redraw
        self.names: dict[str, str] = {}
        """By id, in the order in which they were selected."""
        with ui.element("div").classes("actions picked") as self._bar:
            self._bar.props["role"] = "group"
            self._bar.props["aria-label"] = "What to do with the selected jobs"
            self._words = TreeElement()
            self._words.props["aria-live"] = "polite"
            for name, order in ORDERS.items():
                button = ui.button(order.verb, on_click=lambda name=name: self._ask(ORDERS[name]))
                button.props("outline no-caps dense")
            ui.button("Select none", on_click=self.clear).props("flat no-caps dense")
        self._show()

    def select(self, ref: str, name: str, *, is_selected: bool) -> None:
        if not is_selected:
            self.names.pop(ref, None)
        elif len(self.names) < JOBS_MAX:
            self.names[ref] = name
        self._show()
        self._redraw()

    def clear(self) -> None:
        self.names.clear()
        self._show()
        self._redraw()

    def _show(self) -> None:
        self._bar.set_visibility(bool(self.names))
        most = ", the most at once" if len(self.names) == JOBS_MAX else ""
        self._words.show(el("strong", f"{len(self.names)} selected{most}"))

    def _ask(self, order: Order) -> None:
        """Ask, order it job by job, and list what the daemon answered."""
        names = dict(self.names)
        title = f"{order.verb}: {count(len(names), 'job')}"
        with ui.dialog() as dialog, ui.card().classes("dialog"):
            dialog.props["aria-label"] = title
            TreeElement(el("h2", title), el("p", names_of([*names.values()])), el("p", order.question))
            text = ui.input(order.field).props("outlined dense autofocus maxlength=40") if order.field else None
            answer = TreeElement().classes("refused")
            answer.props["aria-live"] = "assertive"

            async def perform_all() -> None:
                if not do.enabled:
                    return
                given = str(text.value or "").strip() if text is not None else ""
                if text is not None and not given:
                    answer.show(problem("nothing is written in the field"))
                    return
                do.disable()
                found: list[OrderOutcome] = []
                ids = [*names]
                try:
                    for start in range(0, len(ids), AT_ONCE):
                        asking = partial(perform, order=order, jobs=ids[start : start + AT_ONCE], text=given)
                        found += await self._page.poller.act(asking)
                        answer.show(el("p", f"{len(found)} of {len(ids)} …"))
                except ClientError as exc:
                    answer.show(problem(f"after {len(found)} of {len(ids)}: {exc.message}", exc.hint))
                else:
                    answer.show(*_outcomes(order, found, names))
                for one in found:
                    if not one.refusal:
                        self.names.pop(one.job, None)
                leave.text = "Close"
                self._show()
                self._redraw()
                self._page.poller.refresh(*_CHANGED)

            with ui.element("div").classes("actions"):
                do = ui.button(order.verb, on_click=perform_all).props("unelevated no-caps")
                leave = ui.button("Leave it", on_click=dialog.close).props("flat no-caps")
            if text is not None:
                text.on("keydown.enter", perform_all)
        dialog.on("hide", dialog.delete)
        dialog.open()


def _outcomes(order: Order, found: list[OrderOutcome], names: dict[str, Any]) -> list[Node]:
    """Return the report, and a line with the reason for each job that was refused."""
    rows = [
        el(
            "li",
            el("a", clean(names[one.job]), href=job_href(one.job)),
            f": {clean(one.refusal)}",
            f" (Try: {clean(one.hint)})" if one.hint else None,
        )
        for one in found
        if one.refusal
    ]
    return [el("p", report(order, found), cls="sentence"), el("ul", *rows, cls="refusals") if rows else ""]

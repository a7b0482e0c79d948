"""Several jobs at once: those that are selected, what can be done with them, and what came of it for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nicegui import ui

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonUnreachable
from spotd.web.markup import Node, el, job_href, problem
from spotd.web.pages.live import Page, TreeElement
from spotd.words import clean, count

# One order for several jobs: each is asked of the daemon by itself, and each has its own answer.


JOBS_MAX: Final = 500
"""Of one order."""
AT_ONCE: Final = 20
"""Asked in one go; between two of these others may order something."""
NAMES_SHOWN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What can be done with several jobs.

    Attributes:
        verb: for the button and the question: `Cancel`.
        past: for the report: `cancelled`.
        field: what has to be written besides; empty for nothing.
        call: does it for one job or array, by id.
    """

    verb: str
    past: str
    question: str
    call: Callable[[Daemon, str, str], Mapping[str, Any]]
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOutcome:
    """What came of the order for one job; `refusal` is empty where it was done."""

    job: str
    refusal: str = ""
    hint: str = ""


def _retry(daemon: Daemon, ref: str, _text: str) -> Mapping[str, Any]:
    """Queue a job, or all of an array, again.

    Raises:
        ClientError
    """
    answer: Mapping[str, Any] = daemon.retry(ref)
    while (array := answer.get("array")) is not None and array["next_index"] is not None:
        answer = daemon.retry(ref, start=array["next_index"])
    return answer


ORDERS: Final[Mapping[str, Order]] = {
    "cancel": Order(
        verb="Cancel",
        past="cancelled",
        question="Their machines are destroyed; checkpoints are kept for a retry.",
        call=lambda daemon, ref, _text: daemon.cancel(ref),
    ),
    "retry": Order(verb="Retry", past="queued again", question="Each goes on from its newest checkpoint.", call=_retry),
    "ceiling": Order(
        verb="Change ceiling",
        past="changed",
        question="Write 2.40 per GPU-hour, 19.20/h for the machine, or config for the ceiling of the configuration.",
        call=lambda daemon, ref, text: daemon.set_ceiling(ref, text),
        field="New ceiling",
    ),
}


def perform(daemon: Daemon, order: Order, jobs: Sequence[str], text: str) -> list[OrderOutcome]:
    """Return what came of it for each job, in their order.

    Raises:
        DaemonUnreachable: it went away; those before were done.
    """
    found = []
    for job in jobs:
        try:
            order.call(daemon, job, text)
        except DaemonUnreachable:
            raise
        except ClientError as exc:
            found.append(OrderOutcome(job=job, refusal=exc.message, hint=exc.hint))
        else:
            found.append(OrderOutcome(job=job))
    return found


def report(order: Order, outcomes: Sequence[OrderOutcome]) -> str:
    """Return how many were done and refused, in a sentence."""
    refused = sum(bool(one.refusal) for one in outcomes)
    done = f"{count(len(outcomes) - refused, 'job')} {order.past}"
    return f"{done}; {refused} refused" if refused else done


def names_of(names: Sequence[str]) -> str:
    """Return the first of the names, and how many there are besides."""
    shown = ", ".join(clean(name) for name in names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {count(len(names) - NAMES_SHOWN, 'other')}"


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

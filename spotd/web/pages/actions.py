"""What a user orders: each is confirmed, done by the daemon, and answered with its own sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from nicegui import ui

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError
from spotd.web.markup import el
from spotd.web.pages.live import Page, value
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views.parts import problem
from spotd.words import FINAL_STATES, clean, dollars, price

_CHANGED: Final = ("status", "jobs", "job", "why", "cost", "receipt", "events")


def buttons(page: Page, ref: str) -> None:
    """Add what can be done with a job; what cannot be done now is disabled."""
    shown: dict[str, Any] = {}

    def detail() -> dict[str, Any]:
        found: dict[str, Any] = shown["detail"]
        return found

    with ui.element("div").classes("actions"):
        cancel = ui.button("Cancel", on_click=lambda: _cancel(page, detail()))
        retry = ui.button("Retry", on_click=lambda: _retry(page, detail()))
        ceiling = ui.button("Change ceiling", on_click=lambda: _ceiling(page, detail()))
        budget = ui.button("Change budget", on_click=lambda: _budget(page, detail()))
    for button in (cancel, retry, ceiling, budget):
        button.props("outline no-caps dense").disable()

    def draw(answer: KnownAnswer | None) -> None:
        found = value(answer)
        if not found:
            return
        shown["detail"] = found
        is_final = found["job"]["state"] in FINAL_STATES
        cancel.set_enabled(not is_final and found["job"]["state"] != "CANCELLING")
        retry.set_enabled(is_final)
        ceiling.set_enabled(not is_final)
        budget.enable()

    page.part([WatchTopic("job", (ref,))], draw)


def _cancel(page: Page, detail: dict[str, Any]) -> None:
    job = detail["job"]
    at = f" Its machine at {clean(str(job['provider']))} is destroyed." if job["provider"] else ""
    sentence = (
        f"Cancel {clean(job['name'])}?{at} {dollars(job['spent_usd'])} is spent; checkpoints are kept for a retry."
    )
    _confirm(page, "Cancel the job", sentence, "Cancel the job", lambda daemon, _text: daemon.cancel(job["id"]))


def _retry(page: Page, detail: dict[str, Any]) -> None:
    job = detail["job"]
    succeeded = job["state"] == "SUCCEEDED"
    sentence = f"Queue {clean(job['name'])} again? It goes on from its newest checkpoint."
    if succeeded:
        sentence += " It has succeeded: this runs it once more all the same."
    _confirm(page, "Retry the job", sentence, "Retry", lambda daemon, _text: daemon.retry(job["id"], anyway=succeeded))


def _ceiling(page: Page, detail: dict[str, Any]) -> None:
    job, limit = detail["job"], detail["ceiling_usd_gpu_h"]
    before = "" if limit is None else f" It is ${price(limit)} per GPU-hour now."
    sentence = (
        f"The highest effective price for {clean(job['name'])}.{before} Write 2.40 per GPU-hour, 19.20/h for the "
        "machine, or config for the ceiling of the configuration."
    )
    _confirm(
        page,
        "Change the ceiling",
        sentence,
        "Change",
        lambda daemon, text: daemon.set_ceiling(job["id"], text),
        field="New ceiling",
    )


def _budget(page: Page, detail: dict[str, Any]) -> None:
    job, limit = detail["job"], detail["budget_usd"]
    before = "It has no budget now." if limit is None else f"It is {dollars(limit)} now."
    sentence = (
        f"What {clean(job['name'])} may cost in all; {dollars(job['spent_usd'])} is spent. {before} "
        "Write +20 to add dollars, or 140 to set them."
    )
    _confirm(
        page,
        "Change the budget",
        sentence,
        "Change",
        lambda daemon, text: daemon.set_budget(job["id"], text),
        field="New budget",
    )


def _confirm(
    page: Page, title: str, sentence: str, order: str, call: Callable[[Daemon, str], Any], *, field: str = ""
) -> None:
    """Ask, order it, and show what the daemon answers; the dialog stays open where it refuses."""
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        dialog.props["aria-label"] = title
        TreeElement(el("h2", title), el("p", sentence))
        text = ui.input(field).props("outlined dense autofocus maxlength=40") if field else None
        refused = TreeElement().classes("refused")
        refused.props["aria-live"] = "assertive"

        async def perform() -> None:
            if not do.enabled:
                return  # it is on its way: a second Enter would add the dollars twice
            given = str(text.value or "").strip() if text is not None else ""
            if text is not None and not given:
                refused.show(problem("nothing is written in the field"))
                return
            do.disable()
            try:
                await page.poller.act(lambda daemon: call(daemon, given))
            except ClientError as exc:
                refused.show(problem(exc.message, exc.hint))
                do.enable()
                return
            dialog.close()
            page.poller.refresh(*_CHANGED)
            ui.notify(f"{title}: done", type="positive", position="top")

        with ui.element("div").classes("actions"):
            do = ui.button(order, on_click=perform).props("unelevated no-caps")
            ui.button("Leave it", on_click=dialog.close).props("flat no-caps")
        if text is not None:
            text.on("keydown.enter", perform)
    dialog.on("hide", dialog.delete)
    dialog.open()

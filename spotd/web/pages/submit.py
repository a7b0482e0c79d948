"""A job file that is pasted or uploaded, its plan, and the submit."""

from __future__ import annotations

from typing import Any, Final

from nicegui import events, ui

from spotd.client.errors import ClientError
from spotd.web.draft import DraftRefused, draft_of
from spotd.web.markup import Node, el, job_href
from spotd.web.pages.live import Page
from spotd.web.tree import TreeElement
from spotd.web.views import plan as view

BYTES_MAX: Final = 200_000
EXAMPLE: Final = """name = "train"
run = "python train.py"
image = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"

[resources]
gpu = ["H100:1"]
disk = "50GB"

[price]
max_price = 2.40
"""


def build(page: Page) -> None:
    TreeElement(
        el(
            "p",
            "A job file in TOML. Code of a folder and values of secrets stay on your computer: a job with workdir or "
            "secrets is queued with spotctl submit.",
            cls="muted",
        )
    )
    field = ui.textarea("Job file", value=EXAMPLE).props(f"outlined autogrow maxlength={BYTES_MAX} spellcheck=false")
    field.classes("job-file")
    with ui.element("div").classes("actions"):
        plan = ui.button("Show the plan").props("outline no-caps")
        submit = ui.button("Queue the job").props("unelevated no-caps")
        upload = ui.upload(auto_upload=True, max_file_size=BYTES_MAX)
        upload.props('accept=".toml,text/plain" aria-hidden=true').classes("upload")
        ui.button("Open a file", on_click=lambda: upload.run_method("pickFiles")).props("flat no-caps")
    submit.disable()
    answer = TreeElement()
    answer.props["aria-live"] = "polite"
    planned: dict[str, Any] = {}

    async def take(event: events.UploadEventArguments) -> None:
        field.value = (await event.file.read()).decode("utf-8", "replace")
        upload.reset()

    async def show_plan() -> None:
        submit.disable()
        planned.clear()
        answer.show(el("p", "Asking the daemon …", cls="empty"))
        try:
            draft = draft_of(str(field.value or ""))
            found = (await page.poller.act(lambda daemon: daemon.plan(draft)))["plan"]
        except DraftRefused as exc:
            answer.show(view.refusals(exc.message, exc.rows))
        except ClientError as exc:
            answer.show(_refused(exc))
        else:
            answer.show(view.plan(found))
            planned["draft"] = draft
            submit.set_enabled(not found["unprotected"])

    async def queue() -> None:
        draft = planned.pop("draft", None)  # a second click would queue it twice
        if draft is None:
            return
        submit.disable()
        try:
            made = await page.poller.act(lambda daemon: daemon.submit(draft, code_sha256=None, secrets={}))
        except ClientError as exc:
            answer.show(_refused(exc))
            return
        page.poller.refresh("jobs", "status", "events")
        ui.navigate.to(job_href(made["job"]["id"]))

    def changed() -> None:
        """Forget the plan: what is queued is what was planned."""
        planned.clear()
        submit.disable()

    upload.on_upload(take)
    plan.on_click(show_plan)
    submit.on_click(queue)
    field.on_value_change(changed)


def _refused(exc: ClientError) -> Node:
    return view.refusals(exc.message, exc.rows, "" if exc.rows else exc.hint)

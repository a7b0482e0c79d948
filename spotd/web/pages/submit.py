"""The submit: a job file that is pasted or opened, the archive of its folder, its plan, and the order to queue it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from nicegui import events, ui

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.web.folder import CODE_BYTES_MAX, check_code, send_code
from spotd.web.markup import Node, el, job_href, problem
from spotd.web.pages.live import Page, SecretFields, TreeElement
from spotd.web.views import market as plan_view
from spotd.words import clean, size_text
from spotd_jobs.pack import PackError
from spotd_jobs.spec.parse import json_ready, parse_toml
from spotd_jobs.spec.problems import SpecError

T = TypeVar("T")

# A job file as text, made ready for the API, which judges it.


class DraftRefused(Exception):
    """A text that is no job file; `rows` are what is wrong and the way out."""

    def __init__(self, message: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.message = message
        self.rows = tuple(rows)


def draft_of(text: str) -> dict[str, Any]:
    """Return the draft of a job.

    Raises:
        DraftRefused
    """
    try:
        data, _ = parse_toml(text.encode("utf-8", "replace"), source="the job file", refusal=SpecError)
    except SpecError as exc:
        rows = [(problem.sentence(exc.source), problem.hint) for problem in exc.problems]
        raise DraftRefused("the job file cannot be used", rows) from exc
    return {"data": json_ready(data), "flags": {}, "source": "", "base_dir": ""}


def without_folder(draft: dict[str, Any], *, has_archive: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what of a draft the API can judge without its folder, and what is wrong with that, with the way out."""
    data = dict(draft["data"])
    if not data.pop("workdir", None):
        if not has_archive:
            return draft, []
        return draft, [("workdir: is not in the job file, so the archive has no use", 'add workdir = "."')]
    judged = {**draft, "data": data}
    if has_archive:
        return judged, []
    way = "choose that folder as a .tar.gz or .zip with Choose an archive, or queue the job with spotctl submit"
    return judged, [("workdir: is a folder of your computer, and its archive is not chosen", way)]


# A job file that is pasted or uploaded, its plan, and the submit.


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


def submit_page(page: Page) -> None:
    TreeElement(
        el(
            "p",
            "A job file in TOML. The plan asks for the value of each secret that it names. For a job with workdir, "
            "choose that folder as a .tar.gz or .zip, up to 500 MB.",
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
        folder = ui.upload(auto_upload=True, max_file_size=CODE_BYTES_MAX)
        folder.props('accept=".gz,.tgz,.zip" aria-hidden=true').classes("upload")
        ui.button("Choose an archive", on_click=lambda: folder.run_method("pickFiles")).props("flat no-caps")
    code = TreeElement()
    code.props["aria-live"] = "polite"
    submit.disable()
    answer = TreeElement()
    answer.props["aria-live"] = "polite"
    secrets = SecretFields()
    refused = TreeElement()
    refused.props["aria-live"] = "polite"
    planned: dict[str, Any] = {}
    chosen: dict[str, Any] = {}

    async def take(event: events.UploadEventArguments) -> None:
        field.value = (await event.file.read()).decode("utf-8", "replace")
        upload.reset()

    def take_folder(event: events.UploadEventArguments) -> None:
        changed()
        chosen["archive"] = event.file
        code.show(el("p", f"Archive: {clean(event.file.name)}, {size_text(event.file.size())}"))
        folder.reset()

    def refuse_folder() -> None:
        text = f"that file is not taken: an archive is a .tar.gz or .zip of at most {size_text(CODE_BYTES_MAX)}"
        refused.show(problem(text, "put what the job reads into a dataset: spotctl data put NAME DIR"))
        folder.reset()

    async def archive_problems() -> list[tuple[str, str]]:
        if "archive" not in chosen:
            return []
        try:
            await with_archive(page, chosen["archive"], lambda _daemon, path, name: check_code(path, name))
        except PackError as exc:
            return [(str(exc), exc.hint)]
        return []

    async def show_plan() -> None:
        changed()
        answer.show(el("p", "Asking the daemon …", cls="empty"))
        unsent: list[tuple[str, str]] = []
        try:
            whole = draft_of(str(field.value or ""))
            unsent += await archive_problems()
            draft, missing = without_folder(whole, has_archive="archive" in chosen)
            unsent += missing
            found = (await page.poller.act(lambda daemon: daemon.plan(draft)))["plan"]
        except DraftRefused as exc:
            answer.show(plan_view.refusals(exc.message, [*exc.rows, *await archive_problems()]))
        except ClientError as exc:
            answer.show(_refusal(exc, unsent))
        else:
            if unsent:
                answer.show(plan_view.refusals("this job cannot be queued so", unsent))
                return
            answer.show(plan_view.plan(found))
            secrets.ask_for(draft["data"].get("secrets", ()))
            # The folder of the user's computer is known by its archive only.
            planned["draft"] = {**draft, "data": {**draft["data"], **_workdir(chosen)}}
            submit.set_enabled(not found["unprotected"])

    async def queue() -> None:
        if missing := secrets.missing():
            refused.show(plan_view.refusals("a secret has no value", [(name, "write it above") for name in missing]))
            return
        draft = planned.pop("draft", None)  # a second click would queue it twice
        if draft is None:
            return
        submit.disable()
        values = secrets.values()
        try:
            sha256 = await with_archive(page, chosen["archive"], send_code) if "archive" in chosen else None
            made = await page.poller.act(lambda daemon: daemon.submit(draft, code_sha256=sha256, secrets=values))
        except PackError as exc:
            refused.show(problem(str(exc), exc.hint))
            return
        except ClientError as exc:
            refused.show(_refusal(exc))
            return
        finally:
            secrets.ask_for(())
        chosen.clear()
        page.poller.refresh("jobs", "status", "events")
        ui.navigate.to(job_href(made["job"]["id"]))

    def changed() -> None:
        """Forget the plan: what is queued is what was planned."""
        planned.clear()
        secrets.ask_for(())
        refused.show()
        submit.disable()

    upload.on_upload(take)
    folder.on_upload(take_folder)
    folder.on_rejected(refuse_folder)
    plan.on_click(show_plan)
    submit.on_click(queue)
    field.on_value_change(changed)


def _refusal(exc: ClientError, others: Sequence[tuple[str, str]] = ()) -> Node:
    return plan_view.refusals(exc.message, [*exc.rows, *others], "" if exc.rows else exc.hint)


def _workdir(chosen: dict[str, Any]) -> dict[str, str]:
    return {"workdir": f"/{chosen['archive'].name}"} if "archive" in chosen else {}


async def with_archive(page: Page, file: Any, work: Callable[[Daemon, Path, str], T]) -> T:
    """Return what the work in a thread makes of an uploaded file, given as a private temporary one that is removed.

    Raises:
        ClientError: as the work does.
        PackError: as the work does.
    """
    with TemporaryDirectory(prefix="spotd-web-") as folder:
        path = Path(folder) / "archive"
        await file.save(path)
        return await page.poller.act(lambda daemon: work(daemon, path, file.name))

"""A job file as text, made ready for the API, which judges it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spotd_jobs.spec.files import json_ready, parse_toml
from spotd_jobs.spec.problems import SpecError


class DraftRefused(Exception):
    """A text that is no job file, or one that a browser cannot send; `rows` are what is wrong and the way out."""

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
    file = "save this as train.toml, then: spotctl submit train.toml"
    rows = [(f"{key}: needs what is on your computer", file) for key in ("workdir", "secrets") if data.get(key)]
    if rows:
        raise DraftRefused("this job cannot be queued from a browser", rows)
    return {"data": json_ready(data), "flags": {}, "source": "", "base_dir": ""}

"""Files kept in the store, as JSON."""

from __future__ import annotations

from typing import Literal, TypedDict

from spotd.api.schemas.envelope import Answer


class FileResponse(TypedDict):
    """One path of a checkpoint or of the outputs. `mode` holds the permission bits.

    In `path` and `target` what is not printable text is `%` and two hex digits for each byte.

    A `dir` is listed only where it is empty. `target` is a `link`'s, relative and inside the folder, else null.
    """

    path: str
    kind: Literal["file", "dir", "link"]
    bytes: int
    mode: int
    target: str | None


class FilesResponse(Answer):
    """What `pull` can fetch: `kind` is `outputs` or `checkpoint`, `name` the checkpoint's, `attempt` who wrote it.

    `manifest_sha256` is of this very list.
    `warning` names what of the outputs is missing; it is empty where nothing is.
    """

    id: str
    kind: Literal["outputs", "checkpoint"]
    name: str
    attempt: int
    manifest_sha256: str
    files: list[FileResponse]
    bytes: int
    warning: str

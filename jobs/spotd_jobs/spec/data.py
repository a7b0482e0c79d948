"""The `[[data]]` tables of a job file: what may be a source, and where its files may lie."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from spotd_jobs.spec.fields import Table, choice, shown, text
from spotd_jobs.spec.model import DataMode, DataSource, JobSpec
from spotd_jobs.spec.problems import BadValue

DATASET_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
DATA_SCHEME: Final = "data:"
URL_SCHEME: Final = "https://"
DATA_MAX: Final = 8
DATA_EXAMPLE: Final = '[[data]] with source = "NAME" and path = "data" below it'
_SECRET_WORD: Final = re.compile(r"sig|token|key|secret|passw|credential|auth")
_BUCKET_SOURCE: Final = re.compile(r"s3://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[^/].*)?")
_HUB_SOURCE: Final = re.compile(
    r"hf://(datasets/|models/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}(@[A-Za-z0-9._/-]{1,200})?"
)
_STREAMS: Final = frozenset({"stream", "mount", "range", "lazy", "mount-less stream"})
DATA_KEYS: Final = frozenset({"source", "path", "sha256", "mode"})


def read_data(table: Table, key: str) -> tuple[DataSource, ...]:
    found: list[DataSource] = []
    for part in table.tables(key, count_max=DATA_MAX, example=DATA_EXAMPLE):
        part.refuse_unknown(DATA_KEYS, elsewhere={})
        part.required("source", DATA_EXAMPLE)
        part.required("path", 'write path = "data", below the folder in which the job runs')
        one = DataSource(
            source=part.take("source", _data_source, ""),
            path=part.take("path", _data_path, ""),
            sha256=part.take("sha256", _sha256, None),
            mode=part.take("mode", _mode, DataMode.COPY),
        )
        if one.is_url and one.sha256 is None and "sha256" not in part:
            part.report("sha256", "is missing: what a URL serves may change", "write what `sha256sum FILE` prints")
        over = next((other.path for other in found if one.path and _overlap(one.path, other.path)), None)
        if over is not None:
            part.report("path", f"{shown(one.path)} and {shown(over)} overlap", "give each dataset a folder of its own")
        found.append(one)
    return tuple(found)


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _data_source(value: object) -> str:
    source = text(length_max=1024, example=DATA_EXAMPLE)(value)
    name = source.removeprefix(DATA_SCHEME)
    if re.fullmatch(DATASET_NAME, name):
        return name
    if source.startswith(URL_SCHEME):
        return _data_url(source)
    if source.startswith(("s3://", "hf://")):
        return _elsewhere(source)
    if "://" in source:
        raise BadValue(
            f"{shown(_scheme_of(source))} is not supported as a source",
            hint='fetch it once and store it: spotctl data put NAME DIR, then source = "NAME"',
        )
    if source.startswith(("/", "./", "../", "~/")) or source in {".", "..", "~"} or source.endswith("/"):
        return source
    raise BadValue(
        f"{shown(source)} is not the name of a dataset",
        hint='a folder begins with ./, ../, ~/ or /, as in source = "./set"; spotctl data ls shows the names',
    )


def _elsewhere(source: str) -> str:
    """Return the source if it names a place in a bucket, or a repository of a hub."""
    plain = source.isascii() and source.isprintable() and "?" not in source and "#" not in source
    names = source.partition("@")[0].split("/")[2:]
    if source.startswith("s3://"):
        parts = source.removeprefix("s3://").rstrip("/").split("/")
        if plain and _BUCKET_SOURCE.fullmatch(source) and not {"", ".", ".."} & set(parts):
            return source
        raise BadValue("names no place in a bucket", hint='write source = "s3://BUCKET/PREFIX", without keys in it')
    if plain and _HUB_SOURCE.fullmatch(source) and not any(".." in name for name in names):
        return source
    hint = 'write source = "hf://OWNER/NAME@REVISION", or "hf://datasets/OWNER/NAME" for a dataset'
    raise BadValue("names no repository of a hub", hint=hint)


def _mode(value: object) -> DataMode:
    if isinstance(value, str) and value in _STREAMS:
        raise BadValue(
            f"{shown(value)} is not supported: a machine has all of the data on its disk before the command begins",
            hint='write mode = "copy", or let the command read with a library and a credential of its own',
        )
    return choice(DataMode)(value)


def _data_url(source: str) -> str:
    """Return the URL if every host may see all of it. No message holds it: it may hold a password."""
    store = "fetch it once and store it: spotctl data put NAME DIR"
    try:
        parts = urlsplit(source)
        usable = parts.hostname and parts.port != 0 and source.isascii() and source.isprintable()
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable or " " in source or "\\" in source:
        raise BadValue("is no URL", hint='write source = "https://HOST/FILE"')
    if parts.username is not None or parts.password is not None:
        raise BadValue("a URL that holds a password would show it to every host", hint=store)
    names = {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    secret = next((name for name in sorted(names) if _SECRET_WORD.search(name)), None)
    if secret is not None:
        raise BadValue(f"its parameter {shown(secret[:40])} would be shown to every host", hint=store)
    if parts.fragment or parts.path in {"", "/"}:
        raise BadValue("names no file of its server", hint='write source = "https://HOST/FILE", without a "#"')
    return source


def _scheme_of(source: str) -> str:
    # The rest may hold a password.
    return source.partition("://")[0][:20] + "://"


def _data_path(value: object) -> str:
    example = 'path = "data", below the folder in which the job runs'
    path = text(length_max=1024, example=example)(value).rstrip("/")
    if path.startswith("/") or not path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise BadValue(f"{shown(value)} does not lie below the folder in which the job runs", hint=f"write {example}")
    if not path.isprintable():
        raise BadValue(f"{shown(value)} holds characters that cannot be seen", hint=f"write {example}")
    return path


def _sha256(value: object) -> str:
    rule = "is not a SHA-256 in lower-case hex"
    example = "the sha256 that spotctl data ls -o json shows, or leave it out"
    return text(length_max=64, example=example, pattern=r"[0-9a-f]{64}", rule=rule)(value)


def shown_data(spec: JobSpec) -> list[dict[str, str]]:
    return [
        {"source": one.source, "path": one.path, "mode": one.mode.value}
        | ({"sha256": one.sha256} if one.sha256 else {})
        | ({"revision": one.revision} if one.revision else {})
        for one in spec.data
    ]

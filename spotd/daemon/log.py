"""The daemon's log: event name plus fields, readable on a terminal, JSON elsewhere, never a secret.

Redaction is the last line of defence, not the first: values that were registered as secret and fields whose name says
secret are blotted out whatever put them there, in nested values and in tracebacks too.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, TextIO

# structlog draws tracebacks with rich where it finds it; the daemon prints plain ones and saves the 6 MB.
_absent = "rich" not in sys.modules
if _absent:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python marks a module that cannot be imported
import structlog  # noqa: E402 - after the line above, which is the point

if _absent:
    del sys.modules["rich"]

HIDDEN: Final = "[hidden]"
SECRET_LENGTH_MIN: Final = 4
"""Shorter values occur in ordinary words; blotting them out would make the log unreadable and hide nothing."""
_SECRET_NAME: Final = re.compile(
    r"(?:^|[_\-.])(?:api_?key|secrets?|token|password|passwd|authorization|credentials?|cookie|signature)$",
    re.IGNORECASE,
)
_URL: Final = re.compile(r"(https?://[^\s?#\"'<>]+)(\?[^\s\"'<>]+)?")
"""Whole, with or without a query: a URL that only matched with one would be searched again from each of its parts."""
TAMED: Final = ("httpx", "httpcore", "botocore", "boto3", "urllib3", "asyncio", "uvicorn.access", "alembic")


class Redactor:
    """Knows every secret value of this process and keeps it out of the log."""

    def __init__(self) -> None:
        self._secrets: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._lock = threading.Lock()

    def register(self, values: Iterable[str | None]) -> None:
        """Keep these values out of the log from now on."""
        with self._lock:
            fresh = {value for value in values if value and len(value) >= SECRET_LENGTH_MIN}
            self._secrets = self._secrets | fresh
            # Longest first, so that a secret that contains another is hidden whole.
            ordered = sorted(self._secrets, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def clean(self, text: str) -> str:
        """Return the text without registered secrets and without the query of any URL, which may be its signature."""
        if self._pattern is not None:
            text = self._pattern.sub(HIDDEN, text)
        return _URL.sub(lambda url: f"{url[1]}?{HIDDEN}" if url[2] else url[1], text) if "?" in text else text

    def value(self, item: Any) -> Any:
        if isinstance(item, str):
            return self.clean(item)
        if isinstance(item, Mapping):
            return {key: HIDDEN if _is_secret_name(key) else self.value(one) for key, one in item.items()}
        if isinstance(item, Sequence) and not isinstance(item, bytes | bytearray):
            return [self.value(one) for one in item]
        if item is None or isinstance(item, int | float):
            return item
        return self.clean(str(item))

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, item in event.items():
            event[key] = HIDDEN if _is_secret_name(key) and item else self.value(item)
        return event


def _is_secret_name(name: object) -> bool:
    return isinstance(name, str) and _SECRET_NAME.search(name) is not None


def configure(redactor: Redactor, *, stream: TextIO | None = None, json_lines: bool | None = None) -> None:
    """Everything logged in this process goes through the redactor to one stream, by default stderr.

    Logs of libraries join in as warnings and worse only: at INFO some of them print URLs.
    """
    out = stream if stream is not None else sys.stderr
    as_json = not out.isatty() if json_lines is None else json_lines
    before: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    after: list[Any] = [structlog.processors.format_exc_info, redactor, *_renderers(as_json=as_json)]
    structlog.configure(
        processors=[*before, *after],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *after],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in TAMED:
        logging.getLogger(name).setLevel(logging.WARNING)


def _renderers(*, as_json: bool) -> list[Callable[..., Any]]:
    if as_json:
        return [structlog.processors.EventRenamer("event"), structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=True)]


def get(name: str) -> Any:
    """Return a logger that names its part of the daemon."""
    return structlog.get_logger(part=name)

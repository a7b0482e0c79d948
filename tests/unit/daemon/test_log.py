"""Nothing secret comes out of the log, whatever was put in."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
import structlog

from spotd.daemon import log as logs
from spotd.daemon.log import HIDDEN, Redactor
from tests.cases import every

CANARY = "canary-9f3a"


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    redactor = Redactor()
    redactor.register([CANARY, None, "", "ab"])
    logs.configure(redactor, stream=stream, json_lines=True)
    yield stream
    structlog.reset_defaults()
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    "fields",
    [
        {"detail": f"key {CANARY} was refused"},
        {"nested": {"deep": [f"x{CANARY}x"]}},
        {"api_key": "never-registered"},
        {"headers": {"Authorization": "Bearer never-registered"}},
        {"url": "https://store/x?X-Amz-Signature=never-registered&b=1"},
        {"thing": ValueError(CANARY)},
    ],
    ids=["text", "nested", "name", "header", "signed url", "object"],
)
def test_a_secret_is_hidden_wherever_it_stands(out: io.StringIO, fields: dict[str, object]) -> None:
    logs.get("test").info("event.name", **fields)
    line = out.getvalue()
    assert CANARY not in line
    assert "never-registered" not in line
    assert HIDDEN in line


def test_a_traceback_is_cleaned_too(out: io.StringIO) -> None:
    try:
        raise ValueError(f"wrong key {CANARY}")
    except ValueError as exc:
        logs.get("test").error("failed", exc_info=exc)
    assert "ValueError" in out.getvalue()
    assert CANARY not in out.getvalue()


def test_libraries_speak_through_the_same_filter_and_only_when_something_is_wrong(out: io.StringIO) -> None:
    logging.getLogger("httpx").info("HTTP Request: GET https://api/?key=1")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble with %s", CANARY)
    (line,) = out.getvalue().splitlines()
    record = json.loads(line)
    assert CANARY not in line
    assert record["level"] == "warning"
    assert record["logger"] == "some.library"


def test_a_line_is_json_with_name_and_fields(out: io.StringIO) -> None:
    logs.get("control-loop").info("cycle.decided", jobs=3)
    record = json.loads(out.getvalue())
    assert (record["event"], record["part"], record["jobs"], record["level"]) == (
        "cycle.decided",
        "control-loop",
        3,
        "info",
    )


def test_a_short_value_is_not_blotted_out_of_every_word() -> None:
    redactor = Redactor()
    redactor.register(["ab"])
    assert redactor.clean("a table") == "a table"


def test_a_secret_that_contains_another_is_hidden_whole() -> None:
    redactor = Redactor()
    redactor.register(["abcd", "abcdefgh"])
    assert redactor.clean("abcdefgh") == HIDDEN


@every("piece", ["http://", "https://a", "http://a#", 'http://"'])
def test_a_text_of_nothing_but_beginnings_of_urls_takes_no_time_that_grows_with_its_square(piece: str) -> None:
    redactor = Redactor()
    text = piece * 20_000 + "http://a/b?signature"
    began = time.thread_time()
    assert "signature" not in redactor.clean(text)
    assert time.thread_time() - began < 2, "each part of it was searched to the end"


def test_a_url_without_a_query_stays_as_it_is() -> None:
    text = "GET http://a/b#c? and https://d/e? then https://f/g?h=1"
    assert Redactor().clean(text) == f"GET http://a/b#c? and https://d/e? then https://f/g?{HIDDEN}"

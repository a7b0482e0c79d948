"""What a marketplace says of a machine may have been written by its host."""

from __future__ import annotations

import time

from spotd_providers.kit.text import clean, quote_safely
from tests.cases import every


@every(
    "piece",
    ["http://", "https://a", "http://a#", "x http://", "token", "token=", 'secret"', "a1", "f" * 31 + " ", "=:"],
)
def test_no_text_takes_time_that_grows_with_its_square(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    began = time.thread_time()
    clean(text)
    quote_safely(text)
    assert time.thread_time() - began < 2, "each part of it was searched to the end"


def test_the_query_of_a_url_is_not_shown() -> None:
    assert (
        clean("see http://a/b and https://c/d?key=1 or http://e/f?")
        == "see http://a/b and https://c/d?... or http://e/f?..."
    )

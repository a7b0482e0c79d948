"""A list that a provider answers page by page, read to its end or to where it breaks off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, ProviderError

PAGES_MAX: Final = 400
PAGED_ROWS_MAX: Final = 10_000
"""Twice as many machines as the daemon keeps of one provider."""
Page = tuple[Sequence[Any], str | None]


async def all_pages(
    read: Callable[[str | None], Awaitable[Page]],
) -> tuple[list[Any], bool]:
    """Return the rows of all pages, and whether these are the whole list.

    `read` returns the rows of the page behind a token and the token of the next one: `None` at the end, empty for a
    page that is promised without a token. Of more rows than `PAGED_ROWS_MAX` the first are returned, as not the whole.

    Raises:
        ProviderError: the first page could not be read, or the key was refused at any.
    """
    rows: list[Any] = []
    token: str | None = None
    tokens: set[str] = set()
    while True:
        try:
            page, following = await read(token)
        except AuthFailed:
            raise
        except ProviderError:
            if token is None:
                raise
            return rows, False
        rows.extend(islice(page, PAGED_ROWS_MAX - len(rows)))
        if len(rows) >= PAGED_ROWS_MAX:
            return rows, False
        if following is None:
            return rows, True
        if not following or following in tokens or len(tokens) >= PAGES_MAX:
            return rows, False
        tokens.add(following)
        token = following

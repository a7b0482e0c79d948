"""What the kit states once of values that are kept, of tokens, and of the pages of past prices."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest

from spotd_providers.contract.errors import RequestRejected
from spotd_providers.kit.calls import Kept, KeptToken, past_page
from spotd_providers.testkit.clock import START, FakeClock
from tests.cases import every

KEPT = timedelta(days=90)


@every("names, size", [(tuple("abcd")[:count], size) for count in (0, 1, 3, 4) for size in (1, 2, 3)])
def test_pages_of_past_prices_name_everything_once_and_count_down(names: tuple[str, ...], size: int) -> None:
    after = ""
    found: list[str] = []
    left: list[int] = []
    while True:
        page = past_page(names, START - timedelta(days=100), START, after=after, kept=KEPT, who="it", size=size)
        found += page.names
        left.append(page.left)
        assert (page.since, page.until, len(page.names) <= size) == (START - KEPT, START, True)
        if not (after := page.next):
            break
    assert tuple(found) == names
    assert left == list(reversed(range(len(left))))


@every("after", ["b", "e", "0"])
def test_a_page_begins_with_no_other_name(after: str) -> None:
    with pytest.raises(RequestRejected):
        past_page(("a", "b", "c"), START, START, after=after, kept=KEPT, who="it", size=2)


class Numbered(KeptToken):
    """Each token is a number, good for a minute; the one that is empty, too."""

    fetched = 0

    async def _fetch(self) -> tuple[str, timedelta]:
        self.fetched += 1
        return "" if self.fetched == 1 else str(self.fetched), timedelta(minutes=1)


def test_a_token_is_fetched_once_until_its_time_is_over_or_it_was_refused() -> None:
    async def story() -> None:
        clock = FakeClock()
        tokens = Numbered(clock)
        assert [await tokens(refused=False) for _ in range(3)] == ["", "", ""]
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask_refused, tokens)
        assert tokens.fetched == 2, "requests that were refused together need one other token"
        clock.advance(timedelta(minutes=1))
        assert await tokens(refused=False) == "3"

    async def ask_refused(tokens: Numbered) -> None:
        assert await tokens(refused=True) == "2"

    anyio.run(story)


def test_a_value_is_read_again_when_it_is_old_or_too_old_for_the_question() -> None:
    async def story() -> None:
        clock, reads = FakeClock(), 0

        async def read() -> int:
            nonlocal reads
            reads += 1
            return reads

        kept = Kept(clock, timedelta(hours=1), read)
        assert (await kept.get(), await kept.get()) == (1, 1)
        clock.advance(timedelta(minutes=10))
        assert (await kept.get(within=timedelta(minutes=20)), await kept.get(within=timedelta(minutes=5))) == (1, 2)
        clock.advance(timedelta(hours=1))
        assert await kept.get() == 3

    anyio.run(story)

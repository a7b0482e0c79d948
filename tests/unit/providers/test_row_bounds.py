"""What one answer may cost, whatever it holds: rows judged and reasons kept; and the edge of an adapter."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from pydantic import ValidationError

from spotd.daemon.market import plugin_values
from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    Unavailable,
)
from spotd_providers.contract.values import LaunchRequest, OfferPage, ProviderName, Rejected
from spotd_providers.kit.boundary import CALLS, LEAVES, keep_contract
from spotd_providers.kit.calls import APART_BYTES, APART_ROWS, PAGED_ROWS_MAX, all_pages, judge_apart
from spotd_providers.kit.shapes import (
    CHARGE_ROWS_MAX,
    REASONS_MAX,
    ROW_VALUES_MAX,
    ROWS_MAX,
    Row,
    distinct_rows,
    is_small,
    require_few_charges,
    row_or_none,
)
from spotd_providers.local.wire import MachineAnswer, OfferAnswer, as_listing, as_page
from spotd_providers.runpod.wire import gpu_rows
from spotd_providers.vastai import wire
from spotd_providers.vastai.wire import offer_rows
from tests.cases import every

MANY = 700_000
NOW = datetime(2026, 11, 1, tzinfo=UTC)
FLOOD = b'{"offers":[' + b",".join([b"{}"] * MANY) + b"]}"


def test_two_kilobytes_of_empty_rows_cost_a_bounded_number_of_errors() -> None:
    assert len(gzip.compress(FLOOD)) < 10_000
    with pytest.raises(ValidationError) as first:
        wire._FlawlessSearch.model_validate_json(FLOOD)
    assert first.value.error_count() <= 64, "the first faulty row ends the quick way"
    found = offer_rows(FLOOD)
    assert (found.judged, found.is_cut, len(found.rows)) == (ROWS_MAX, True, 0)
    assert len(found.rejected) == REASONS_MAX
    assert found.count == ROWS_MAX, "an answer of so many rows is known to be cut off"
    assert found.rejected[-1].reason.startswith("and 18,0")


def test_no_more_rows_are_taken_than_are_judged() -> None:
    taken = 0

    def rows() -> Iterator[Rejected]:
        nonlocal taken
        for _ in range(MANY):
            taken += 1
            yield Rejected(offer_id="x", reason="odd")

    distinct_rows(rows(), what="offer")
    assert taken == ROWS_MAX + 1


def test_every_adapter_keeps_a_bounded_number_of_reasons() -> None:
    gpus = gpu_rows({"gpus": [{}] * MANY})
    assert (gpus.judged, gpus.is_cut, len(gpus.rejected)) == (ROWS_MAX, True, REASONS_MAX)
    page = as_page(OfferAnswer(now=NOW, offers=[{}] * MANY), cast("Any", SimpleNamespace(markets=())))
    assert len(page.rejected) <= ROWS_MAX
    assert not page.complete
    assert not as_listing(MachineAnswer(now=NOW, count=MANY, machines=[{}] * MANY), "lab").complete


def test_the_daemon_keeps_a_bounded_number_of_reasons_of_any_plugin() -> None:
    odd = tuple(cast("Any", number) for number in range(30_000))
    rejected = tuple(Rejected(offer_id="x", reason="odd") for _ in range(30_000))
    page = OfferPage(offers=odd, rejected=rejected, complete=True, at=NOW)
    found = plugin_values.offer_page(page, ProviderName("shelf"), now=NOW)
    assert (len(found.rejected), found.complete) == (REASONS_MAX, False)
    assert plugin_values.row_count(page) == 60_000
    assert plugin_values.row_count("no page") == 0


class Small(Row):
    names: list[int]


def test_a_row_of_very_many_values_costs_no_error_each() -> None:
    deep: Any = []
    for _ in range(ROW_VALUES_MAX + 2):
        deep = [deep]
    raw: Any
    for raw in ({"names": ["x"] * MANY}, {"a": {"b": [{}] * MANY}}, {"a": deep}):
        assert not is_small(raw)
        assert row_or_none(Small, raw) is None
    assert row_or_none(Small, {"names": [1, 2]}) is not None


async def _pages_without_end(after: str | None) -> tuple[list[int], str | None]:
    return [0] * 5_000, str(int(after or 0) + 1)


def test_a_list_of_pages_ends_at_a_bound_and_is_not_whole() -> None:
    rows, whole = anyio.run(lambda: all_pages(_pages_without_end))
    assert (len(rows), whole) == (PAGED_ROWS_MAX, False)


def test_of_a_bill_of_too_many_rows_nothing_is_believed() -> None:
    require_few_charges(CHARGE_ROWS_MAX, who="vast.ai")
    with pytest.raises(Unavailable, match="which no account has"):
        require_few_charges(CHARGE_ROWS_MAX + 1, who="vast.ai")


@every(
    ("rows", "size", "apart"), [(APART_ROWS, APART_BYTES, False), (APART_ROWS + 1, 0, True), (0, APART_BYTES + 1, True)]
)
def test_a_large_answer_is_judged_beside_the_event_loop(rows: int, size: int, *, apart: bool) -> None:
    async def main() -> bool:
        return await judge_apart(threading.get_ident, rows=rows, size=size) != threading.get_ident()

    assert anyio.run(main) is apart


class OwnError(NoCapacity):
    """A leaf of an adapter's own."""


def provider_that(error: BaseException) -> Any:
    """A provider whose every call raises this."""

    async def fails(*_: Any, **__: Any) -> Any:
        raise error

    kind = type("Failing", (), dict.fromkeys(CALLS, fails))
    keep_contract(kind)
    keep_contract(kind)
    return kind()


FOREIGN: list[BaseException] = [
    ValueError("sk-secret"), TypeError("x"), KeyError("x"), OSError(5, "x"), UnicodeError("x"), RecursionError(),
    MemoryError(), TimeoutError(), ZeroDivisionError(), OverflowError(), AttributeError("x"), StopIteration(),
    EOFError(), ExceptionGroup("x", [ValueError("x")]), anyio.BrokenResourceError(), ProviderError("the root"),
    AssertionError("x"), NotImplementedError(), LookupError(),
]  # fmt: skip


@every("error", FOREIGN, ids=lambda error: type(error).__name__)
@every("call", CALLS)
def test_any_other_error_is_a_leaf_of_the_contract(error: BaseException, call: str) -> None:
    request = LaunchRequest.__new__(LaunchRequest)
    object.__setattr__(request, "key", "spotd-lab-a-1")
    object.__setattr__(request, "login", None)
    with pytest.raises(LEAVES) as caught:
        anyio.run(lambda: getattr(provider_that(error), call)(request if call == "launch" else None))
    assert type(caught.value) is (OutcomeUnknown if call == "launch" else Unavailable)
    assert "secret" not in str(caught.value)
    assert call in str(caught.value)


@every("error", [AuthFailed("x"), RateLimited("x", retry_after=cast("Any", None)), OwnError("x")])
def test_a_leaf_stays_what_it_is(error: ProviderError) -> None:
    with pytest.raises(type(error)) as caught:
        anyio.run(provider_that(error).offers)
    assert caught.value is error


def test_a_cancellation_passes() -> None:
    async def main() -> bool:
        with anyio.move_on_after(0) as scope:
            await provider_that(anyio.get_cancelled_exc_class()()).offers()
        return scope.cancelled_caught

    with pytest.raises(BaseException) as caught:
        anyio.run(main)
    assert not isinstance(caught.value, Exception)

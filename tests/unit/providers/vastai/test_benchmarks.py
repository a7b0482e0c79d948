"""Benchmarks of vast.ai: which results can be compared, and that no poll of offers waits for them or fails by them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import Benchmark
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import GATEWAY_ERROR, Call, Canned
from spotd_providers.vastai.metrics import AGAIN_AFTER, BENCHMARKS_EVERY, HOSTS_MIN, compare_results
from spotd_providers.vastai.plugin import VastProvider
from tests.cases import every
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import play

FOUND = (Benchmark(test="t1", gpu="A100_SXM_80", score=30.0), Benchmark(test="t1", gpu="RTX_4090", score=10.0))


def result(machine: int, gpu: str, value: Any, *, gpus: int = 1, test: Any = "t1", **more: Any) -> dict[str, Any]:
    """A row as the official client reads it."""
    return {
        "id": machine, "contract_id": machine, "machine_id": machine, "gpu_name": gpu, "num_gpus": gpus, "image": "x",
        "value": value, "template_hash": test, "last_update": START.timestamp() - machine, **more,
    }  # fmt: skip


def results() -> list[dict[str, Any]]:
    fast = [result(n, "A100_SXM4", 30.0 * gpus, gpus=gpus, gpu_ram=81920) for n, gpus in ((1, 1), (2, 2), (3, 8))]
    return [*fast, *(result(n, "RTX_4090", 10.0) for n in (11, 12, 13))]


def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with a name of which one GPU is meant."""
    return [{**row, "gpu_name": row["gpu_name"].replace("A100_SXM4", "A100_SXM4_80GB")} for row in rows]


def test_the_median_of_one_gpu_counts_where_machines_enough_measured_it() -> None:
    assert compare_results(named(results())) == FOUND
    assert compare_results(named(results())[: HOSTS_MIN + HOSTS_MIN - 1]) == (), "two kinds make a comparison"
    same_machine = [{**row, "machine_id": 7} for row in results()]
    assert compare_results(named(same_machine)) == ()


def test_of_one_machine_the_newest_result_counts() -> None:
    assert compare_results([*named(results()), *(result(n, "RTX_4090", 999.0) for n in (11, 12, 13))]) == FOUND


def test_the_names_of_the_older_version_are_read() -> None:
    old = [
        {**row, "score": row["value"], "name": "bench", "model": "llama", "template_hash": None, "value": None}
        for row in named(results())
    ]
    assert {one.test for one in compare_results(old)} == {"bench llama"}


@every(
    "odd",
    [
        {"value": 0}, {"value": -1}, {"value": float("nan")}, {"value": 1e300}, {"value": "fast"}, {"num_gpus": 0},
        {"gpu_name": 3}, {"machine_id": None}, {"template_hash": None}, {"template_hash": ["t1"]},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_row_is_left_out_and_costs_no_other(odd: dict[str, Any]) -> None:
    more = [{**result(90 + n, "RTX_4090", 5.0), **odd} for n in range(9)]
    assert compare_results([*more, None, 7, [], *named(results())]) == FOUND


def test_they_come_with_the_offers_and_are_asked_for_once_a_day(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.benchmarks = named(results())
        for _ in range(3):
            assert (await provider.offers(h.query())).benchmarks == FOUND
        assert len(h.requests(Call.OTHER)) == 1
        h.later(BENCHMARKS_EVERY)
        h.cloud.benchmarks = []
        assert (await provider.offers(h.query())).benchmarks == ()

    play(tmp_path, story)


@pytest.mark.parametrize(
    "canned",
    [GATEWAY_ERROR, Canned(status=404, body=b"{}"), Canned(status=200, body=b"{}"), Canned(status=200, body=b"[[["),
     Canned(status=401, body=b'{"success":false,"error":"auth_error"}')],
    ids=["gateway", "unknown to this vast.ai", "an object", "damaged", "no right"],
)  # fmt: skip
def test_offers_come_without_an_answer_and_it_is_asked_again_after_an_hour(canned: Canned, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.cloud.benchmarks = named(results())
        h.faults.answer(Call.OTHER, canned, times=1)
        page = await provider.offers(h.query())
        assert (page.complete, page.benchmarks) == (True, ())
        assert page.offers
        assert (await provider.offers(h.query())).benchmarks == ()
        h.later(AGAIN_AFTER)
        assert (await provider.offers(h.query())).benchmarks == FOUND

    play(tmp_path, story)


def test_a_poll_waits_for_them_for_seconds_only(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.faults.hang(Call.OTHER, times=9)
        before = h.clock.now()
        assert (await provider.offers(h.query())).complete
        assert h.clock.now() - before < timedelta(seconds=60)

    play(tmp_path, story)

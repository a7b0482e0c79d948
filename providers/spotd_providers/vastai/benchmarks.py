"""What benchmarks at vast.ai have measured of GPUs: the speed of one GPU of each kind, in each test.

Workers of vast.ai's serverless groups measure the machine that they run on, each with the test of its template, so
that figures of one template can be compared and no others. One host can state anything: a GPU counts where `HOSTS_MIN`
machines measured it, with their median.

Source: `search benchmarks` of vast.ai's official client, and its API reference for the names of the older version
(`name`, `model`, `score` for `template_hash` and `value`). The unit of a figure is nowhere stated; more is faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from statistics import median_low
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import Benchmark
from spotd_providers.kit.calls import judge_apart
from spotd_providers.kit.shapes import Lenient, Row, row_or_none
from spotd_providers.kit.text import clean
from spotd_providers.vastai.client import VastClient, as_json
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.wire import BENCHMARKS, Id, Measure, Text

ASKED_EVERY: Final = timedelta(days=1)
AGAIN_AFTER: Final = timedelta(hours=1)
"""It is asked again so long after it did not answer."""
TIMEOUT_S: Final = 5.0
"""It is asked within a poll of the offers, which must not wait for it."""
ROWS_MAX: Final = 2_000
HOSTS_MIN: Final = 3
FOUND_MAX: Final = 500
_Word = Annotated[Text | None, Lenient]


class _Result(Row):
    machine_id: Id
    gpu_name: Annotated[str, Field(min_length=1, max_length=128)]
    num_gpus: Annotated[int, Field(gt=0, le=1024)]
    value: Annotated[Measure | None, Lenient] = None
    score: Annotated[Measure | None, Lenient] = None
    template_hash: _Word = None
    type: _Word = None
    name: _Word = None
    model: _Word = None

    @property
    def test(self) -> str:
        """What was measured; results of the same test can be compared."""
        return clean(" ".join(part for part in (self.template_hash, self.type, self.name, self.model) if part))[:200]


class Benchmarks:
    """The newest results, asked for once a day at most."""

    def __init__(self, client: VastClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._due_at: datetime | None = None
        self._known: tuple[Benchmark, ...] = ()

    async def results(self) -> tuple[Benchmark, ...]:
        """Return what is known; what cannot be asked for now is as it was."""
        now = self._clock.now()
        if self._due_at is None or not timedelta(0) < self._due_at - now <= ASKED_EVERY:
            self._due_at = now + AGAIN_AFTER
            rows = await self._rows()
            if rows is not None:
                self._known = await judge_apart(lambda: compare_results(rows), rows=len(rows))
                self._due_at = now + ASKED_EVERY
        return self._known

    async def _rows(self) -> list[Any] | None:
        params = {
            "select_cols": as_json(["*"]),
            "select_filters": as_json({}),
            "order_by": as_json([{"col": "last_update", "dir": "desc"}]),
            "limit": as_json(ROWS_MAX),
        }
        try:
            answer = await self._client.send(
                "GET", "/api/v0/benchmarks/", what=BENCHMARKS, params=params, timeout_s=TIMEOUT_S
            )
            found = answer.json() if answer.status == 200 else None
        except ProviderError:
            return None
        return found[:ROWS_MAX] if isinstance(found, list) else None


def compare_results(rows: Iterable[Any]) -> tuple[Benchmark, ...]:
    """Return the median of one GPU of each kind in each test that compares two kinds at least."""
    tests: dict[str, dict[str, dict[int, float]]] = {}
    for raw in rows:
        row = row_or_none(_Result, raw)
        value = None if row is None else row.score if row.value is None else row.value
        if row is None or not value or not row.test:
            continue
        gpu = canonical(PROVIDER, row.gpu_name.replace("_", " "))
        # Newest first: of one machine the newest counts.
        tests.setdefault(row.test, {}).setdefault(gpu, {}).setdefault(row.machine_id, value / row.num_gpus)
    found: list[Benchmark] = []
    for test, by_gpu in sorted(tests.items()):
        scores = {gpu: median_low(hosts.values()) for gpu, hosts in by_gpu.items() if len(hosts) >= HOSTS_MIN}
        if len(scores) > 1:
            found.extend(Benchmark(test=test, gpu=gpu, score=score) for gpu, score in sorted(scores.items()))
    return tuple(found[:FOUND_MAX])

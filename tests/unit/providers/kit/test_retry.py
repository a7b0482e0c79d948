from __future__ import annotations

from datetime import timedelta
from random import Random

import anyio
import pytest

from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.kit.calls import retry_read
from spotd_providers.local.hosts.machines import REAL_TIME
from tests.cases import every

DOWN = Unavailable("down")


class _Clock:
    """Waits that are only noted."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def now(self) -> object:
        return REAL_TIME.now()

    async def sleep(self, duration: timedelta) -> None:
        self.waits.append(duration.total_seconds())


def limited(seconds: float) -> RateLimited:
    return RateLimited("too often", retry_after=timedelta(seconds=seconds))


@every(
    ("failures", "answer", "waits"),
    [
        pytest.param([], "ok", [], id="at once"),
        pytest.param([DOWN], "ok", [(0.25, 0.5)], id="the second time"),
        pytest.param([DOWN, DOWN], "ok", [(0.25, 0.5), (0.5, 1.0)], id="the third time, after twice as long"),
        pytest.param([DOWN, DOWN, DOWN], DOWN, [(0.25, 0.5), (0.5, 1.0)], id="never"),
        pytest.param([limited(3)], "ok", [(3.0, 3.0)], id="as long as was asked for"),
        pytest.param([limited(15), DOWN], "ok", [(15.0, 15.0), (0.5, 1.0)], id="as long as may be, then again"),
        pytest.param([limited(16)], RateLimited, [], id="too long to wait here"),
        pytest.param([AuthFailed("no")], AuthFailed, [], id="nothing that time mends"),
    ],
)
def test_a_read_is_asked_again_where_that_may_help(
    failures: list[ProviderError], answer: object, waits: list[tuple[float, float]]
) -> None:
    clock, left = _Clock(), list(failures)

    async def call() -> str:
        if left:
            raise left.pop(0)
        return "ok"

    async def main() -> str:
        return await retry_read(call, clock=clock, rng=Random(1))  # type: ignore[arg-type]  # what a read needs of it

    if answer == "ok":
        assert anyio.run(main) == "ok"
    else:
        with pytest.raises(ProviderError) as raised:
            anyio.run(main)
        assert raised.value is answer or type(raised.value) is answer
    assert len(clock.waits) == len(waits)
    assert all(least <= wait <= most for wait, (least, most) in zip(clock.waits, waits, strict=True))


def test_waits_do_not_grow_beyond_their_bound() -> None:
    clock = _Clock()

    async def call() -> str:
        raise DOWN

    with pytest.raises(Unavailable):
        anyio.run(lambda: retry_read(call, clock=clock, rng=Random(1), attempts=40))  # type: ignore[arg-type]  # as above
    assert len(clock.waits) == 39
    assert max(clock.waits) <= 15

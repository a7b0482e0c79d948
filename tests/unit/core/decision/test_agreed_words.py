"""The verdict on a machine that runs states the quote that it has now, however many others were stated before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotd.core import decide as deciding
from spotd.core.decide import decide
from spotd.core.domain.states import AttemptState
from spotd.core.pricing import quote_words
from spotd_providers.contract.values import MicroUsdPerGpuHour
from tests.unit.core.builders import NOW, market, world_with


def test_each_quote_is_stated_by_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "_AGREED_MAX", 2)
    world = world_with(AttemptState.RUNNING)
    [item], [job] = world.attempts.values(), world.jobs
    for price in [1_000, 2_000, 3_000, 2_000]:
        quote = replace(item.quote, price=replace(item.quote.price, per_gpu=MicroUsdPerGpuHour(price)))
        quoted = replace(world, attempts={item.id: replace(item, quote=quote)})
        for _ in range(2):
            assert f"agreed at {quote_words(quote)}" in decide(quoted, market(), NOW).verdicts[job].sentence
    assert len(deciding._agreed) <= 2

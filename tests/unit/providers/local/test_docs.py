"""The pages about the local market know every key and every call."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from spotd_providers.local.market.market import LocalMarket
from spotd_providers.local.server.app import MarketApp, PreemptBody
from spotd_providers.local.settings import (
    CsvPrice,
    EventSpec,
    FixedPrice,
    Happening,
    HostSpec,
    LocalSettings,
    MarketSpec,
    SeededPrice,
    TracePrice,
)
from tests.cases import every
from tests.unit.providers.local.clocks import ManualClock

_DOCS = Path(__file__).parents[4] / "docs"
PAGE = "".join(
    (_DOCS / page).read_text()
    for page in ("providers/local.md", "reference/local-market.md", "reference/config.md", "reference/providers.md")
)


@every(
    "model",
    [
        LocalSettings, HostSpec, EventSpec, SeededPrice, FixedPrice, CsvPrice, TracePrice,
        PreemptBody,
    ],
)  # fmt: skip
def test_every_key_is_explained(model: type[LocalSettings]) -> None:
    missing = [name for name in model.model_fields if f"{name}" not in PAGE]
    assert not missing


def test_every_event_is_named() -> None:
    missing = [word for word in Happening if word not in PAGE]
    assert not missing


def test_every_call_that_tests_may_make_is_named(tmp_path: Path) -> None:
    market = LocalMarket(MarketSpec(), tmp_path / "market", clock=ManualClock())
    app = MarketApp(market, token="t").app
    market.close()
    paths = {route.path for route in app.routes if isinstance(route, Route) and not route.path.startswith("/v1")}
    assert "/control/preempt" in paths
    assert [path for path in paths - {"/health"} if path not in PAGE] == []

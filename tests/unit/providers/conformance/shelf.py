"""The example provider, importable from the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "provider-plugin"
sys.path.insert(0, str(EXAMPLE))

from spotd_shelf import client, provider, shop, translate, wire
from spotd_shelf.harness import ShelfHarness, open_harness

__all__ = ["EXAMPLE", "ShelfHarness", "client", "open_harness", "provider", "shop", "translate", "wire"]

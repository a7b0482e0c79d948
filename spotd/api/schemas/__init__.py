"""The JSON of the API, as types: the promise behind `-o json`.

Rules that hold everywhere. Instants are ISO 8601 in UTC ending in `Z`, by the daemon's clock, or null. Money is dollars
as a float: `_usd` an amount, `_usd_h` per hour for the whole machine, `_usd_gpu_h` per hour for one GPU. Spans are
seconds. Keys are always present. A key may be added within one schema; none is removed or given another meaning.

Imports the standard library's `typing` only, so that the client may share it for nothing.
"""

from __future__ import annotations

from typing import Final

SCHEMA: Final = 1

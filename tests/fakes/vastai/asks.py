"""What is for sale: asks on machines, and the search language over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spotd_providers.contract.values import MicroUsdPerHour, micro_usd

HOURS_PER_MONTH: Final = 720
_DEFAULT_LIMIT: Final = 64
_QUERY_KEYS: Final = frozenset({"order", "type", "limit", "allocated_storage", "georegion", "chunked"})


_COMPUTED: Final = frozenset(
    {"verified", "datacenter", "geolocation", "driver_version", "target_reliability", "offset"}
)


@dataclass(slots=True, kw_only=True)
class Ask:
    """Some GPUs of one machine, on offer. `slots` says which, so that overlapping asks exclude each other.

    Attributes:
        min_bid: the lowest bid that wins now, all GPUs of the ask, $ per hour.
        more: further or replaced fields of the row.
    """

    ask_id: int
    machine_id: int
    gpu_name: str = "RTX 4090"
    gpu_ram: int = 24564
    slots: frozenset[int] = frozenset({0})
    machine_gpus: int = 1
    dph_base: float = 0.40
    min_bid: float = 0.20
    storage_cost: float = 0.15
    inet_up_cost: float = 0.004
    inet_down_cost: float = 0.003
    geolocation: str | None = "Quebec, CA"
    verification: str = "verified"
    hosting_type: int = 0
    reliability: float = 0.995
    cuda_max_good: float = 12.8
    direct_port_count: int = 120
    disk_space: float = 800.0
    duration_s: float = 30 * 86400.0
    rentable: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        return len(self.slots)

    def storage_per_hour(self, disk_gb: float) -> MicroUsdPerHour:
        """What a disk of this size costs here."""
        return MicroUsdPerHour(micro_usd(self.storage_cost * disk_gb / HOURS_PER_MONTH))


def some_asks(*, first_id: int = 23_000_001, machines: int = 6) -> tuple[Ask, ...]:
    """A small market: machines of one to four GPUs, some with overlapping asks, prices rising with the number."""
    kinds = (
        ("RTX 4090", 24564, 0.40),
        ("RTX 3090", 24576, 0.20),
        ("H100 SXM", 81559, 2.20),
        ("A100 SXM4", 81920, 1.10),
    )
    places = ("Quebec, CA", "Texas, US", "Sweden, SE", None)
    found: list[Ask] = []
    for number in range(machines):
        name, ram, price = kinds[number % len(kinds)]
        gpus = 1 + number % 3
        asked = round(price * (1 + number / 50), 6)
        shares = [frozenset(range(gpus))] + ([frozenset({0})] if gpus > 1 else [])
        for slots in shares:
            found.append(
                Ask(
                    ask_id=first_id + len(found),
                    machine_id=18_000 + number,
                    gpu_name=name,
                    gpu_ram=ram,
                    slots=slots,
                    machine_gpus=gpus,
                    dph_base=asked * len(slots),
                    min_bid=round(asked * len(slots) * 0.5, 6),
                    geolocation=places[number % len(places)],
                    hosting_type=number % 2,
                )
            )
    return tuple(found)


def selected(rows: Sequence[dict[str, Any]], query: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows a search returns: filtered, ordered, cut."""
    allocated = _number(query.get("allocated_storage")) or 8.0
    found = [row for row in rows if _passes(row, query) and row["disk_space"] >= allocated]
    for key, direction in reversed(list(query.get("order") or [["score", "desc"]])):
        found.sort(key=lambda row: (row.get(key) is None, row.get(key) or 0), reverse=direction == "desc")
    return found[: int(_number(query.get("limit")) or _DEFAULT_LIMIT)]


def unknown_columns(query: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Filters on what is no column of a row, which the service refuses."""
    known = _QUERY_KEYS | _COMPUTED | (rows[0].keys() if rows else query.keys())
    return [name for name in query if name not in known]


def _passes(row: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    return all(
        _holds(_value(row, name), op, wanted)
        for name, conditions in query.items()
        if name not in _QUERY_KEYS and isinstance(conditions, Mapping)
        for op, wanted in conditions.items()
    )


def _value(row: Mapping[str, Any], name: str) -> Any:
    """The column behind a search field; some are computed for the search only."""
    if name == "id":
        return None  # the service finds nothing by it: an offer's id is filtered as `ask_contract_id`
    if name == "verified":
        return row["verification"] == "verified"
    if name == "datacenter":
        return row["hosting_type"] >= 1
    if name == "external":
        return bool(row["external"])
    if name == "geolocation":
        return (row["geolocation"] or "").rpartition(",")[2].strip()
    if name == "driver_version":
        return row["driver_vers"]
    return row.get(name)


def _holds(value: Any, op: str, wanted: Any) -> bool:
    if op in ("in", "notin"):
        return (value in wanted) is (op == "in")
    if isinstance(value, bool) or isinstance(wanted, bool):
        same = bool(value) is (wanted in (True, "true", "True"))
        return same if op == "eq" else not same
    # Clients send numbers as strings, too.
    left, right = (_number(value), _number(wanted))
    if left is None or right is None:
        return (value == wanted) is (op == "eq") if op in ("eq", "neq") else False
    return {
        "eq": left == right,
        "neq": left != right,
        "gt": left > right,
        "gte": left >= right,
        "lt": left < right,
        "lte": left <= right,
    }.get(op, False)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None

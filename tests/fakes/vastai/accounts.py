"""Listings, credit and charges: what an account can read about itself, page by page."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotd_providers.contract.values import MICRO, cost
from spotd_providers.local.hosts import read_ledger, segments
from tests.fakes.vastai.cloud import VastCloud
from tests.fakes.vastai.contracts import Contract
from tests.fakes.vastai.quirks import Quirks
from tests.fakes.vastai.refusal import said

_FILTER_COLUMNS: Final = frozenset({"actual_status", "gpu_name", "verification", "id", "label"})
_CHARGES_PAGE_MAX: Final = 500


def instances_page(listed: Sequence[tuple[Contract, Any]], params: Mapping[str, str], quirks: Quirks) -> dict[str, Any]:
    """One page of the v1 listing; the token names the last id of the page before."""
    filters = _json_param(params, "select_filters") or {}
    for column in filters:
        if column not in _FILTER_COLUMNS:
            raise said(400, "invalid_args", f"error 400/3700: cannot filter on {column}")
    matching = [(contract, row) for contract, row in listed if _matches(contract, row, filters)]
    after = _from_token(params.get("after_token"))
    limit = max(1, min(int(params.get("limit") or 25), quirks.page_rows_max))
    rest = [(contract, row) for contract, row in matching if contract.contract_id > after]
    page = rest[:limit]
    more = len(rest) > limit
    total = len(matching) if quirks.total_instances is None else quirks.total_instances
    return {
        "success": True,
        "instances_found": len(page),
        "total_instances": total,
        "label_counts": dict(Counter(contract.label or "" for contract, _ in matching)),
        "next_token": _to_token(page[-1][0].contract_id) if more else None,
        "instances": [row for _, row in page],
    }


def user_row(cloud: VastCloud) -> dict[str, Any]:
    """The account. The real answer may hold the very key that was used, and so does this one."""
    credit = cloud.credit_left()
    return {
        "id": 4711,
        "email": "someone@example.org",
        "email_verified": cloud.quirks.email_verified,
        "username": "someone",
        "balance": 0.0,
        "credit": credit,
        "can_pay": True,
        "billing_creditonly": 0,
        "got_signup_credit": 1,
        "fullname": "Some One",
        "ssh_key": "",
        "api_key": cloud.api_key,
    }


def charges_page(cloud: VastCloud, params: Mapping[str, str]) -> dict[str, Any]:
    """What was billed per contract, from the ledger."""
    filters = _json_param(params, "select_filters") or {}
    day = filters.get("day") or {}
    since, until = float(day.get("gte", 0)), float(day.get("lte", 4e9))
    found = [row for row in _charge_rows(cloud) if row["end"] >= since and row["start"] <= until]
    if params.get("latest_first") in ("true", "True", "1"):
        found.reverse()
    limit = max(1, min(int(params.get("limit") or 20), _CHARGES_PAGE_MAX))
    start = _from_token(params.get("after_token"))
    page = found[start : start + limit]
    more = start + limit < len(found)
    return {
        "success": True,
        "count": len(page),
        "total": len(found),
        "next_token": _to_token(start + limit) if more else None,
        "results": page,
    }


def _charge_rows(cloud: VastCloud) -> list[dict[str, Any]]:
    now = cloud.clock.now()
    spans = segments(read_ledger(cloud.ledger_path))
    rows = []
    for contract in cloud.contracts.values():
        own = [span for span in spans if span.machine_id == contract.machine]
        if not own:
            continue
        gpu = sum(cost(span.compute, min(span.end or now, now) - span.start) for span in own) / MICRO
        disk = sum(cost(span.storage, min(span.end or now, now) - span.start) for span in own) / MICRO
        text = f"Instance {contract.contract_id}"
        rows.append(
            {
                "start": own[0].start.timestamp(),
                "end": (own[-1].end or now).timestamp(),
                "type": "instance",
                "source": f"instance-{contract.contract_id}",
                "description": f"{text} Charges",
                "amount": gpu + disk,
                "metadata": {"label": contract.label},
                "items": [
                    {"type": "gpu", "amount": gpu, "description": f"{text} GPU"},
                    {"type": "disk", "amount": disk, "description": f"{text} disk"},
                    {"type": "bwd", "amount": 0.0, "description": f"{text} download"},
                    {"type": "bwu", "amount": 0.0, "description": f"{text} upload"},
                ],
            }
        )
    return rows


def _matches(contract: Contract, row: Any, filters: Mapping[str, Any]) -> bool:
    for column, conditions in filters.items():
        value = contract.label if column == "label" else row.get(column) if isinstance(row, dict) else None
        for op, wanted in conditions.items():
            if op == "eq" and value != wanted:
                return False
            if op == "in" and value not in wanted:
                return False
    return True


def _json_param(params: Mapping[str, str], name: str) -> Any:
    text = params.get(name)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise said(400, "invalid_args", f"error 400/3701: {name} is not JSON") from None


def _to_token(position: int) -> str:
    return base64.urlsafe_b64encode(json.dumps({"after": position}).encode()).decode()


def _from_token(token: str | None) -> int:
    if not token:
        return 0
    try:
        return int(json.loads(base64.urlsafe_b64decode(token))["after"])
    except (ValueError, KeyError, TypeError):
        raise said(400, "invalid_args", "error 400/3702: after_token is not one of ours") from None

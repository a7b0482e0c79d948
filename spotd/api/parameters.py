"""Bodies and query parameters of requests, checked before a handler sees them. All errors are `Invalid`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

from starlette.requests import Request

from spotd.api.errors import Invalid
from spotd.api.requests import BudgetChange, EventQuery, HistoryQuery, JobQuery, JobRequest, LogQuery, PriceQuery
from spotd.api.responses import BodyTooLong
from spotd.api.timestamps import utc_instant
from spotd.core.states import JobState
from spotd.store import CostGrouping
from spotd_jobs.spec.arrays import INDEX_MAX
from spotd_jobs.spec.model import PriceLimit
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_money, parse_price
from spotd_providers.contract.values import Market

BODY_BYTES_MAX: Final = 2 * 2**20
SECRET_BYTES_MAX: Final = 64 * 1024
SECRETS_BYTES_MAX: Final = 2**20
"""All of one job: Linux gives a program at most 2 MiB for its arguments and its environment together."""
CONFIG_CEILING: Final = "config"
CEILING_HINT: Final = "write 2.40 per GPU-hour, 19.20/h for the machine, or config for the ceiling of the config"
BUDGET_HINT: Final = "write +20 to add dollars, or 140 to set them"
MACHINE_LENGTH_MAX: Final = 1000
NUL_HINT: Final = "no environment variable can hold one; encode the value, for example with base64"
_COUNT_MAX: Final = 1_000_000
EVERY_S_MAX: Final = 366 * 86_400
_SPAN: Final = re.compile(r"(\d{1,7})-(\d{1,7})", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


async def read_json(request: Request, known: Collection[str]) -> Mapping[str, Any]:
    """Return the body as an object with no keys but these, all of its text valid Unicode."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES_MAX:
            raise BodyTooLong("the request is larger than 2 MiB", hint="a job file holds settings, not data")
    try:
        body = json.loads(bytes(raw))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as exc:
        raise Invalid("the request holds bytes that are not text") from exc
    except ValueError as exc:
        raise Invalid("the request is not JSON") from exc
    except RecursionError as exc:
        raise Invalid("the request is nested too deeply") from exc
    if not isinstance(body, dict):
        raise Invalid("the request is not a JSON object")
    for key in body:
        if key not in known:
            raise Invalid(f"the request holds the unknown key {key!r}")
    return body


def read_draft(body: Mapping[str, Any]) -> JobRequest:
    draft = body.get("draft")
    if not isinstance(draft, dict):
        raise Invalid("the request has no draft")
    unknown = set(draft) - {"data", "flags", "source", "base_dir"}
    if unknown:
        raise Invalid(f"the draft holds the unknown key {min(unknown)!r}")
    data, flags = draft.get("data", {}), draft.get("flags", {})
    source, base_dir = draft.get("source", ""), draft.get("base_dir", "")
    if not isinstance(data, dict) or not isinstance(flags, dict):
        raise Invalid("data and flags of a draft are objects")
    if not isinstance(source, str) or not isinstance(base_dir, str):
        raise Invalid("source and base_dir of a draft are text")
    return JobRequest(data=data, flags=flags, source=source, base_dir=base_dir)


def read_budget_change(body: Mapping[str, Any]) -> BudgetChange:
    """`+20` adds dollars to a budget, `=140`, `140` and a number set it."""
    value = body.get("budget")
    is_added = isinstance(value, str) and value.startswith("+")
    figure = value[1:] if isinstance(value, str) and value[:1] in {"+", "="} else value
    try:
        amount = parse_money(figure)
    except BadValue as exc:
        raise Invalid(f"the budget {exc}", hint=exc.hint or BUDGET_HINT) from exc
    if amount == 0:
        raise Invalid("the budget must be above 0", hint=BUDGET_HINT)
    return BudgetChange(amount=amount, is_added=is_added)


def read_ceiling(body: Mapping[str, Any]) -> PriceLimit | None:
    """Return a price as a job file states it in `max_price`; `None` for `config`, the ceiling of the config."""
    value = body.get("ceiling")
    if value == CONFIG_CEILING:
        return None
    try:
        return parse_price(value)
    except BadValue as exc:
        raise Invalid(f"the ceiling {exc}", hint=CEILING_HINT) from exc


def read_machine(body: Mapping[str, Any]) -> str:
    """Return a machine's id at its provider, its key, or `JOB-NUMBER`."""
    value = body.get("machine")
    if not isinstance(value, str) or not value or len(value) > MACHINE_LENGTH_MAX:
        raise Invalid("machine is the id or the key of a machine", hint="spotctl show JOB lists those of a job")
    return value


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return whether this is set; false where it is not given."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Invalid(f"{name} is true or false")
    return value


def read_host(body: Mapping[str, Any]) -> str:
    """Return a host as `HOST` or `PROVIDER/HOST`."""
    value = body.get("host")
    if not isinstance(value, str) or not value or len(value) > MACHINE_LENGTH_MAX:
        raise Invalid("host is the name of a host", hint="spotctl providers --hosts lists them")
    return value


def read_resume_from(body: Mapping[str, Any]) -> str:
    """`JOB` or `JOB:CHECKPOINT`, empty where nothing was given."""
    text = body.get("resume_from") or ""
    if not isinstance(text, str) or text.startswith(":") or text.endswith(":"):
        raise Invalid("resume_from is JOB or JOB:CHECKPOINT", hint="spotctl checkpoints JOB lists them")
    return text


def read_secrets(body: Mapping[str, Any]) -> dict[str, str]:
    """Return values by name. No message here ever holds a value."""
    secrets = body.get("secrets") or {}
    if not isinstance(secrets, dict) or not all(isinstance(value, str) for value in secrets.values()):
        raise Invalid("secrets are an object of texts")
    for name, value in secrets.items():
        if len(value.encode()) > SECRET_BYTES_MAX:
            raise Invalid(f"the secret {name} is larger than 64 KiB")
        if "\0" in value:
            raise Invalid(f"the secret {name} holds a NUL character", hint=NUL_HINT)
    if sum(len(value.encode()) for value in secrets.values()) > SECRETS_BYTES_MAX:
        raise Invalid("the secrets are larger than 1 MiB together", hint="a program takes no larger environment")
    return secrets


def read_sha256(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise Invalid("a code hash is 64 lower-case hexadecimal digits")
    return value


def without_unknown(request: Request, known: Collection[str]) -> None:
    """Require that every query parameter is known and given once."""
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"unknown parameter {name!r}")


def _count(request: Request, name: str, default: int | None, *, least: int = 0, most: int = _COUNT_MAX) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:12]) <= most:
        raise Invalid(f"the parameter {name} must be a whole number from {least} to {most}")
    return int(text)


def _instant(request: Request, name: str) -> datetime | None:
    text = request.query_params.get(name)
    try:
        return None if text is None else utc_instant(text)
    except (ValueError, OverflowError) as exc:
        raise Invalid(f"the parameter {name} must be an instant such as 2026-11-21T10:00:00Z") from exc


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "0")
    if text not in {"0", "1"}:
        raise Invalid(f"the parameter {name} must be 0 or 1")
    return text == "1"


def read_job_query(request: Request) -> JobQuery:
    without_unknown(request, ("state", "active", "limit", "array"))
    limit = _count(request, "limit", 1000, least=1)
    states = request.query_params.getlist("state")
    for state in states:
        if state not in set(JobState):
            raise Invalid(f"no job is ever in a state {state!r}", hint=f"one of {', '.join(JobState)}")
    return JobQuery(
        states=frozenset(states),
        active_only=_flag(request, "active"),
        limit=1000 if limit is None else limit,
        array=request.query_params.get("array", ""),
    )


def read_array(body: Mapping[str, Any]) -> str:
    """Return the indexes of an array; empty for one job."""
    text = body.get("array") or ""
    if not isinstance(text, str):
        raise Invalid("array is a text such as 0-15")
    return text


def read_retry(request: Request) -> tuple[bool, int]:
    """Return whether also a job that succeeded is meant, and from which index of an array on."""
    without_unknown(request, ("anyway", "start"))
    return _flag(request, "anyway"), _count(request, "start", 0, most=INDEX_MAX + 1) or 0


def read_cost_grouping(request: Request) -> CostGrouping | None:
    """Return by what costs are to be added up; `None` for receipts."""
    without_unknown(request, ("by",))
    by = request.query_params.get("by")
    if by is None:
        return None
    if by not in set(CostGrouping):
        raise Invalid(f"costs are not added up by {by!r}", hint=f"one of {', '.join(CostGrouping)}")
    return CostGrouping(by)


def read_names(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the checkpoints that are meant, at least one."""
    names = body.get("checkpoints")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise Invalid("checkpoints are a list of names, at least one")
    return tuple(dict.fromkeys(names))


def read_verification(request: Request) -> tuple[tuple[str, ...], bool]:
    """Return which checkpoints are to be verified, and whether all are."""
    without_unknown(request, ("checkpoint", "all"))
    names, every = tuple(dict.fromkeys(request.query_params.getlist("checkpoint"))), _flag(request, "all")
    if names and every:
        raise Invalid("the parameters checkpoint and all exclude each other")
    return names, every


def read_spans(request: Request) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return which manifest is meant, and which of its files, as first and last of each span of their list."""
    spans = []
    for text in request.query_params.get("files", "").split(","):
        found = _SPAN.fullmatch(text)
        if found is None or int(found[1]) > int(found[2]):
            raise Invalid("the parameter files is a list of spans such as 0-17,20-20")
        spans.append((int(found[1]), int(found[2])))
    return read_sha256(request.query_params.get("manifest")), tuple(spans)


def read_price_query(request: Request) -> PriceQuery:
    without_unknown(request, ("gpu", "provider", "job", "limit"))
    limit = _count(request, "limit", 50, least=1)
    return PriceQuery(
        gpu=request.query_params.get("gpu"),
        provider=request.query_params.get("provider"),
        job=request.query_params.get("job"),
        limit=50 if limit is None else limit,
    )


def read_history_query(request: Request) -> HistoryQuery:
    without_unknown(request, ("gpu", "provider", "market", "offer", "pool", "since", "until", "every_s"))
    market = request.query_params.get("market")
    if market is not None and market not in set(Market):
        raise Invalid(f"there is no market {market!r}", hint=f"one of {', '.join(Market)}")
    return HistoryQuery(
        gpu=request.query_params.get("gpu"),
        provider=request.query_params.get("provider"),
        market=market,
        offer=request.query_params.get("offer"),
        pool=request.query_params.get("pool"),
        since=_instant(request, "since"),
        until=_instant(request, "until"),
        every_s=_count(request, "every_s", None, least=60, most=EVERY_S_MAX),
    )


def read_log_query(request: Request) -> LogQuery:
    without_unknown(request, ("after", "tail", "attempt", "follow"))
    return LogQuery(
        after=request.query_params.get("after"),
        tail=_count(request, "tail", None),
        attempt=_count(request, "attempt", None, least=1),
        follow=_flag(request, "follow"),
    )


def read_event_query(request: Request) -> EventQuery:
    without_unknown(request, ("after", "since", "job", "limit", "follow"))
    after = request.query_params.get("after")
    if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise Invalid("the parameter after must be the id of an event")
    limit = _count(request, "limit", 1000)
    return EventQuery(
        after=None if after is None else int(after),
        since=_instant(request, "since"),
        job=request.query_params.get("job"),
        limit=1000 if limit is None else limit,
        follow=_flag(request, "follow"),
    )

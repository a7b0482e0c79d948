"""Plain, bounded values from whatever a provider's plugin returned.

Theory. A plugin is code of a third party that reads the answers of a fourth. What it returns is checked here, once,
and the rest of the daemon works with what is left: exact types, finite numbers within a sane range, aware instants,
short printable texts. An offer that is odd is refused with a reason, since a price that is not understood must not be
paid. A machine that is odd is kept as far as it can be named, since a row that is dropped is a machine that is
forgotten; one that cannot be named makes its listing incomplete, which proves no machine's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from spotd.daemon.market.plugin_fields import (
    ID_CHARS_MAX,
    NEWEST,
    PRICE_MAX,
    TEXT_CHARS_MAX,
    UNPRINTABLE,
    MalformedValue,
    bounded,
    identity,
    instant,
    measure_or_none,
    member,
    price,
    span_or_none,
    text,
    whole,
    whole_or_none,
)
from spotd.shell_address import fault_of
from spotd_providers.contract import values
from spotd_providers.contract.provider import ProviderTraits
from spotd_providers.kit.shapes import listed_reasons

OFFERS_MAX: Final = 20_000
"""Offers of one poll. The largest marketplace has shown a few thousand in both its markets."""
MACHINES_MAX: Final = 5_000
PAST_PRICES_MAX: Final = 200
CHARGES_MAX: Final = 100_000
CHECKS_MAX: Final = 100
REJECTED_MAX: Final = 2_000
BENCHMARKS_MAX: Final = 500
EXTRA_CHARS_MAX: Final = 16 * 1024
AMOUNT_MAX: Final = 10_000_000 * 1_000_000
GPUS_MAX: Final = 1_024
NODES_MAX: Final = 100_000
AHEAD_MAX: Final = timedelta(days=1)
"""How far the clock of a provider may be ahead of ours when it dates the past."""
NOTICE_AHEAD_MAX: Final = timedelta(days=60)

_CUDA: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}", re.ASCII)
T = TypeVar("T")


# --- single values ---------------------------------------------------------------------------------------------


# --- offers ----------------------------------------------------------------------------------------------------


def offer_page(
    value: Any, provider: values.ProviderName, *, now: datetime, known: Mapping[str, values.Offer] | None = None
) -> values.OfferPage:
    """Return the offers that can be used; each of the others is refused with its reason.

    Args:
        known: offers of an earlier page by their ids: a row that equals one is not checked again, and most do.

    Raises:
        Malformed: it is no page at all.
    """
    if not isinstance(value, values.OfferPage):
        raise MalformedValue(f"an answer about offers of the type {type(value).__name__}")
    rows, more = bounded(value.offers, OFFERS_MAX, what="offers")
    offers: dict[str, values.Offer] = {}
    refused: list[values.Rejected] = []
    for row in rows:
        try:
            before = (
                known.get(row.offer_id) if known and type(row) is values.Offer and type(row.offer_id) is str else None
            )
            offer = before if before is not None and before == row else _offer(row, provider)
        except MalformedValue as exc:
            refused.append(values.Rejected(offer_id=_name_of(row), reason=str(exc)))
            continue
        if offer.offer_id in offers:
            refused.append(values.Rejected(offer_id=offer.offer_id, reason="the same offer twice in one answer"))
            continue
        offers[offer.offer_id] = offer
    stated, _ = bounded(value.rejected, REJECTED_MAX, what="refused offers")
    refused.extend(
        values.Rejected(offer_id=text(one.offer_id, chars_max=ID_CHARS_MAX), reason=text(one.reason))
        for one in stated
        if isinstance(one, values.Rejected)
    )
    return values.OfferPage(
        offers=tuple(offers.values()),
        rejected=listed_reasons(refused),
        complete=value.complete is True and not more,
        whole=_whole_groups(value.whole),
        note=text(value.note),
        benchmarks=_benchmarks(value.benchmarks),
        at=instant(value.at) or now,
    )


def row_count(value: Any) -> int:
    """Return how many rows a page holds, as far as it says so."""
    if not isinstance(value, values.OfferPage):
        return 0
    lists: tuple[Any, ...] = (value.offers, value.rejected)
    return sum(len(rows) for rows in lists if isinstance(rows, tuple | list))


def _benchmarks(value: Any) -> tuple[values.Benchmark, ...]:
    """Return the results that can be used: no offer depends on them."""
    if not isinstance(value, tuple | list):
        return ()
    found = []
    for row in value[:BENCHMARKS_MAX]:
        score = measure_or_none(row.score, high=1e12) if isinstance(row, values.Benchmark) else None
        if score:
            test, gpu = text(row.test, chars_max=ID_CHARS_MAX), text(row.gpu, chars_max=ID_CHARS_MAX)
            found.append(values.Benchmark(test=test, gpu=gpu, score=score))
    return tuple(found)


def _whole_groups(value: Any) -> frozenset[tuple[str, int]]:
    rows, _ = bounded(value, 10_000, what="whole")
    for row in rows:
        if not (isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int):
            raise MalformedValue("whole: not pairs of a GPU and a count")
    return frozenset(rows)


def _name_of(row: Any) -> str:
    return text(row.offer_id, chars_max=ID_CHARS_MAX) if isinstance(row, values.Offer) else "unreadable"


def _offer(row: Any, provider: values.ProviderName) -> values.Offer:
    if not isinstance(row, values.Offer):
        raise MalformedValue(f"a row of the type {type(row).__name__}")
    if row.provider != provider:
        raise MalformedValue("provider: it is another provider's offer")
    identity(row.offer_id, "offer_id")
    identity(row.pool, "pool")
    if row.host_id is not None:
        identity(row.host_id, "host_id")
    whole(row.nodes, "nodes", low=1, high=1)
    whole(row.nodes_min, "nodes_min", low=1, high=NODES_MAX)
    if row.nodes_max is not None:
        whole(row.nodes_max, "nodes_max", low=row.nodes_min, high=NODES_MAX)
    identity(row.gpu, "gpu", chars_max=128)
    whole(
        row.gpu_count,
        "gpu_count",
        low=0 if row.gpu == values.NO_GPU else 1,
        high=0 if row.gpu == values.NO_GPU else GPUS_MAX,
    )
    price(row.gpu_price, "gpu_price")
    price(row.storage_price, "storage_price")
    price(row.storage_fixed, "storage_fixed")
    price(row.upload_price, "upload_price")
    price(row.download_price, "download_price")
    if row.disk_gb_max is not None:
        whole(row.disk_gb_max, "disk_gb_max", low=0, high=10**9)  # unknown would mean without a limit
    for name in ("pays_bid", "ends_itself"):
        if type(getattr(row, name)) is not bool:
            raise MalformedValue(f"{name}: neither true nor false")
    changes = {name: new for name, new in _mend(row).items() if new is not getattr(row, name)}
    if type(row) is not values.Offer:
        return values.Offer(**{one.name: changes.get(one.name, getattr(row, one.name)) for one in fields(values.Offer)})
    return replace(row, **changes) if changes else row


def _mend(row: values.Offer) -> dict[str, Any]:
    """Return the row with what no price depends on mended: an odd value of it is unknown."""
    market, interruption = member(values.Market, row.market), member(values.Interruption, row.interruption)
    if market is None or interruption is None:
        raise MalformedValue("market or interruption: not a known word")
    cuda = row.cuda_max
    return {
        "market": market,
        "interruption": interruption,
        "quotas": row.quotas if row.quotas == () else _quotas(row.quotas),
        "region": row.region if row.region == "" else text(row.region, chars_max=128),
        "extra": _extra(row.extra),
        "on_demand_price": whole_or_none(row.on_demand_price, low=0, high=PRICE_MAX),
        "gpu_vram_mb": whole_or_none(row.gpu_vram_mb, low=1, high=10**8),
        "cpus": measure_or_none(row.cpus, high=1e6),
        "memory_mb": whole_or_none(row.memory_mb, low=0, high=10**10),
        "cuda_max": cuda if isinstance(cuda, str) and _CUDA.fullmatch(cuda) else None,
        "reliability": measure_or_none(row.reliability, high=1.0),
        "upload_mbps": measure_or_none(row.upload_mbps, high=1e9),
        "download_mbps": measure_or_none(row.download_mbps, high=1e9),
        "duration_max": span_or_none(row.duration_max),
        "capacity_score": whole_or_none(row.capacity_score, low=1, high=values.CAPACITY_SCORE_MAX),
        "hazard_ppm": whole_or_none(row.hazard_ppm, low=0, high=10**9),
        "speed_score": measure_or_none(row.speed_score, high=1e12),
    }


def _quotas(value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or len(value) > 16:
        raise MalformedValue("quotas: not a short list")
    checked = tuple(identity(one, "quotas") for one in value)
    return value if type(value) is tuple else checked


def _extra(value: Any) -> Mapping[str, str]:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise MalformedValue("extra: not a mapping")
    size = 0
    for name, word in value.items():
        if type(name) is not str or type(word) is not str:
            raise MalformedValue("extra: something other than texts")
        size += len(name) + len(word)
        if size > EXTRA_CHARS_MAX:
            raise MalformedValue(f"extra: longer than {EXTRA_CHARS_MAX} characters")
    return value


# --- machines --------------------------------------------------------------------------------------------------

_MOST_ALIVE_FIRST: Final = (
    values.InstanceState.RUNNING,
    values.InstanceState.PENDING,
    values.InstanceState.UNKNOWN,
    values.InstanceState.PAUSED,
    values.InstanceState.ENDING,
    values.InstanceState.GONE,
)


def listing(value: Any, provider: values.ProviderName, *, now: datetime) -> values.Listing:
    """Return the machines that can be named. One that cannot makes the listing incomplete.

    Raises:
        Malformed: it is no listing at all.
    """
    if not isinstance(value, values.Listing):
        raise MalformedValue(f"an answer about machines of the type {type(value).__name__}")
    rows, more = bounded(value.instances, MACHINES_MAX, what="instances")
    machines, refused = _machines(rows, provider, now)
    if more:
        refused.append(values.Rejected(offer_id="", reason=f"more than {MACHINES_MAX} machines"))
    return values.Listing(
        instances=machines,
        complete=value.complete is True and not refused,
        at=instant(value.at) or now,
        rejected=tuple(refused[:REJECTED_MAX]),
    )


def found_machines(value: Any, provider: values.ProviderName, *, now: datetime) -> tuple[values.Instance, ...]:
    """Return the machines that carry a key.

    Raises:
        Malformed: one of them cannot be named, so it would be wrong to call it absent.
    """
    rows, more = bounded(value, MACHINES_MAX, what="the machines with a key")
    machines, refused = _machines(rows, provider, now)
    if refused or more:
        raise MalformedValue(refused[0].reason if refused else f"more than {MACHINES_MAX} machines")
    return machines


def _machines(
    rows: Iterable[Any], provider: values.ProviderName, now: datetime
) -> tuple[tuple[values.Instance, ...], list[values.Rejected]]:
    found: dict[values.InstanceRef, values.Instance] = {}
    torn: set[values.InstanceRef] = set()
    refused: list[values.Rejected] = []
    for row in rows:
        try:
            machine = instance(row, provider, now=now)
        except MalformedValue as exc:
            refused.append(values.Rejected(offer_id="", reason=str(exc)))
            continue
        before = found.get(machine.ref)
        if before is not None and before.key != machine.key:
            torn.add(machine.ref)
        elif before is None or _liveness(machine) < _liveness(before):
            found[machine.ref] = machine
    for ref in sorted(torn, key=lambda one: one.instance_id):
        # To end it for one key would end the machine of the other.
        refused.append(values.Rejected(offer_id=ref.instance_id, reason="one machine with two keys"))
        del found[ref]
    return tuple(found.values()), refused


def _liveness(machine: values.Instance) -> int:
    return _MOST_ALIVE_FIRST.index(machine.state)


def instance(row: Any, provider: values.ProviderName, *, now: datetime) -> values.Instance:
    """Return the machine of this row, what is odd about it unknown.

    Raises:
        Malformed: it does not state which machine it is, or whose.
    """
    if not isinstance(row, values.Instance):
        raise MalformedValue(f"a machine of the type {type(row).__name__}")
    price = whole_or_none(row.price, low=0, high=PRICE_MAX)
    floor = whole_or_none(row.bid_floor, low=0, high=PRICE_MAX)
    created, ended = instant(row.created_at), instant(row.ended_at)
    return values.Instance(
        ref=_ref(row.ref, provider),
        key=values.AttemptKey(identity(row.key, "key")),
        state=member(values.InstanceState, row.state) or values.InstanceState.UNKNOWN,
        market=member(values.Market, row.market),
        host_id=None if row.host_id is None else _host(row.host_id),
        price=None if price is None else values.MicroUsdPerHour(price),
        created_at=created if created is not None and created <= now + AHEAD_MAX else None,
        notice_at=None if row.notice_at is None else _notice(row.notice_at, now),
        loss=member(values.Loss, row.loss),
        detail=text(row.detail),
        bid_floor=None if floor is None else values.MicroUsdPerHour(floor),
        billing=member(values.Billing, row.billing) or values.Billing.UNKNOWN,
        ended_at=ended if ended is not None and ended <= now + AHEAD_MAX else None,
        past_prices=_past_prices(row.past_prices, now),
    )


def _past_prices(value: Any, now: datetime) -> tuple[tuple[datetime, values.MicroUsdPerHour], ...]:
    """Return the newest of these pairs that can be read, oldest first; nothing of what is to come."""
    found: dict[datetime, values.MicroUsdPerHour] = {}
    for pair in value[-PAST_PRICES_MAX:] if isinstance(value, tuple) else ():
        match pair:
            case (stated_at, stated):
                at, price = instant(stated_at), whole_or_none(stated, low=0, high=PRICE_MAX)
                if at is not None and at <= now and price is not None:
                    found[at] = values.MicroUsdPerHour(price)
            case _:
                pass
    return tuple(sorted(found.items()))


def _ref(value: Any, provider: values.ProviderName) -> values.InstanceRef:
    if not isinstance(value, values.InstanceRef):
        raise MalformedValue("ref: not a reference to a machine")
    if value.provider != provider:
        raise MalformedValue("ref: it names a machine of another provider")
    scope = value.scope if value.scope == "" else identity(value.scope, "ref.scope")
    return values.InstanceRef(
        provider=provider, instance_id=values.InstanceId(identity(value.instance_id, "ref.instance_id")), scope=scope
    )


def _host(value: Any) -> values.HostId | None:
    try:
        return values.HostId(identity(value, "host_id"))
    except MalformedValue:
        return None


def _notice(value: Any, now: datetime) -> datetime | None:
    """When the machine will be taken. A notice without a legible time is one all the same: it counts from now."""
    if not isinstance(value, datetime):
        return now
    at = instant(value)
    if at is None:
        far = value.replace(tzinfo=UTC) > NEWEST
        return None if far else now
    return None if at - now > NOTICE_AHEAD_MAX else max(at, now - AHEAD_MAX)


# --- the account -----------------------------------------------------------------------------------------------


def balance(value: Any) -> values.Balance:
    """Return what is left in the account.

    Raises:
        Malformed: it is no amount.
    """
    if not isinstance(value, values.Balance):
        raise MalformedValue(f"a balance of the type {type(value).__name__}")
    available = whole(value.available, "available", low=-AMOUNT_MAX, high=AMOUNT_MAX)
    burn = whole_or_none(value.burn, low=0, high=PRICE_MAX)
    return values.Balance(
        available=values.MicroUsd(available), burn=None if burn is None else values.MicroUsdPerHour(burn)
    )


def charges(value: Any) -> tuple[tuple[values.ProviderCharge, ...], int]:
    """Return the charges that can be used, and how many rows cannot.

    Raises:
        Malformed: it is no list.
    """
    rows, _ = bounded(value, CHARGES_MAX, what="charges")
    good: list[values.ProviderCharge] = []
    for row in rows:
        try:
            good.append(_charge(row))
        except MalformedValue:
            continue
    return tuple(good), len(rows) - len(good)


def _charge(row: Any) -> values.ProviderCharge:
    if not isinstance(row, values.ProviderCharge):
        raise MalformedValue(f"a charge of the type {type(row).__name__}")
    start, end = instant(row.start), instant(row.end)
    if start is None or end is None or end < start:
        raise MalformedValue("start, end: not a span of time")
    return values.ProviderCharge(
        key=None if row.key is None else values.AttemptKey(identity(row.key, "key")),
        instance_id=values.InstanceId(identity(row.instance_id, "instance_id")),
        start=start,
        end=end,
        amount=values.MicroUsd(whole(row.amount, "amount", low=-AMOUNT_MAX, high=AMOUNT_MAX)),
        kind=identity(row.kind, "kind", chars_max=64),
        currency=identity(row.currency, "currency", chars_max=8).upper(),
    )


def check_lines(value: Any) -> tuple[values.CheckLine, ...]:
    """Return the findings of a check.

    Raises:
        Malformed: it is no list.
    """
    rows, _ = bounded(value, CHECKS_MAX, what="check lines")
    return tuple(
        values.CheckLine(
            name=text(row.name) or "check", ok=row.ok is True, detail=text(row.detail), hint=text(row.hint)
        )
        for row in rows
        if isinstance(row, values.CheckLine)
    )


def traits(value: Any) -> ProviderTraits:
    """Return the facts about a provider that the daemon's own rules depend on.

    Raises:
        Malformed: one of them is none; the provider cannot be used then.
    """
    if not isinstance(value, ProviderTraits):
        raise MalformedValue(f"traits of the type {type(value).__name__}")
    whole(value.start_script_bytes_max, "start_script_bytes_max", low=1, high=10**9)
    for name, low, high in _TRAIT_SPANS:
        span = getattr(value, name)
        if not isinstance(span, timedelta) or not low <= span <= high:
            raise MalformedValue(f"{name}: not a span of time from {low} to {high}")
    for name in ("default_fee_multiplier", "ends_itself_by", "ends_itself_at", "notice_imds", "no_launches"):
        word = getattr(value, name)
        if not isinstance(word, str) or len(word) > TEXT_CHARS_MAX or UNPRINTABLE.search(word):
            raise MalformedValue(f"{name}: not a short text")
    images: Any = value.private_images
    if not isinstance(images, values.Capability) or type(images.available) is not bool:
        raise MalformedValue("private_images: not a capability")
    reason: Any = images.reason
    if not isinstance(reason, str) or len(reason) > TEXT_CHARS_MAX or UNPRINTABLE.search(reason):
        raise MalformedValue("private_images: its reason is not a short text")
    for one in fields(ProviderTraits):
        if isinstance(one.default, bool) and type(getattr(value, one.name)) is not bool:
            raise MalformedValue(f"{one.name}: neither true nor false")
    return value


_NONE: Final = timedelta(0)
_DAY: Final = timedelta(days=1)
_TRAIT_SPANS: Final = (
    ("reconcile_window", _NONE, _DAY),
    ("provision_timeout", timedelta(seconds=1), _DAY),
    ("quote_ttl", timedelta(seconds=1), _DAY),
    ("offers_every_min", _NONE, _DAY),
    ("machines_every_min", _NONE, timedelta(hours=1)),
    ("free_if_taken_within", _NONE, _DAY),
    ("bills_at_least", _NONE, _DAY),
    ("bills_by", _NONE, _DAY),
    ("bill_open_for", _NONE, 3 * _DAY),
    ("causes_within", _NONE, timedelta(hours=1)),
)


def shell_address(value: Any) -> values.ShellAddress:
    """Return an address that may be given to ssh.

    Raises:
        Malformed: it is none.
    """
    if not isinstance(value, values.ShellAddress):
        raise MalformedValue("a shell: not an address")
    words = value.command
    if not isinstance(words, tuple):
        raise MalformedValue("a shell: its command is no list of words")
    if fault := fault_of(value.host, value.port, value.user, words):
        raise MalformedValue(f"a shell: {fault}")
    no_ports = text(value.no_ports) if value.no_ports else ""
    return values.ShellAddress(host=value.host, port=value.port, user=value.user, command=words, no_ports=no_ports)


def lines(value: Any, *, count: int) -> tuple[str, ...]:
    """Lines of a log.

    Raises:
        Malformed: it is no list.
    """
    rows, _ = bounded(value, max(0, min(count, 10_000)), what="a log")
    return tuple(text(row, chars_max=4096) for row in rows if isinstance(row, str))

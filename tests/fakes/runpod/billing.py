"""What was billed per pod and hour, from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour, cost
from spotd_providers.local.hosts import read_ledger, segments
from tests.fakes.runpod.cloud import RunpodCloud
from tests.fakes.runpod.clusters import NETWORK_PRICE
from tests.fakes.runpod.refusal import Refusal

_HOUR: Final = timedelta(hours=1)


def billed(cloud: RunpodCloud, params: Mapping[str, str], *, of_clusters: bool = False) -> dict[str, Any]:
    """The answer of `GET /v2/billing/pods`, or of `/v2/billing/clusters`, where the network is billed apart.

    Raises:
        Refusal: a query the service refuses.
    """
    if params.get("bucketSize", "day") != "hour":
        raise Refusal(422, "this fake keeps hourly books only")
    now = cloud.clock.now()
    since = _instant(params.get("startTime")) or now - timedelta(days=30)
    until = min(_instant(params.get("endTime")) or now, now)
    which = "clusterId" if of_clusters else "podId"
    wanted = params.get(which)
    totals: defaultdict[tuple[datetime, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for span in segments(read_ledger(cloud.ledger_path)):
        member = cloud.pods[span.machine_id].cluster
        machine = span.machine_id if member is None else str(member["id"])
        if wanted not in (None, machine) or (member is not None) != of_clusters:
            continue
        network = NETWORK_PRICE if of_clusters else MicroUsdPerHour(0)
        for bucket, start, end in _hours(span.start, min(span.end or now, now)):
            if bucket + _HOUR > since and bucket < until:
                totals[bucket, machine][0] += cost(span.compute, end - start) / MICRO
                totals[bucket, machine][1] += cost(MicroUsdPerHour(span.storage - network), end - start) / MICRO
                totals[bucket, machine][2] += cost(network, end - start) / MICRO
    records = [
        {
            "startTime": _zulu(bucket),
            "endTime": _zulu(bucket + _HOUR),
            which: machine,
            "gpuAmount": gpu,
            **({"networkingAmount": network} if of_clusters else {"cpuAmount": 0.0}),
            "diskAmount": disk,
            "totalAmount": gpu + disk + network,
        }
        for (bucket, machine), (gpu, disk, network) in sorted(totals.items())
    ]
    return {
        "records": records,
        "metadata": {
            "query": {"startTime": _zulu(since), "endTime": _zulu(until), "bucketSize": "hour", which: wanted},
            "recordCount": len(records),
            f"unique{'Cluster' if of_clusters else 'Pod'}Count": len({machine for _, machine in totals}),
            "totals": {"totalAmount": sum(sum(parts) for parts in totals.values())},
        },
    }


def _hours(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime, datetime]]:
    """Each hour that a span touches, with the part of the span in it."""
    bucket = start.replace(minute=0, second=0, microsecond=0)
    while bucket < end:
        yield bucket, max(start, bucket), min(end, bucket + _HOUR)
        bucket += _HOUR


def _instant(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise Refusal(422, "Request validation failed.") from None


def _zulu(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")

"""The instance metadata service, version 2: a session token first, and 404 for what is not planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from starlette.responses import Response

from tests.fakes.aws.records import FakeInstance

TTL_S_MAX: Final = 21_600
_TTL: Final = "x-aws-ec2-metadata-token-ttl-seconds"
_TOKEN: Final = "x-aws-ec2-metadata-token"


def metadata(
    instance: FakeInstance,
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    as_wall: Callable[[datetime], datetime],
) -> Response:
    """The answer of this instance's own metadata service.

    `as_wall` gives the wall clock's instant of one of the cloud's: the only time that the machine itself knows.
    """
    token = f"token-of-{instance.instance_id}"
    if path == "latest/api/token":
        ttl = headers.get(_TTL, "")
        good = method == "PUT" and ttl.isdecimal() and 1 <= int(ttl) <= TTL_S_MAX
        return Response(token if good else "", status_code=200 if good else 400, media_type="text/plain")
    if method != "GET" or headers.get(_TOKEN) != token:
        return Response(status_code=401)
    content = _known(instance, as_wall).get(path)
    if content is None:
        return Response(status_code=404)
    return Response(content, media_type="text/plain")


def _known(instance: FakeInstance, as_wall: Callable[[datetime], datetime]) -> dict[str, str]:
    found = {
        "latest/meta-data/instance-id": instance.instance_id,
        "latest/meta-data/ami-launch-index": str(instance.launch_index),
        "latest/meta-data/local-ipv4": instance.address,
        "latest/meta-data/instance-life-cycle": "spot" if instance.spot else "on-demand",
        "latest/meta-data/placement/availability-zone": instance.zone.name,
        "latest/meta-data/placement/availability-zone-id": instance.zone.zone_id,
    }
    if instance.action_at is not None:
        at = as_wall(instance.action_at).strftime("%Y-%m-%dT%H:%M:%SZ")
        found["latest/meta-data/spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        found["latest/meta-data/spot/termination-time"] = at
    if instance.rebalance_at is not None:
        at = as_wall(instance.rebalance_at).strftime("%Y-%m-%dT%H:%M:%SZ")
        found["latest/meta-data/events/recommendations/rebalance"] = json.dumps({"noticeTime": at})
    return found

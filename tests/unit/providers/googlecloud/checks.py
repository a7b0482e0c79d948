"""What the fake Google Cloud checks of a request: the body of an insert, and the filter of a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request

from tests.fakes.rest import RestRefusal
from tests.unit.providers.googlecloud.catalog import (
    IMAGE_PROJECT,
    IMAGES,
    METADATA_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    SPOT_ONLY,
    Kind,
)
from tests.unit.providers.googlecloud.cloud import GoogleCloud, missing

_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL: Final = re.compile(r"[a-z0-9_-]{0,63}")
_GPU_COUNTS: Final = (1, 2, 4, 8)
_TERM: Final = re.compile(
    r"""\(?\s*([A-Za-z_.\-]+)\s*(=|!=|:|\beq\b|\bne\b)\s*(?:"([^"]*)"|'([^']*)'|([^\s()"']+))\s*\)?"""
)
Row = dict[str, Any]


def gpus_attached(cloud: GoogleCloud, zone: str, body: Row) -> dict[str, int]:
    """The GPUs that an insert attaches.

    Raises:
        RestRefusal: it asks for what is not to be had.
    """
    name, schedule = body.get("name"), body.get("scheduling") or {}
    kind = cloud.kinds.get(str(body.get("machineType")).rpartition("/")[2])
    if kind is None or all(place != zone for place, _ in kind.free):
        raise missing(str(body.get("machineType")))
    spot, gpus = schedule.get("provisioningModel") == "SPOT", {}
    for row in body.get("guestAccelerators") or []:
        gpus[str(row.get("acceleratorType")).rpartition("/")[2]] = row.get("acceleratorCount")
    labels, items = body.get("labels") or {}, (body.get("metadata") or {}).get("items") or []
    texts = [str(item.get("value", "")).encode() for item in items]
    disks = body.get("disks") or []
    notice = (schedule.get("preemptionNoticeDuration") or {}).get("seconds", 0)
    last = schedule.get("maxRunDuration") is not None
    faults = {
        "name": isinstance(name, str) and _NAME.fullmatch(name),
        "labels": len(labels) <= 64 and all(_LABEL.fullmatch(k) and _LABEL.fullmatch(v) for k, v in labels.items()),
        "scheduling.provisioningModel": schedule.get("provisioningModel", "STANDARD") in ("SPOT", "STANDARD"),
        "scheduling.automaticRestart": not (spot and schedule.get("automaticRestart", False)),
        "scheduling.onHostMaintenance": not (kind.gpus or gpus or spot)
        or schedule.get("onHostMaintenance") == "TERMINATE",
        "scheduling.instanceTerminationAction": schedule.get("instanceTerminationAction")
        in ((None, "STOP", "DELETE") if spot or last else (None,)),
        "scheduling.preemptionNoticeDuration": int(notice) <= 120 and (spot or not notice),
        "guestAccelerators": all(
            gpu in cloud.attached and number in _GPU_COUNTS and kind.family == "n1" for gpu, number in gpus.items()
        ),
        "metadata.items": all(len(one) <= SCRIPT_BYTES_MAX for one in texts)
        and sum(map(len, texts)) <= METADATA_BYTES_MAX,
        "disks": bool(disks) and bool(disks[0].get("boot")) and all(is_disk(one, kind) for one in disks),
        "networkInterfaces": bool(body.get("networkInterfaces")),
    }
    for field, fits in faults.items():
        if not fits:
            raise RestRefusal(400, f"Invalid value for field 'resource.{field}'", code="invalid")
    if kind.name.startswith(SPOT_ONLY) and not spot:
        raise RestRefusal(400, f"Machine type {kind.name} is not available on demand", code="badRequest")
    if body.get("serviceAccounts"):
        text = "The user does not have access to service account. Ask for iam.serviceAccounts.actAs"
        raise RestRefusal(400, text, code="SERVICE_ACCOUNT_ACCESS_DENIED")
    return {gpu: int(number) for gpu, number in gpus.items()}


def is_disk(wish: Row, kind: Kind) -> bool:
    params = wish.get("initializeParams") or {}
    image, disk = str(params.get("sourceImage")), str(params.get("diskType", "pd-balanced")).rpartition("/")[2]
    known = {f"global/images/family/{family}" for family in IMAGES} | {
        f"global/images/{one}" for one in IMAGES.values()
    }
    size = str(params.get("diskSizeGb", "50"))
    if kind.family == "a4" and disk != "hyperdisk-balanced":
        return False
    is_image = image.partition(f"projects/{IMAGE_PROJECT}/")[2] in known
    return (
        is_image
        and disk in ("pd-balanced", "pd-ssd", "hyperdisk-balanced")
        and size.isdigit()
        and 10 <= int(size) <= 65_536
    )


def filtered(request: Request, rows: Sequence[Any]) -> list[Any]:
    """The rows that pass the filter: terms of a field, joined by AND; `eq` and `ne` take a pattern, `=` a text."""
    text = request.query_params.get("filter", "")
    tests = []
    for term in re.split(r"\s+AND\s+|(?<=\))\s*(?=\()", text) if text else []:
        read = _TERM.fullmatch(term.strip())
        if read is None:
            raise RestRefusal(
                400, f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.", code="invalid"
            )
        value = next((one for one in read.groups()[2:] if one is not None), "")
        tests.append((read[1], read[2], value))
    return [row for row in rows if all(_passes(row, *test) for test in tests)]


def _passes(row: Any, field: str, operator: str, value: str) -> bool:
    found = row
    for part in field.split(".", 1):
        found = found.get(part) if isinstance(found, dict) else None
    said = "" if found is None else str(found)
    match operator:
        case "eq" | "ne":
            is_match = re.fullmatch(value, said) is not None
        case ":":
            is_match = found is not None if value == "*" else value in said
        case _:
            is_match = said == value
    return is_match is (operator not in ("ne", "!="))

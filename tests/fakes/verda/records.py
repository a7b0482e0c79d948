"""What the fake Verda sells, how it refuses, and its knobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from tests.fakes.rest import RestQuirks, RestRefusal, is_count, is_text

LOCATIONS: Final = ("FIN-01", "FIN-02", "FIN-03", "ICE-01")
JUPYTER_TOKEN: Final = "fake-verda-jupyter-token-77aa"
"""Part of every instance's row; a secret that no adapter may keep."""
OLD_IMAGES: Final = ("ubuntu-22.04-cuda-12.4-docker", "ubuntu-22.04-cuda-12.4")
IMAGES: Final = (*OLD_IMAGES, "ubuntu-24.04-cuda-12.8-open", "ubuntu-24.04-cuda-12.8-open-docker")
IMAGE_IDS: Final = {f"2404f580-1300-4111-82b3-f199fb9b70{number:02d}": name for number, name in enumerate(IMAGES)}
TRASH_KEEPS: Final = timedelta(hours=96)
YOUNG: Final = ("ordered", "provisioning", "validating")
STATUSES: Final = {
    "invalid_request": 400,
    "unauthorized_request": 401,
    "insufficient_funds": 402,
    "forbidden_action": 403,
    "not_found": 404,
    "server_error": 500,
    "service_unavailable": 503,
}


def refusal(code: str, message: str) -> RestRefusal:
    """A refusal with the HTTP status that goes with its code here; the reference gives no statuses."""
    return RestRefusal(STATUSES[code], message, code=code)


@dataclass(slots=True, kw_only=True)
class VerdaQuirks(RestQuirks):
    """The knobs of this fake; [U] marks a fact that is not certain, and has both behaviours.

    Attributes:
        token_lives: of an access token, and what `expires_in` says unless `expires_in_says`.
        refresh_refused: HTTP status for a refresh token that is void (400 or 401).
        one_token: a new access token makes the ones before void, and a refresh token works once [U].
        open_catalogue: `/instance-types` needs no token [U].
        prices: texts, numbers, or one by one in turn.
        currency: of prices where none was asked for [U]; `any_currency`: of prices whatever was asked for.
        balance_currency: of the balance.
        spot_flag: the parameter that the server reads [U]: `isSpot`, `is_spot`, either, or none.
        older_volume_prices: `monthly_per_gb` instead of `price_per_month_per_gb`.
        spot_decided_by: the field that makes an instance a spot one [U]; `nothing` sells on demand at its price.
        default_pricing: of a create that names none [U]. `script_bytes_max` of a start script [U].
        needs_ssh_key: an empty list of keys is refused [U]. `takes_tags`: else they are unknown; `echoes_tags`.
        os_volume_gb_min: [U].
        quoted_id, create_status: how a create is answered.
        capacity: the refusal of a create for which there is no machine: it has no code of its own.
        script_read_at: when the start script is fetched [U]: one that was deleted before its boot is not run.
        bills_from: the order, or the first moment of `running` [U]; `slot` is what is charged ahead [U].
        undeletable: statuses in which a delete is refused [U].
        results: answers of actions carry a result per id for several ids (`bulk`), always, or never [U].
        unnamed_volumes: what becomes of volumes that a delete does not name [U]; `trash_bills` [U].
        volume_lag: so long after the end of its instance a volume is still attached to it.
        preempted_shows: what a spot instance becomes that is taken away [U].
        offline_bills: an instance that was shut down is billed on [U].
        stops_at_zero: an empty balance shuts instances down and, a day later, discontinues them [U].
    """

    slot: timedelta = timedelta(minutes=10)
    token_lives: timedelta = timedelta(minutes=10)
    refresh_lives: timedelta = timedelta(hours=1)
    expires_in_says: float | None = None
    refresh_refused: int = 401
    one_token: bool = False
    open_catalogue: bool = True
    prices: Literal["text", "number", "mixed"] = "text"
    currency: str = "eur"
    any_currency: str | None = None
    balance_currency: str = "usd"
    spot_flag: Literal["isSpot", "is_spot", "either", "none"] = "either"
    older_volume_prices: bool = False
    spot_decided_by: Literal["is_spot", "contract", "nothing"] = "is_spot"
    default_pricing: str = "FIXED_PRICE"
    script_bytes_max: int | None = None
    needs_ssh_key: bool = False
    takes_tags: bool = True
    echoes_tags: bool = True
    os_volume_gb_min: int = 1
    quoted_id: bool = False
    create_status: int = 202
    capacity: RestRefusal = field(
        default_factory=lambda: refusal("invalid_request", "Instance type is not available in this location")
    )
    script_read_at: Literal["order", "boot"] = "boot"
    bills_from: Literal["order", "running"] = "order"
    undeletable: frozenset[str] = frozenset(YOUNG)
    results: Literal["bulk", "always", "never"] = "bulk"
    unnamed_volumes: Literal["detached", "trash"] = "detached"
    trash_bills: bool = False
    volume_lag: timedelta = timedelta(0)
    preempted_shows: Literal["discontinued", "offline", "nothing"] = "discontinued"
    offline_bills: bool = True
    stops_at_zero: bool = False


@dataclass(slots=True, kw_only=True)
class VerdaType:
    """An instance type: its prices in $/h for the whole instance, and how many each location has for each market."""

    name: str
    gpu: str
    gpus: int
    price: float
    spot: float
    memory_gb: int = 80
    images: tuple[str, ...] = IMAGES
    free: dict[tuple[str, bool], int] = field(default_factory=lambda: {("FIN-03", True): 3, ("FIN-01", False): 3})

    @property
    def dynamic(self) -> float:
        return round(self.price * 0.6, 4)


def some_types() -> tuple[VerdaType, ...]:
    """A small market: one GPU and eight, both spellings, an old GPU, one unheard of, two without a GPU."""
    return (
        VerdaType(name="1H100.80S.30V", gpu="1x H100 SXM5 80GB", gpus=1, price=2.19, spot=0.75),
        VerdaType(name="8H100.80S.176V", gpu="8x H100 SXM5 80GB", gpus=8, price=17.52, spot=6.0, memory_gb=640),
        VerdaType(name="1RTX6000ADA.10V", gpu="1x RTX6000 Ada 48GB", gpus=1, price=0.83, spot=0.29, memory_gb=48),
        VerdaType(name="2RTX6000ADA.20V", gpu="2x RTX 6000 Ada 48GB", gpus=2, price=1.66, spot=0.58, memory_gb=96),
        VerdaType(
            name="1V100.6V", gpu="1x Tesla V100 16GB", gpus=1, price=0.14, spot=0.05, memory_gb=16, images=OLD_IMAGES,
            free={("FIN-01", True): 2, ("FIN-01", False): 2},
        ),
        VerdaType(name="1B300.30V", gpu="1x B300 SXM6 268GB", gpus=1, price=4.95, spot=1.7, memory_gb=268, free={}),
        VerdaType(name="1AMD7900XTX.10V", gpu="1x AMD 7900XTX", gpus=1, price=0.4, spot=0.2, memory_gb=24),
        VerdaType(name="CPU.4V.16G", gpu="", gpus=0, price=0.04, spot=0.02, memory_gb=0),
        VerdaType(name="CPU.8V.32G.NULL", gpu="", gpus=0, price=0.08, spot=0.04, memory_gb=0),
    )  # fmt: skip


def texts(value: Any) -> bool:
    return isinstance(value, list) and all(is_text(one) for one in value)


def _disk(value: Any) -> bool:
    wishes = (None, "keep_detached", "move_to_trash", "delete_permanently")
    return (
        isinstance(value, dict)
        and is_text(value.get("name"))
        and is_count(value.get("size"), 1)
        and value.get("on_spot_discontinue") in wishes
    )


def _tags(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 10
        and all(isinstance(one, dict) and is_text(one.get("key"), 63) for one in value)
        and all(isinstance(one.get("value"), str) and len(one["value"]) <= 127 for one in value)
    )


_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,58}[A-Za-z0-9])?")
REQUIRED: Final = ("instance_type", "image", "hostname", "description")
CREATE: Final[Mapping[str, Callable[[Any], bool]]] = {
    "instance_type": is_text,
    "image": is_text,
    "hostname": lambda value: isinstance(value, str) and _HOSTNAME.fullmatch(value) is not None,
    "description": is_text,
    "location_code": lambda value: value in LOCATIONS,
    "is_spot": lambda value: isinstance(value, bool),
    "contract": lambda value: value in ("LONG_TERM", "PAY_AS_YOU_GO", "SPOT"),
    "pricing": lambda value: value in ("DYNAMIC_PRICE", "FIXED_PRICE"),
    "ssh_key_ids": texts,
    "startup_script_id": is_text,
    "os_volume": _disk,
    "volumes": lambda value: isinstance(value, list) and all(map(_disk, value)),
    "existing_volumes": texts,
    "coupon": is_text,
    "tags": _tags,
}

"""What a cluster is asked and says: settings, refusals, quantities, times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from spotd_providers.contract.gpus import standard_name
from spotd_providers.contract.values import NO_GPU, Market, ProviderName
from spotd_providers.kit.boundary import AdapterSettings, Span, safe_base_url
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords
from spotd_providers.kit.shapes import parse_instant

PROVIDER: Final = ProviderName("kubernetes")
WHO: Final = "Kubernetes"
IN_CLUSTER: Final = "in-cluster"
EXAMPLE_URL: Final = "https://203.0.113.7:6443"
LABEL_INSTALL: Final = "spotd.dev/install"
KEY: Final = "spotd.dev/key"
"""An annotation: a label holds 63 characters, one less than a key may have."""
PRICE: Final = "spotd.dev/price"
"""Micro-dollars per hour of the machine, as agreed at its launch: no cluster states a price."""
MARKET: Final = "spotd.dev/market"
NAME_CHARS_MAX: Final = 63

_Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,251}[A-Za-z0-9])?$")]
_Value = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
_Span = Annotated[Span, Field(ge=timedelta(seconds=10), le=timedelta(days=1))]
_Usd = Annotated[Decimal, Field(ge=0, le=10_000, allow_inf_nan=False)]


class Toleration(AdapterSettings):
    """A taint that jobs are allowed to run behind."""

    key: _Label
    value: _Value | None = None
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"] | None = None


class GpuPrice(AdapterSettings):
    """What an hour of one GPU counts as; of `CPU`, an hour of one processor."""

    gpu: str = Field(min_length=1, max_length=64)
    price: _Usd
    market: Literal["spot", "on-demand"] | None = None

    @field_validator("gpu")
    @classmethod
    def _one_spelling(cls, value: str) -> str:
        return NO_GPU if value.upper() == NO_GPU else standard_name(value)


class NodePool(AdapterSettings):
    """A kind of node that the cluster makes when it is asked for, or that cannot be listed."""

    name: _Name
    gpu: str = Field(default=NO_GPU, min_length=1, max_length=64)
    count: int = Field(default=0, ge=0, le=64)
    resource: _Label = "nvidia.com/gpu"
    price: _Usd
    market: Literal["spot", "on-demand"] = "on-demand"
    node_selector: dict[_Label, _Value] = Field(default_factory=dict, max_length=16)
    cpus: float = Field(gt=0, le=1024, allow_inf_nan=False)
    memory_gb: float = Field(gt=0, le=65_536, allow_inf_nan=False)
    vram_gb: int | None = Field(default=None, gt=0, le=1024)
    disk_gb: int | None = Field(default=None, gt=0, le=1_000_000)
    region: str = Field(default="", max_length=64)


class KubernetesSettings(AdapterSettings):
    """The cluster, the namespace and what its GPUs count as, under `[providers.kubernetes]`."""

    kubeconfig: str = Field(
        default="~/.kube/config",
        min_length=1,
        max_length=4096,
        description='The file that leads into the cluster, or "in-cluster" for the service account of its pod.',
    )
    context: str | None = Field(
        default=None, max_length=253, description="Context in that file; its current one if unset."
    )
    base_url: str | None = Field(
        default=None, description="Where the API server answers, with a token in api_key, in place of a kubeconfig."
    )
    authority: str | None = Field(
        default=None,
        max_length=4096,
        description="File with the certificate of base_url's authority, if it has its own.",
    )
    namespace: _Name = Field(default="spotd", description="The namespace in which jobs run; it must exist.")
    prices: tuple[GpuPrice, ...] = Field(
        default=(),
        max_length=256,
        description='What GPUs of nodes count as, $ per GPU-hour: [{ gpu = "H100", price = 1.20, market = "spot" }].',
    )
    pools: tuple[NodePool, ...] = Field(
        default=(),
        max_length=256,
        description="Nodes that an autoscaler makes: name, gpu, count, price per hour, node_selector, cpus, memory_gb.",
    )
    node_selector: dict[_Label, _Value] = Field(
        default_factory=dict, max_length=16, description="Labels that a node must have to be offered."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=32, description="Taints beside those of GPUs and of spot nodes."
    )
    queue: _Name | None = Field(default=None, description="Local queue of Kueue, where the cluster runs it.")
    priority_class: _Name | None = Field(default=None, description="Priority class of the pods.")
    runtime_class: _Name | None = Field(default=None, description='Runtime class of the pods, say "nvidia".')
    service_account: _Name | None = Field(default=None, description="Service account of the pods; no token is mounted.")
    schedule_within: _Span = Field(
        default=timedelta(minutes=10), description="How long a pod may wait for a node before the job goes elsewhere."
    )
    grace: _Span = Field(
        default=timedelta(minutes=2),
        description="Time between the signal of an eviction and the end, where the node has it to give.",
    )

    @field_validator("base_url")
    @classmethod
    def _keeps_the_token_safe(cls, value: str | None) -> str | None:
        return None if value is None else safe_base_url(value, example=EXAMPLE_URL)


# Refusals: an object of kind Status. "Forbidden" is a word of three: rights, a quota, a policy of the cluster.


_RIGHTS: Final = re.compile(r'\bcannot \w+ resource\b|User "[^"]*" cannot')


def problem_of(body: Any) -> RefusalWords | None:
    """Return the words of a `Status`; the three meanings of Forbidden get a word each.

    A namespace that is being deleted is like a right that is missing: no job is at fault.
    """
    if not isinstance(body, dict) or body.get("kind") != "Status" or not isinstance(body.get("reason"), str | None):
        return None
    code, text = body.get("reason") or "", body.get("message")
    text = text if isinstance(text, str) else ""
    if code == "Forbidden":
        if "exceeded quota" in text:
            code = "Forbidden/quota"
        elif not _RIGHTS.search(text) and "it is being terminated" not in text:
            code = "Forbidden/policy"
    return RefusalWords(code=code, text=text)


TAKEN: Final = "AlreadyExists"
DIALECT: Final = Dialect(
    who=WHO,
    problem_of=problem_of,
    # The other words mean what their statuses do.
    codes={
        "Forbidden/quota": Meaning.QUOTA,
        "Forbidden/policy": Meaning.REJECTED,
        # The next page of a list that is too old: nothing is known of the rest.
        "Expired": Meaning.REJECTED,
        "Gone": Meaning.REJECTED,
        # Of a deletion with a condition: the object is another one by now.
        "Conflict": Meaning.ABSENT,
    },
    penalty=timedelta(seconds=5),
)


# Values that any author of an object in the cluster can write.


_QUANTITY: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(?:(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)|[eE]([0-9]{1,2}))?")
_UNITS: Final = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTP", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTP", 1)},
}
QUANTITY_MAX: Final = 1e18


def quantity(raw: Any) -> float:
    """Return a quantity such as `3920m`, `131900Mi` or `8`; zero for what is none, or makes no sense."""
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return 0.0
    said = _QUANTITY.fullmatch(str(raw).strip())
    if said is None:
        return 0.0
    value = Decimal(said[1]) * (_UNITS[said[2]] if said[2] else Decimal(10) ** int(said[3] or 0))
    return float(value) if value <= QUANTITY_MAX else 0.0


def instant(raw: Any) -> datetime | None:
    """Return an instant as the API writes it; `None` for what is none."""
    try:
        return parse_instant(raw).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def child(raw: Any, *path: str) -> Mapping[str, Any]:
    """Return the object behind this path; an empty one where there is none."""
    for name in path:
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw if isinstance(raw, Mapping) else {}


def items(raw: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects of a list, without what is none; at most a thousand."""
    found = raw.get(name) if isinstance(raw, Mapping) else None
    return [one for one in found[:1000] if isinstance(one, Mapping)] if isinstance(found, list) else []


def text(raw: Mapping[str, Any], name: str) -> str:
    found = raw.get(name)
    return found if isinstance(found, str) else ""


def market_of(word: str | None) -> Market | None:
    return Market(word) if word in (Market.SPOT.value, Market.ON_DEMAND.value) else None

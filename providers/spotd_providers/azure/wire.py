"""What Azure says, in the words of the contract: settings, refusals, and the machines of a resource group."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AliasPath, Field, field_validator

from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    ProviderName,
)
from spotd_providers.kit.boundary import ApiSettings, is_loopback, safe_base_url
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, RestRefused, error_problem
from spotd_providers.kit.shapes import Instant, Lenient, Row
from spotd_providers.kit.text import clean, quote_safely
from spotd_providers.kit.vm_boot import notice_lines
from spotd_providers.kit.vm_market import VmSettings

PROVIDER: Final = ProviderName("azure")
WHO: Final = "Azure"
COMPUTE_API: Final = "2026-04-01"
SIZES_API: Final = "2021-07-01"
NETWORK_API: Final = "2022-11-01"
"""Also of the interfaces that a machine is launched with."""
KEY_TAG: Final = "spotd-key"
INSTALL_TAG: Final = "spotd-install"
_GUID: Final = r"^([0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})?$"
_NAME: Final = r"^[A-Za-z0-9_.-]{0,40}$"


class AzureSettings(ApiSettings, VmSettings):
    """The application, the resource group, regions and the machine image, under `[providers.azure]`."""

    base_url: str = Field(default="https://management.azure.com", description="Where the Resource Manager answers.")
    login_url: str = Field(default="https://login.microsoftonline.com", description="Where tokens are given.")
    prices_url: str = Field(default="https://prices.azure.com", description="Where retail prices are listed.")
    tenant_id: str = Field(default="", pattern=_GUID, description="Directory (tenant) of the application.")
    client_id: str = Field(default="", pattern=_GUID, description="Id of the application; api_key is a secret of it.")
    subscription_id: str = Field(default="", pattern=_GUID, description="Subscription that is billed.")
    resource_group: str = Field(default="", pattern=_NAME, description="Resource group that is for spotd alone.")
    regions: tuple[Annotated[str, Field(pattern=r"^[a-z0-9]{2,40}$")], ...] = Field(
        default=(), max_length=32, description='Regions to rent in, as Azure writes them, say ["westeurope"].'
    )
    network: str = Field(
        default="spotd",
        pattern=_NAME,
        description="A region's virtual network is NETWORK-REGION, its subnet `default`.",
    )
    image: str = Field(
        default="microsoft-dsvm:ubuntu-hpc:2204:latest",
        pattern=r"^[A-Za-z0-9_.-]{1,80}(:[A-Za-z0-9_.-]{1,80}){3}$",
        description="Machine image with docker and the GPU's driver: publisher:offer:sku:version.",
    )

    @field_validator("login_url", "prices_url")
    @classmethod
    def _is_safe(cls, value: str) -> str:
        return safe_base_url(value, example="https://...")

    @property
    def subscription(self) -> str:
        return f"/subscriptions/{self.subscription_id}"

    @property
    def group(self) -> str:
        return f"{self.subscription}/resourceGroups/{self.resource_group}"

    def at(self, path: str) -> str:
        """Return the path of a kind of resource, or of one, in the group."""
        version = NETWORK_API if path.startswith("/Microsoft.Network/") else COMPUTE_API
        return f"{self.group}/providers{path}{'&' if '?' in path else '?'}api-version={version}"

    def missing(self) -> list[str]:
        """Return the settings without which nothing can be asked."""
        names = ("tenant_id", "client_id", "subscription_id", "resource_group", "regions", "network")
        return [name for name in names if not getattr(self, name)]


# Azure's words. What means the same under any status is in the table; of a few codes only the sentence says what it is.
CAPACITY: Final = (
    "SkuNotAvailable", "AllocationFailed", "ZonalAllocationFailed", "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
)  # fmt: skip
_PRICE: Final = ("max price", "maxprice", "maximum price")


class AzureDialect(Dialect):
    """Azure's refusals, by their sentence where a code means several things."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        code, text = (problem.code, problem.text.lower()) if problem is not None else ("", "")
        if code in CAPACITY or code.startswith("SpotVMCapacity"):
            return Meaning.NO_CAPACITY
        if code in ("OperationNotAllowed", "BadRequest", "InvalidParameter") and any(word in text for word in _PRICE):
            return Meaning.PRICE_MOVED
        if code == "OperationNotAllowed" and "quota" in text:
            return Meaning.QUOTA
        found = super().meaning(status, problem, is_purchase=is_purchase)
        # A group or subscription that is not found says nothing of the machines in it.
        return Meaning.REJECTED if found is Meaning.ABSENT and code != "ResourceNotFound" else found


def object_of(answer: HttpAnswer, body: Any) -> Any:
    """Return the object of an answer; a list as `rows`, and an empty one where Azure only accepts."""
    if body is None and not answer.body:
        return {}
    value = body.get("value") if isinstance(body, dict) else None
    return {"rows": [flat(one) for one in value], "next": body.get("nextLink")} if isinstance(value, list) else body


DIALECT: Final = AzureDialect(
    who=WHO,
    problem_of=error_problem,
    object_of=object_of,
    codes={
        "QuotaExceeded": Meaning.QUOTA,
        **dict.fromkeys(("AuthorizationFailed", "AuthenticationFailed"), Meaning.AUTH),
        **dict.fromkeys(("InvalidParameter", "ImageNotFound"), Meaning.REJECTED),
        "MarketplacePurchaseEligibilityFailed": Meaning.REJECTED,
        "TooManyRequests": Meaning.TOO_OFTEN,
        # They may be about this very launch: a machine of this name exists, or is being made.
        **dict.fromkeys(("PreconditionFailed", "Conflict", "AnotherOperationInProgress"), Meaning.UNAVAILABLE),
    },
    buy_timeout_s=30.0,
)


def failure_of(said: Any) -> RestRefused:
    """Return what the error of a failed operation means; one in no known words is no fault of the request."""
    problem = error_problem({"error": said}) or RefusalWords(text="Azure does not say why")
    meaning = DIALECT.meaning(400, problem, is_purchase=True)
    known = meaning is not Meaning.REJECTED or problem.code in DIALECT.codes
    return RestRefused(WHO, status=400, meaning=meaning if known else Meaning.NO_CAPACITY, problem=problem)


# The machines of a resource group.
def name_of(key: str) -> str:
    """Return the name of the machine of a key; whether Azure takes a dot is not stated."""
    return key.lower().replace(".", "-")


def key_by_name(name: str, install: str) -> str:
    """Return the key whose machine has this name, of those of an install; the name itself where there is none."""
    identity, dash, rest = name.lower().removeprefix(f"spotd-{install}-").partition("-")
    found = f"spotd-{install}.{identity}-{rest}"
    return found if dash and "-" in rest and name_of(found) == name.lower() else name.lower()


def flat(raw: Any) -> Any:
    """Return a row of Azure's with its name as its id: names are unique in a group, and compare without their case."""
    if not isinstance(raw, dict):
        return raw
    name = raw.get("name")
    return {**raw, "id": name.lower() if isinstance(name, str) else None}


class _Properties(Row):
    provisioning: Annotated[str | None, Lenient, Field(validation_alias="provisioningState")] = None
    priority: Annotated[str | None, Lenient] = None
    created_at: Annotated[Instant | None, Lenient, Field(validation_alias="timeCreated")] = None
    size: Annotated[str | None, Lenient, Field(validation_alias=AliasPath("hardwareProfile", "vmSize"))] = None
    statuses: Annotated[list[Any] | None, Lenient, Field(validation_alias=AliasPath("instanceView", "statuses"))] = None

    def said(self, kind: str) -> tuple[str, str]:
        """Return the newest status of a kind, without that word before it, and its message; empty for none."""
        for raw in reversed((self.statuses or [])[:100]):
            code, text = (raw.get("code"), raw.get("message")) if isinstance(raw, dict) else (None, None)
            if isinstance(code, str) and code.startswith(f"{kind}/"):
                return code.partition("/")[2], text if isinstance(text, str) else ""
        return "", ""


class AzureVmRow(Row):
    """One machine. What it was given to run is never in an answer."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,128}$")]
    properties: Annotated[_Properties | None, Lenient] = None


_OFF: Final = "it was shut down from inside, and is billed on"
_TAKEN: Final = "its host is taken away, and its disk is billed on"
_POWER: Final = {
    "starting": (InstanceState.PENDING, Billing.UNKNOWN, ""),
    "running": (InstanceState.RUNNING, Billing.FULL, ""),
    **dict.fromkeys(("stopping", "stopped"), (InstanceState.PAUSED, Billing.FULL, _OFF)),
    "deallocating": (InstanceState.PAUSED, Billing.UNKNOWN, _TAKEN),
    "deallocated": (InstanceState.PAUSED, Billing.DISK, _TAKEN),
}
_MARKETS: Final = {"spot": Market.SPOT, "low": Market.SPOT, "regular": Market.ON_DEMAND}
UNREAD: Final = "Azure did not say yet whether it runs"


def as_instance(row: AzureVmRow, key: AttemptKey) -> Instance:
    """Translate one machine; of a list that shows no power state, `detail` is `UNREAD`.

    A failed update leaves a machine that runs in the state Failed, so a list's Failed says nothing by itself.
    """
    said = row.properties or _Properties()
    word, power = (said.provisioning or "").lower(), said.said("PowerState")[0].lower()
    market = _MARKETS.get((said.priority or "").lower())
    state, billing, detail, loss = InstanceState.UNKNOWN, Billing.UNKNOWN, "", None
    if word == "deleting":
        state = InstanceState.ENDING
    elif word in ("succeeded", "updating", "failed", "canceled") and said.statuses is None:
        detail = UNREAD
    elif word in ("failed", "canceled") and power not in ("starting", "running"):
        state, loss, detail = InstanceState.PAUSED, Loss.PROVISION_FAILED, "Azure could not make it"
        code, text = said.said("ProvisioningState")
        loss = Loss.NO_CAPACITY if code.rpartition("/")[2] in CAPACITY else loss
        detail = quote_safely(text) or detail
    elif power in _POWER:
        state, billing, detail = _POWER[power]
        loss = Loss.SELF if power.startswith("stop") else None
    elif word in ("creating", "updating"):
        state = InstanceState.PENDING
    elif word == "succeeded" and not power:
        detail = UNREAD
    else:
        detail = f"Azure calls its state {quote_safely(power or word)!r}"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=state,
        market=market,
        created_at=said.created_at,
        loss=loss,
        billing=billing,
        detail=clean(detail),
    )


# The warning that only the machine itself gets: Scheduled Events.
IMDS: Final = "http://169.254.169.254"
_DUE: Final = """for row in json.loads(body)["Events"]:
    names = [str(name).lower() for name in row.get("Resources") or ["%s"]]
    if row.get("EventType") in ("Preempt", "Terminate") and "%s" in names:
        at = email.utils.parsedate_tz(row.get("NotBefore") or "")
        return email.utils.mktime_tz(at) if at else time.time() + 30"""


def watch_lines(base_url: str, name: str) -> str:
    """Return shell lines that leave a notice to the runner as soon as Azure announces an eviction."""
    url = f"{base_url}/imds/{name}" if is_loopback(base_url) else IMDS
    path = f"{url}/metadata/scheduledevents?api-version=2020-07-01"
    return notice_lines(path, {"Metadata": "true"}, _DUE % (name, name), reason="evicted by Azure")

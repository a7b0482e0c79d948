"""What the fake OpenStack cloud holds, how it refuses, and its knobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, uuid5

from starlette.requests import Request

from tests.fakes.rest import RestMachine, RestQuirks, RestRefusal

REGIONS: Final = ("GRA11", "BHS5")
NO_HOST: Final = "No valid host was found. There are not enough hosts available."
NO_MORE_TRIES: Final = "Exceeded maximum number of retries. Exhausted all hosts available for retrying build failures."
FAULT_NAMES: Final = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    405: "badMethod",
    409: "conflictingRequest",
    413: "overLimit",
    429: "overLimit",
    501: "notImplemented",
    503: "serviceUnavailable",
}
"""The key of a body by HTTP status, at Nova and Cinder; any other is `computeFault`."""
VM_STATES: Final = {
    "BUILD": "building",
    "SHUTOFF": "stopped",
    "RESCUE": "rescued",
    "VERIFY_RESIZE": "resized",
    "SOFT_DELETED": "soft-delete",
}
"""The `vm_state` of a status, where that is not the same word."""
RUNS_IN: Final = frozenset({"ACTIVE", "REBOOT", "HARD_REBOOT", "PASSWORD", "MIGRATING", "RESIZE", "VERIFY_RESIZE"})
ACTIONS: Final[dict[str, tuple[frozenset[str], str]]] = {
    "os-start": (frozenset({"SHUTOFF"}), "ACTIVE"),
    "os-stop": (frozenset({"ACTIVE", "ERROR"}), "SHUTOFF"),
    "pause": (frozenset({"ACTIVE"}), "PAUSED"),
    "unpause": (frozenset({"PAUSED"}), "ACTIVE"),
    "suspend": (frozenset({"ACTIVE"}), "SUSPENDED"),
    "resume": (frozenset({"SUSPENDED"}), "ACTIVE"),
    "shelve": (frozenset({"ACTIVE", "SHUTOFF", "PAUSED", "SUSPENDED"}), "SHELVED"),
    "shelveOffload": (frozenset({"SHELVED"}), "SHELVED_OFFLOADED"),
    "unshelve": (frozenset({"SHELVED", "SHELVED_OFFLOADED"}), "ACTIVE"),
    "restore": (frozenset({"SOFT_DELETED"}), "ACTIVE"),
}
"""From which statuses an action leads to which."""
PATH_NOT_FOUND: Final = "<html><head><title>404 Not Found</title></head><body><h1>404 Not Found</h1></body></html>"
"""The body of a 404 of a path that no service knows, as gateways answer it too."""


@dataclass(slots=True, kw_only=True)
class OpenstackQuirks(RestQuirks):
    """The knobs of this fake; [U] marks a fact that differs between clouds or is not certain.

    Attributes:
        microversion_max: the highest that Nova knows; `legacy` is the `/v2` that knows none and ignores the header.
        token_lives: of a token; `expires_says` is what its answer says instead.
        catalogue: whether tokens carry it; `volume_type` is what it calls Cinder.
        addresses: what the catalogue says in place of the address of a service, by its type.
        version_says: what Nova's root answers in place of its version, with this status.
        schedules: from the order to the host, or to there being none.
        breaks_page: a page of servers after the first is answered 500.
        page_rows: most rows of one answer, whatever `limit` says.
        link_host: the host in links to next pages, as behind a proxy that Nova does not know.
        project_in_url: the endpoint of Nova ends with the project.
        bare_404: a gateway in front answers every path of Nova with a 404 in no words of its own.
        console_missing: the hypervisor keeps no console.
        forbids_volumes: ids of volumes that the policy lets the project not change.
        forgets_metadata: Cinder names a volume and does not take the metadata.
        down: ids of servers whose cell does not answer.
        deletes_hang: servers deleted from now on stay in `deleting`; `force_helps` against that [U]: Nova ignores it
            while the host is up. `forbids_force`: the policy keeps it for administrators.
        busy: ids whose delete conflicts with a task that is on.
        reclaim: so long a server that is deleted can be restored.
        free_statuses: in which a server is not billed [U]. `bills_from`: the order or the first `ACTIVE` [U].
        offloads: whether a shelved server leaves its host at once.
        external_ports: whether servers may have ports in the external network.
        metadata_max: items of metadata of a server.
        quota: of the project, for each region.
        rate_limit_status: 413 or 429.
        leaks_volumes: of failed boots and deletes, `delete_on_termination` notwithstanding.
        hides_extra_specs: the operator keeps them from users.
        leaves_tags: whether a create leaves out tags and metadata that it was asked for.
    """

    boot: timedelta = timedelta(minutes=2)
    lingers: timedelta = timedelta(0)
    bills_ending: bool = True
    microversion_max: str = "2.96"
    legacy: bool = False
    token_lives: timedelta = timedelta(hours=1)
    expires_says: Any = None
    catalogue: bool = True
    volume_type: str = "block-storage"
    addresses: dict[str, str] = field(default_factory=dict)
    version_says: tuple[int, Any] | None = None
    schedules: timedelta = timedelta(seconds=5)
    breaks_page: bool = False
    page_rows: int = 1000
    link_host: str | None = None
    project_in_url: bool = False
    bare_404: bool = False
    console_missing: bool = False
    forbids_volumes: set[str] = field(default_factory=set)
    forgets_metadata: bool = False
    down: set[str] = field(default_factory=set)
    deletes_hang: bool = False
    force_helps: bool = False
    forbids_force: bool = False
    busy: set[str] = field(default_factory=set)
    reclaim: timedelta | None = None
    free_statuses: frozenset[str] = frozenset({"SHELVED_OFFLOADED", "SOFT_DELETED"})
    bills_from: Literal["order", "active"] = "active"
    offloads: bool = True
    external_ports: bool = True
    metadata_max: int = 128
    quota: dict[str, int] = field(default_factory=lambda: {"instances": 50, "cores": 4000, "ram": 40_000_000})
    rate_limit_status: int = 429
    leaks_volumes: bool = False
    hides_extra_specs: bool = False
    leaves_tags: bool = False


@dataclass(slots=True, kw_only=True)
class Flavor:
    """A flavour; `price` in $/h is what the operator charges, and stated in no answer."""

    name: str
    gpus: int
    price: float
    vcpus: int = 15
    ram: int = 46080
    disk: int = 400
    specs: dict[str, str] = field(default_factory=dict)
    disabled: bool = False
    is_spot: bool = False
    free: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REGIONS, 3))

    def id_in(self, region: str) -> str:
        """The id, which is another one in every region."""
        return str(uuid5(NAMESPACE_URL, f"flavor/{region}/{self.name}"))


@dataclass(slots=True, kw_only=True)
class OpenstackImage:
    """An image of one region; sizes in GB."""

    image_id: str
    region: str
    name: str
    made_at: datetime
    status: str = "active"
    min_disk: int = 10
    is_hidden: bool = False


@dataclass(slots=True, kw_only=True)
class OpenstackNetwork:
    """A network of one region."""

    network_id: str
    region: str
    name: str
    is_external: bool = False


@dataclass(slots=True, kw_only=True)
class OpenstackVolume:
    """A volume of Cinder; `goes` is its `delete_on_termination`."""

    volume_id: str
    size: int
    made_at: datetime
    region: str = REGIONS[0]
    name: str = ""
    status: str = "in-use"
    server_id: str | None = None
    goes: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OpenstackServer(RestMachine):
    """A server. `launched_at` is when it was ordered, `active_at` what Nova calls `launched_at`.

    Attributes:
        body: what its create asked for. `mapping`: the volume it boots from, as asked for.
        has_host: scheduled to a host; without one a delete is done at once.
    """

    region: str
    flavor: Flavor
    body: dict[str, Any]
    network: OpenstackNetwork | None
    image_id: str | None
    metadata: dict[str, str]
    tags: list[str]
    user_id: str
    updated_at: datetime
    mapping: dict[str, Any] | None = None
    task_state: str | None = "scheduling"
    active_at: datetime | None = None
    has_host: bool = False
    fault: str | None = None
    failure: str | None = None
    locked: bool = False
    volume_ids: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.label or ""


def refusal(status: int, message: str) -> RestRefusal:
    """A refusal in the words of the service that is asked."""
    return RestRefusal(status, message)


def not_found(kind: str, one: str) -> RestRefusal:
    return RestRefusal(404, f"{kind} {one} could not be found.")


def cut_page(
    request: Request, ids: list[str], most: int, markers: list[str] | None = None
) -> tuple[list[str], str | None]:
    """The ids after the marker up to the limit, and the marker of a next page. Every one of `markers` will do as one.

    Raises:
        RestRefusal: the limit is no number, or no row is the marker.
    """
    limit, marker = request.query_params.get("limit", str(most)), request.query_params.get("marker")
    if not limit.isdecimal():
        raise RestRefusal(
            400, f"Invalid input for query parameters limit. Value: {limit}. It does not match '^[0-9]*$'"
        )
    most, markers = min(most, int(limit)), ids if markers is None else markers
    if marker is not None:
        if marker not in markers:
            raise RestRefusal(400, f"marker [{marker}] not found")
        after = set(markers[markers.index(marker) + 1 :])
        ids = [one for one in ids if one in after]
    found = ids[:most]
    return found, found[-1] if found and len(found) == most else None


def some_flavors() -> tuple[Flavor, ...]:
    """A small market: OVHcloud's names, an alias in extra specs, a spot flavour, one without a disk, unpriced ones."""
    alias = {"pci_passthrough:alias": "a100-80:4"}
    return (
        Flavor(name="l4-90", gpus=1, price=0.75, vcpus=22, ram=90_000),
        Flavor(name="l4-180", gpus=2, price=1.5, vcpus=45, ram=180_000),
        Flavor(name="h100-380", gpus=1, price=2.8, vcpus=30, ram=380_000),
        Flavor(name="gpu.a100.spot", gpus=4, price=0.9, disk=80, specs=alias, is_spot=True),
        Flavor(name="hm.v100s", gpus=1, price=0.6, disk=0),
        Flavor(name="b3-8", gpus=0, price=0.05, vcpus=2, ram=8000, disk=50),
        Flavor(name="t2-45", gpus=1, price=1.1),
        Flavor(name="secret.gpu", gpus=1, price=1.0),
        Flavor(name="win-l4-90", gpus=1, price=0.9, disabled=True),
    )

"""What the fake OpenStack cloud sells, how it refuses, and its knobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from tests.fakes.rest import RestQuirks, RestRefusal

ADMIN_PASSWORD: Final = "fake-openstack-admin-pass-41ce"
"""Part of the answer to every launch; a secret that no adapter may keep."""
NO_HOST: Final = "No valid host was found. There are not enough hosts available."
REGION: Final = "GRA11"
OTHER_REGION: Final = "BHS5"
MICROVERSION_MIN: Final = (2, 1)
USER_DATA_CHARS_MAX: Final = 65_535
FAULTS: Final = {
    400: "badRequest", 403: "forbidden", 404: "itemNotFound", 405: "badMethod", 406: "computeFault",
    409: "conflictingRequest", 413: "overLimit", 429: "overLimit", 500: "computeFault", 503: "serviceUnavailable",
}  # fmt: skip


def refusal(status: int, message: str, *, code: str = "") -> RestRefusal:
    """A refusal whose body has one key, named after the fault."""
    return RestRefusal(status, message, code=code or FAULTS.get(status, "computeFault"))


@dataclass(slots=True, kw_only=True)
class OpenstackQuirks(RestQuirks):
    """The knobs of this fake; [U] marks a fact that is not certain, and has both behaviours.

    Attributes:
        lingers: a deleted server is not shown any more, but for `changes-since`.
        token_lives: of a token; `expires_says` is what its answer says instead.
        microversion_max: what Nova knows; 2.1 is the first.
        hides_extra_specs: the operator keeps them from users.
        page_rows: most rows of a page, whatever `limit` asks for.
        breaks_page: the second page of the servers is answered 500.
        project_in_url: the endpoint of Nova ends with the project.
        unknown_flavor: status of a launch that names a flavour that does not exist [U].
        schedules: so long after a launch a server without a host goes to ERROR.
        leaks_volumes: a volume stays although it was to be deleted with its server.
        deletes_hang: a delete stays in `task_state` deleting until `forceDelete`.
        forbids_force: the operator's policy keeps `forceDelete` for administrators.
        soft_deletes: a deleted server stays for a while, as SOFT_DELETED.
        many_networks: `auto` finds more than one network.
        console_missing: the hypervisor keeps no console.
        bare_404: an edge in front answers every route of Nova with 404 in no words of its own.
        addresses: what the catalogue says in place of the address of a service, by its type.
        version_says: what Nova's root answers in place of its version, with this status.
    """

    lingers: timedelta = timedelta(0)
    token_lives: timedelta = timedelta(hours=1)
    expires_says: Any = None
    microversion_max: str = "2.96"
    hides_extra_specs: bool = False
    page_rows: int = 1000
    breaks_page: bool = False
    project_in_url: bool = False
    unknown_flavor: int = 404
    schedules: timedelta = timedelta(seconds=5)
    leaks_volumes: bool = False
    deletes_hang: bool = False
    forbids_force: bool = False
    soft_deletes: bool = False
    many_networks: bool = False
    console_missing: bool = False
    bare_404: bool = False
    addresses: dict[str, str] = field(default_factory=dict)
    version_says: tuple[int, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Flavor:
    """A flavour.

    Attributes:
        usd: what its operator bills per hour; no API says it.
        free: how many more servers the hosts can take.
    """

    flavor_id: str
    name: str
    usd: float
    gpus: int = 0
    vcpus: int = 8
    ram_mb: int = 45_000
    disk_gb: int = 400
    is_spot: bool = False
    disabled: bool = False
    free: int = 3
    extra_specs: dict[str, str] = field(default_factory=dict)


def some_flavors() -> tuple[Flavor, ...]:
    """A small market: OVHcloud's names, an alias in extra specs, a spot flavour, one without a disk, unpriced ones."""
    return (
        Flavor(flavor_id="f-0001", name="l4-90", usd=0.75, gpus=1, vcpus=22, ram_mb=90_000),
        Flavor(flavor_id="f-0002", name="l4-180", usd=1.5, gpus=2, vcpus=45, ram_mb=180_000),
        Flavor(flavor_id="f-0003", name="h100-380", usd=2.8, gpus=1, vcpus=30, ram_mb=380_000),
        Flavor(
            flavor_id="f-0004", name="gpu.a100.spot", usd=0.9, gpus=4, is_spot=True, disk_gb=80,
            extra_specs={"pci_passthrough:alias": "a100-80:4"},
        ),
        Flavor(flavor_id="f-0005", name="hm.v100s", usd=0.6, gpus=1, disk_gb=0),
        Flavor(flavor_id="f-0006", name="b3-8", usd=0.05, vcpus=2, ram_mb=8_000, disk_gb=50),
        Flavor(flavor_id="f-0007", name="t2-45", usd=1.1, gpus=1),
        Flavor(flavor_id="f-0008", name="secret.gpu", usd=1.0, gpus=1),
        Flavor(flavor_id="f-0009", name="win-l4-90", usd=0.9, gpus=1, disabled=True),
    )  # fmt: skip

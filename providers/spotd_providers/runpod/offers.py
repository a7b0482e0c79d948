"""From catalogue rows to offers: pure translation, no calls.

RunPod sells no single machines: an offer is (GPU type, count, cloud), placed by its scheduler wherever there is room.
The catalogue's price is for ONE GPU and for the whole cloud; a machine costs that times its count. Its disk is extra,
traffic is free. `availability` is for the very count and cloud asked for; `NONE` is no offer. It is no promise: stock
that is shown can be gone, or spread over hosts none of which has enough of it.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, NoCapacity, OfferGone, ProviderError, Unavailable
from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    Interruption,
    LaunchRequest,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
    micro_usd,
    whole_machine,
)
from spotd_providers.kit.calls import rejected
from spotd_providers.kit.rest import Meaning, RestRefused
from spotd_providers.kit.template import require_launchable
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.wire import WHO, GpuRow, RunpodSettings, price_of

PROVIDER: Final = ProviderName("runpod")
DISK_PRICE: Final = MicroUsdPerGbMonth(100_000)
"""Container disk, $/GB/month, only while the pod runs. Documented, and in no answer of the API."""
CLUSTER: Final = "CLUSTER"
NODES_MIN, NODES_MAX = 2, 250
"""How many pods one cluster has."""
IN_STOCK: Final = frozenset({"LOW", "MEDIUM", "HIGH"})


_CREATED_AS: Final = {"NVIDIA RTX PRO 4500 Blackwell Server Edition": "NVIDIA RTX PRO 4500 Blackwell"}
"""Ids of the catalogue that a create does not know, and what it calls the same."""


def create_id(gpu: str) -> str:
    """Return the id by which a create knows this GPU of the catalogue."""
    return _CREATED_AS.get(gpu, gpu)


def offers_of(
    rows: Iterable[GpuRow], cloud: str, count: int, settings: RunpodSettings
) -> tuple[list[Offer], list[Rejected]]:
    """Translate every row to a priced offer, or reject it with the reason that a user reads.

    `CLUSTER` as the cloud is that of machines that are sold as several alone.
    """
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    for row in rows:
        price = price_of(row, _listed_as(cloud))
        reason = price if isinstance(price, str) else _not_sold(row, cloud, count, settings)
        if reason is not None or isinstance(price, str):
            rejected.append(Rejected(offer_id=offer_id(row.id, count, cloud), reason=reason or ""))
            continue
        offers.append(_offer(row, cloud, count, MicroUsdPerGpuHour(micro_usd(price)), settings))
    return offers, rejected


def offer_id(gpu: str, count: int, cloud: str) -> str:
    """Name an offer, the same as long as the same thing is sold."""
    return f"{gpu.replace(' ', '_')}:{count}:{cloud.lower()}"


def _listed_as(cloud: str) -> str:
    """Return the cloud by which the catalogue prices this one: clusters are in data centres."""
    return "SECURE" if cloud == CLUSTER else cloud


def _offer(row: GpuRow, cloud: str, count: int, price: MicroUsdPerGpuHour, settings: RunpodSettings) -> Offer:
    machine = MicroUsdPerHour(whole_machine(price, count))
    name = offer_id(row.id, count, cloud)
    places = _places(row, settings)
    memory_mb = round(row.memory * 1024) or None
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(name),
        pool=PoolId(name),
        market=Market.ON_DEMAND,
        interruption=Interruption.NEVER,
        gpu=canonical(PROVIDER, create_id(row.id), memory_mb),
        gpu_count=count,
        gpu_vram_mb=memory_mb,
        gpu_price=machine,
        on_demand_price=machine,
        storage_price=DISK_PRICE,
        storage_fixed=MicroUsdPerHour(micro_usd(settings.cluster_network) if cloud == CLUSTER else 0),
        region=places[0] if len(places) == 1 else "",
        cuda_max=_cuda_max(row),
        nodes_min=NODES_MIN if cloud == CLUSTER else 1,
        nodes_max=NODES_MAX if cloud == CLUSTER else 1,
        ends_itself=cloud != CLUSTER,
        extra={"gpu": create_id(row.id), "cloud": cloud},
    )


def _not_sold(row: GpuRow, cloud: str, count: int, settings: RunpodSettings) -> str | None:
    """Return why this GPU cannot be had on this cloud in this number, or should not."""
    if row.id == "unknown":
        return "RunPod does not know which GPU this is"
    listed = _listed_as(cloud).lower()
    offered = row.secure if listed == "secure" else row.community
    if offered is False:
        return f"not offered on the {listed.title()} cloud"
    if not settings.amd and (row.manufacturer or "").upper() == "AMD":
        return "an AMD GPU (providers.runpod.amd)"
    most = (row.max_count or {}).get(listed)
    if isinstance(most, int) and not isinstance(most, bool) and most < count:
        return f"at most {most} of it in one pod"
    if row.availability == "NONE":
        return "none in stock now"
    if row.availability not in IN_STOCK:
        return "availability: RunPod does not say whether there is any"
    if settings.data_centers and not _places(row, settings):
        return "none in stock in your data centres (providers.runpod.data_centers)"
    return None


def _places(row: GpuRow, settings: RunpodSettings) -> tuple[str, ...]:
    """Return the data centres that have some now, among those that may be used."""
    allowed = frozenset(settings.data_centers)
    stocked = (place.id for place in row.data_centers or () if place.availability in IN_STOCK)
    return tuple(place for place in stocked if not allowed or place in allowed)


def _cuda_max(row: GpuRow) -> str | None:
    versions = [item.version for item in row.cuda_versions or () if item.available]
    return max(versions, key=lambda version: tuple(map(int, version.split("."))), default=None)


# The whole catalogue, read in parts: one request for each cloud and size of machine.
#
# The account's minute of requests can end between two parts, above all when it is polled often or machines come and go.
# A missing part is then taken from an earlier poll, so that no cloud drops out of the market only because it was read
# last; and the part that was read longest ago is read first.


PART_AGE_MAX: Final = timedelta(seconds=90)
"""List prices move in weeks and stock in minutes; and a create that finds neither only costs one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguePart:
    """The offers of one cloud in one size."""

    at: datetime
    offers: tuple[Offer, ...]
    rejected: tuple[Rejected, ...]


class GpuCatalogue:
    """Every size on every cloud, as far as it was read lately."""

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._parts: dict[tuple[str, int], CataloguePart] = {}
        self._names: list[tuple[str, int]] = []

    async def refresh(self, *, with_clusters: bool) -> ProviderError | None:
        """Read every part; returns the error of the first that failed, at which it stops.

        Raises:
            AuthFailed: the key is refused. ProviderError: no part at all could be read.
        """
        names = [(cloud, count) for cloud in self._settings.clouds for count in self._settings.gpu_counts]
        names += [(CLUSTER, count) for count in self._settings.cluster_gpu_counts if with_clusters]
        never = datetime.min.replace(tzinfo=self._services.clock.now().tzinfo)
        names.sort(key=lambda name: self._parts[name].at if name in self._parts else never)
        self._names = names
        for number, (cloud, count) in enumerate(names):
            try:
                rows = await self._client.gpus(
                    cloud=_listed_as(cloud),
                    count=count,
                    cuda_min=self._settings.cuda_min,
                    product=CLUSTER if cloud == CLUSTER else "POD",
                )
            except AuthFailed:
                raise
            except ProviderError as exc:
                if number == 0:
                    raise
                return exc
            good, bad = offers_of(rows.rows, cloud, count, self._settings)
            self._parts[cloud, count] = CataloguePart(
                at=self._services.clock.now(), offers=tuple(good), rejected=(*rows.rejected, *bad)
            )
        return None

    def recent(self) -> tuple[list[Offer], list[Rejected]]:
        """Return the offers and rejected rows that are not too old, in an order independent of that of reading."""
        offers: list[Offer] = []
        rejected: list[Rejected] = []
        now = self._services.clock.now()
        for name in sorted(self._names):
            part = self._parts.get(name)
            if part is not None and now - part.at <= PART_AGE_MAX:
                offers.extend(part.offers)
                rejected.extend(part.rejected)
        return offers, rejected


# The body of a create, and the meaning of its refusal.


SCRIPT_BYTES_MAX: Final = 16 * 1024
BODY_BYTES_MAX: Final = 102_400
NAME_CHARS_MAX: Final = 191
IMAGE_CHARS_MAX: Final = 1024
DISK_GB_MIN: Final = 20
"""Below it, unpacking a large image can fail."""
UNEXPLAINED_MAX: Final = 3
DIRECT_SSH: Final = """\
(d=$(PATH=$PATH:/usr/sbin:/sbin command -v sshd) && [ -n "$PUBLIC_KEY" ] || exit
umask 077; w=/run/spotd-ssh; rm -rf $w; mkdir -p /run/sshd $w && printf '%s\\n' "$PUBLIC_KEY" >$w/keys || exit
ssh-keygen -q -t ed25519 -N '' -f $w/host && env -i "PATH=$PATH" "$d" -f /dev/null -p 22 -h $w/host \\
  -o AuthorizedKeysFile=$w/keys -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \\
  -o 'Subsystem=sftp internal-sftp') >/dev/null 2>&1 </dev/null || :
"""
"""Starts the image's ssh server, if it has one, for the keys that RunPod put in, and takes no password.

It sees nothing of the environment, where RunPod puts the pod's own key. Whatever fails here, the job starts.
"""


IN_CLUSTER: Final = """\
export SPOTD_NODE_RANK="$NODE_RANK" SPOTD_NODE_ADDRESS="$NODE_ADDR"
[ ! -e /sys/class/net/ens1 ] || export NCCL_SOCKET_IFNAME=ens1
"""
"""Hands on the place that RunPod gives each pod of a cluster. Its other network leads to the internet alone."""


def request_body(request: LaunchRequest, settings: RunpodSettings) -> dict[str, Any]:
    """Build the pod or cluster to create. The schema is closed, so it holds only what is needed.

    No `mounts` (nothing outlives the machine but checkpoints), no `env` (secrets have no business there), and of
    `ports` that of ssh alone, where it is wanted (hosts only call out). `args` goes to the image's ENTRYPOINT; almost
    every image runs what it is given.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(
        request,
        who=WHO,
        extra=("gpu", "cloud"),
        script_bytes_max=SCRIPT_BYTES_MAX,
        key_chars_max=NAME_CHARS_MAX,
        image_chars_max=IMAGE_CHARS_MAX,
    )
    offer, script = request.offer, request.start_script
    if offer.extra["cloud"] not in (("SECURE", "COMMUNITY") if offer.nodes == 1 else (CLUSTER,)):
        raise rejected(WHO, "offer", "it is not an offer of RunPod")
    body: dict[str, Any] = {
        "name": request.key,
        "image": request.image,
        "disk": max(request.disk_gb, DISK_GB_MIN),
    }
    if offer.nodes == 1:
        gpu = {"id": offer.extra["gpu"], "count": offer.gpu_count}
        body |= {"cloud": offer.extra["cloud"], "gpu": gpu}
        if settings.cuda_min is not None:
            gpu["minCudaVersion"] = settings.cuda_min
        if settings.registry is not None:
            body["registry"] = settings.registry
    else:
        if offer.nodes > NODES_MAX:
            raise rejected(WHO, "offer", f"a cluster has at most {NODES_MAX} pods")
        each = {"gpuTypeId": offer.extra["gpu"], "gpuCountPerPod": offer.gpu_count // offer.nodes}
        body |= {"type": "TRAINING", "compute": {**each, "podCount": offer.nodes}}
        script = IN_CLUSTER + script
    if settings.direct_ssh:
        body |= {"ports": ["22/tcp"], "startSsh": True}
        script = DIRECT_SSH + script
    if settings.override_entrypoint:
        body["entrypoint"] = ["/bin/sh", "-c"]
        body["cmd"] = [script]
    else:
        body["args"] = shlex.join(["/bin/sh", "-c", script])
    if settings.data_centers:
        body["dataCenterIds"] = list(settings.data_centers)
    if len(json.dumps(body).encode()) > BODY_BYTES_MAX:
        raise rejected(WHO, "start_script", f"quoted, it makes a request of more than {BODY_BYTES_MAX} bytes")
    return body


class UnexplainedRefusals:
    """Refused creates whose words do not say whether the offer or the request is at fault.

    A 400 is a lack of capacity or a broken rule, and only known sentences say which. An unknown one counts as the
    first, so that the next offer is tried; if offer after offer is refused like that, it is the request. A 403 is a
    pool that this account may not use, or the key: one that may only read is refused every create in the same words.
    """

    def __init__(self) -> None:
        self._offers: defaultdict[str, set[OfferId]] = defaultdict(set)

    def is_suspect(self, what: str, offer: OfferId) -> bool:
        """Record a refused offer; whether so many different ones were refused in a row that this is suspect."""
        self._offers[what].add(offer)
        return len(self._offers[what]) >= UNEXPLAINED_MAX

    def forget(self) -> None:
        """Forget all refusals, since a create was understood."""
        self._offers.clear()


def refusal_of_create(refused: RestRefused, request: LaunchRequest, unexplained: UnexplainedRefusals) -> ProviderError:
    """Translate a refused create into an error of the contract; no pod was made."""
    said, offer = refused.detail or f"HTTP {refused.status}", request.offer.offer_id
    is_cluster = request.offer.nodes > 1
    if refused.meaning is Meaning.ABSENT:
        return OfferGone(f"RunPod does not know this GPU any more: {said}")
    if refused.meaning is not Meaning.REJECTED:
        unexplained.forget()
        return refused.of_purchase()
    if refused.status == 403 and not is_cluster and unexplained.is_suspect("key", offer):
        return AuthFailed(
            f"RunPod forbids every create with this key: {said}; give it write access, `spotctl doctor` checks it"
        )
    if refused.status == 403:
        return NoCapacity(f"this account may not rent this kind of pod{' in clusters' * is_cluster}: {said}")
    if refused.status in (400, 409) and not unexplained.is_suspect("request", offer):
        return NoCapacity(f"RunPod did not make the pod, perhaps for want of machines: {said}")
    return refused.of_purchase() if refused.status in (400, 409, 413, 422) else Unavailable(str(refused))

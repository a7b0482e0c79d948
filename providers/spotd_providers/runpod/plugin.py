"""The descriptor of RunPod."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, NotSupported, ProviderError, Unavailable
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Market,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities, is_loopback
from spotd_providers.kit.calls import Page
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import RestRefused, key_setting, open_keyed_http
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.template import Check, ProviderTemplate, as_unreadable, clock_lines, examine
from spotd_providers.kit.text import key_of, last_lines
from spotd_providers.runpod.client import CLUSTERS, PODS, RunpodClient
from spotd_providers.runpod.clusters import NO_LOGIN, Clusters, ListedCluster, is_member
from spotd_providers.runpod.clusters import ref_of as cluster_ref
from spotd_providers.runpod.listing import (
    PodKeys,
    PodLosses,
    StoredLogins,
    as_charges,
    as_instance,
    is_id,
    ref_of,
)
from spotd_providers.runpod.offers import (
    DISK_GB_MIN,
    DISK_PRICE,
    NODES_MAX,
    PROVIDER,
    SCRIPT_BYTES_MAX,
    GpuCatalogue,
    UnexplainedRefusals,
    refusal_of_create,
    request_body,
)
from spotd_providers.runpod.wire import WHO, BillingRow, ClusterRow, PodRow, RunpodSettings

# The checks of `spotctl doctor` at RunPod, one line for each finding.


_KEY: Final = "create a key with read and write access at console.runpod.io/user/settings and put it in api_key"
_ANSWERS: Final = "check the network, at base_url and at RunPod's status page; the key was not judged"
_CATALOGUE: Final = "RunPod's catalogue does not answer; see its status page"
_SCOPES: Final = "give the key read and write access to pods and read access to billing"
_CLUSTERS: Final = "give the key access to clusters, or set cluster_gpu_counts to [] if no job has `nodes`"
_SSH_KEY: Final = "add your public key at console.runpod.io/user/settings, which pods that start afterwards get"
NO_BALANCE: Final = "RunPod's REST API states no balance and no spend limit; see console.runpod.io/user/billing"


async def _creates(client: RunpodClient) -> list[CheckLine]:
    """Check that the key may create: a create that is refused for the key reads like one of a forbidden pool."""
    try:
        await client.may_create()
    except AuthFailed as exc:
        return [CheckLine(name="create", ok=False, detail=str(exc), hint=_KEY)]
    except ProviderError:
        pass  # nothing was found out about it, and whatever is wrong is found by the next line
    return []


# RunPod as a spotd provider, on REST v2 alone: catalogue, pods and billing. What v2 cannot do is declared missing.


NO_PORTS: Final = (
    "RunPod's own way in carries a shell and no ports; with direct_ssh = true, pods that start afterwards are reached "
    "by ssh with your own key, if their image has an ssh server"
)
_MISSING: Final[Mapping[Power, str]] = {
    Power.SPOT: "RunPod withdrew its spot pods in 2026 and sells on-demand only",
    Power.BID_CHANGE: "RunPod sells at list price, so there is no bid to change",
    Power.BALANCE: "RunPod's REST API does not state the account's balance; its website shows it",
    Power.CAPACITY_SCORES: "RunPod says whether a pod can be had now, not how likely a launch is to succeed",
    Power.HOST_IDENTITY: "RunPod does not say on which host a pod runs",
    Power.NOTICES: "RunPod stops pods without warning, so checkpoint regularly",
    Power.PORTS: NO_PORTS,
    Power.PRICE_HISTORY: "RunPod's API shows only the prices of now",
    Power.REPLACE: "a cluster is rented and ended as one, and a job begins anew where one of its machines is lost",
    Power.STOP_RESUME: (
        "a stopped RunPod pod keeps its host but not its GPU and may never start again, so spotd deletes it"
    ),
}
_HAS: Final = (Power.LOGS, Power.BILLING, Power.SELF_TERMINATE, Power.SHELL)
CAPABILITIES: Final = capabilities(*_HAS, Power.GANG, missing=_MISSING)


class RunpodProvider(ProviderTemplate):
    """The Protocol over one open client."""

    name = PROVIDER
    who = WHO
    machine = "pod"
    nodes_max = NODES_MAX

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services) -> None:
        super().__init__(services, client)
        self._client = client
        self._settings = settings
        self._catalogue = GpuCatalogue(client, settings, services)
        self._unexplained = UnexplainedRefusals()
        self._pod_keys = PodKeys(services.state_dir, services.log)
        self._clusters = Clusters(client, settings, services, self._pod_keys)
        self._losses = PodLosses(client, services, self._clusters.first_pod)
        self._logins = StoredLogins(client, services)

    @property
    def capabilities(self) -> Mapping[Power, Capability]:  # type: ignore[override]  # it changes with the key's rights
        why = self._clusters.missing
        return capabilities(*_HAS, missing={**_MISSING, Power.GANG: why}) if why else CAPABILITIES

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every size on every cloud, priced or rejected; a failure after the first answer makes it incomplete.

        The parts that failed are filled in from an earlier poll, if that is recent.
        """
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), rejected=(), complete=True, at=self._services.clock.now())
        await self._logins.drop_unused()
        failure = await self._catalogue.refresh(with_clusters=not self._clusters.missing)
        if failure is not None:
            self._services.log.warning("runpod.offers_incomplete", reason=str(failure))
        offers, rejected = self._catalogue.recent()
        return OfferPage(
            offers=tuple(offers), rejected=tuple(rejected), complete=failure is None, at=self._services.clock.now()
        )

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the container's last lines, or the host's where the container printed nothing; no secrets."""
        pod_id = await self._pod_of(ref)
        found = await self._client.log_lines(pod_id, source="container", lines=lines)
        if not found:
            found = await self._client.log_lines(pod_id, source="system", lines=lines)
        return last_lines(found, lines)

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return the pod's mapped port where `direct_ssh` is set and there is one; else RunPod's own way in.

        That one needs nothing in the image, and carries no ports.
        """
        pod_id = await self._pod_of(ref)
        row = row_or_none(PodRow, await self._client.pod(pod_id))
        if row is None or (ref.scope != CLUSTERS and key_of(row.name, self._services.install) is None):
            raise Unavailable(f"RunPod does not show pod {pod_id} as ours")
        if row.status != "RUNNING":
            raise Unavailable(f"pod {pod_id} does not run yet")
        ways = [] if row.ssh is None else [row.ssh.proxy, row.ssh.direct]
        door = next(filter(None, reversed(ways) if self._settings.direct_ssh else ways), None)
        if door is None:
            raise Unavailable(
                f"RunPod names no shell of pod {pod_id}; it needs a public key at console.runpod.io/user/settings, "
                "which only pods that start afterwards get"
            )
        no_ports = NO_PORTS if row.ssh is not None and door is row.ssh.proxy else ""
        return ShellAddress(host=door.host, port=door.port, user=door.username, no_ports=no_ports)

    async def _pod_of(self, ref: InstanceRef) -> str:
        """Return the id of a machine's pod, of a cluster its first.

        Raises:
            Unavailable: it has none yet.
        """
        await self._require_ours(ref)
        if ref.scope == CLUSTERS and not self._clusters.first_pod(ref):
            raw = await self._row(ref)
            if raw is not None:
                self._clusters.machine(raw, AttemptKey(""))
        pod_id = self._clusters.first_pod(ref)
        if not pod_id:
            raise Unavailable(f"RunPod names no pod of cluster {ref.instance_id} yet")
        return pod_id

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return the charges of our pods, and of our clusters if there ever was one, hour by hour."""

        async def page(of: str | None) -> Page:
            following = CLUSTERS if of is None and self._clusters.were_used else None
            return (await self._client.billing(since, until, of or PODS)).records, following

        return await self._bill(page, BillingRow, lambda row: as_charges(row, self._pod_keys))

    async def check(self) -> Sequence[CheckLine]:
        """Check key, clock, catalogue and billing, one line each."""

        async def market() -> str:
            cloud = next(iter(self._settings.clouds), "SECURE")
            found = await self._client.gpus(cloud=cloud, count=1, cuda_min=self._settings.cuda_min)
            return f"{len(found.rows)} kinds of GPU in the catalogue"

        async def clusters() -> str:
            return f"can list clusters, {len(await self._client.clusters())} there"

        async def billing() -> str:
            now = self._services.clock.now()
            await self._client.billing(now - timedelta(days=1), now)
            return "can read charges"

        async def ssh_keys() -> str:
            if count := await self._client.ssh_keys():
                return "one public key for pods" if count == 1 else f"{count} public keys for pods"
            raise Unavailable("the account has no public key, so no pod starts an ssh server")

        async def greet() -> tuple[HttpAnswer, list[CheckLine]]:
            return await self._client.greeting(), await _creates(self._client)

        return await examine(
            greet,
            lambda found: (
                *clock_lines(found[0], self._services, who="RunPod"),
                *found[1],
                Check(name="market", ask=market, hint=_CATALOGUE, refused=_SCOPES),
                Check(name="billing", ask=billing, hint=_SCOPES),
                *([] if self._settings.no_clusters else [Check(name="clusters", ask=clusters, hint=_CLUSTERS)]),
                *([Check(name="ssh keys", ask=ssh_keys, hint=_SSH_KEY)] if self._settings.direct_ssh else []),
                CheckLine(name="balance", ok=True, detail=NO_BALANCE),
            ),
            accepted="accepted, can list pods",
            hint=_ANSWERS,
            refused=_KEY,
        )

    async def _page(self, token: str | None) -> Page:
        answer = await self._client.pod_page(cursor=token)
        following = answer.pagination
        return answer.pods, following.cursor or "" if following is not None and following.goes_on else None

    async def _rows(self, key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
        rows, whole = await super()._rows(key)
        clusters, all_there = await self._clusters.with_pods(raw for raw in rows if is_member(raw))
        return [*(raw for raw in rows if not is_member(raw)), *clusters], whole and all_there

    async def _row(self, ref: InstanceRef) -> Any | None:
        identity = str(ref.instance_id)
        return await (self._clusters.row(identity) if ref.scope == CLUSTERS else self._client.pod(identity))

    def _label(self, raw: Any) -> str | None:
        if is_member(raw):
            return ""
        is_cluster = isinstance(raw, ListedCluster)
        name = self._clusters.name_of(raw) if is_cluster else raw.get("name") if isinstance(raw, dict) else None
        row = row_or_none(ClusterRow, raw.raw) if is_cluster else row_or_none(PodRow, raw)
        is_known = row is not None or key_of(name, self._services.install) is not None
        return name if isinstance(name, str) and is_known else None

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        if isinstance(raw, ListedCluster):
            for pod in raw.pods:
                self._losses.note_start(pod)
            return self._clusters.machine(raw, key)
        row = row_or_none(PodRow, raw)
        if row is not None:
            self._losses.note_start(row)
            return as_instance(row, key)
        is_named = isinstance(raw, dict) and is_id(raw.get("id"))
        return as_unreadable(ref_of(raw["id"]), key, who=WHO) if is_named else None

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        self._pod_keys.record(instance.ref.instance_id, instance.key)
        if instance.ref.scope == CLUSTERS:
            with suppress(Unavailable):
                self._clusters.note_use()

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        return await self._losses.explain(instances)

    async def _buy(self, request: LaunchRequest) -> Instance:
        """Create a pod or a cluster by one request; a pod's answer is its row with the price, a cluster's has none."""
        is_cluster = request.offer.nodes > 1
        if is_cluster and (why := self._clusters.missing or (NO_LOGIN if request.login is not None else "")):
            raise NotSupported(why)
        body = request_body(request, self._settings)
        if request.login is not None:
            body["registry"] = await self._logins.id_of(request.login)
        try:
            if is_cluster:
                self._clusters.note_use()
                ref = cluster_ref(await self._client.create_cluster(body, key=request.key))
                made = Instance(ref=ref, key=request.key, state=InstanceState.PENDING, market=Market.ON_DEMAND)
            else:
                made = as_instance(await self._client.create(body, key=request.key), request.key)
        except RestRefused as exc:
            raise refusal_of_create(exc, request, self._unexplained) from exc
        self._unexplained.forget()
        return made

    def _price_limit(self, request: LaunchRequest) -> int:
        """Allow for what is beside the GPUs, too: whether `cost` holds it is not documented."""
        disk = DISK_PRICE * max(request.disk_gb, DISK_GB_MIN) * request.offer.nodes // HOURS_PER_STORAGE_MONTH
        return super()._price_limit(request) + disk + request.offer.storage_fixed

    async def _ask_end(self, ref: InstanceRef) -> None:
        await self._client.delete(str(ref.instance_id), CLUSTERS if ref.scope == CLUSTERS else PODS)


USER_AGENT: Final = "spotd/0.1 (+runpod)"
"""RunPod's edge answers 403 to the default agents of scripting libraries."""


PRIVATE_IMAGES: Final = Capability(
    available=True,
    reason="RunPod keeps the password in your account, and does not say whether the owner of a host can read it",
)
"""Pods name a stored credential by its id (`registry`), and RunPod's list of credentials shows no password."""


def _traits(settings: RunpodSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=is_loopback(settings.base_url),
        ends_itself_by="runpod",
        ends_itself_at=settings.base_url,
        private_images=PRIVATE_IMAGES,
    )


@asynccontextmanager
async def _open(settings: RunpodSettings, services: Services) -> AsyncIterator[Provider]:
    hint = key_setting(PROVIDER)
    agent = {"user-agent": USER_AGENT}
    async with open_keyed_http(settings.base_url, who=WHO, services=services, key_hint=hint, headers=agent) as http:
        client = RunpodClient(http, clock=services.clock, rng=services.rng)
        yield RunpodProvider(client, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="RunPod",
    settings_model=RunpodSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
    powers=CAPABILITIES,
)

"""Kubernetes as a spotd provider: the requests that are its own, and the descriptor.

One attempt is one Job (`machines.py`); nodes and configured pools are the offers (`market.py`). A cluster
sells nothing: what an hour counts as stands in the config. What every provider does alike is in `kit/template.py`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    NotSupported,
    OutcomeUnknown,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.provider import PortConnection, Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    LaunchRequest,
    OfferPage,
    OfferQuery,
    Power,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, all_pages, judge_apart, rejected
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Meaning, RestRefused
from spotd_providers.kit.shapes import ROWS_MAX, listed_reasons
from spotd_providers.kit.template import Check, ProviderTemplate, bound, clock_lines, examine, require_launchable
from spotd_providers.kit.text import last_lines
from spotd_providers.kubernetes.access import Cluster, open_cluster, open_pod_port
from spotd_providers.kubernetes.gangs import as_one, ranks_of
from spotd_providers.kubernetes.machines import (
    GANG_MAX,
    JOB_OF_POD,
    ONCE_EACH,
    Disruption,
    JobObjects,
    as_instance,
    disruption_of,
    job_of,
    owner_of,
    rank_of,
    rows_of,
    secrets_of,
)
from spotd_providers.kubernetes.market import MADE, offers_of, places_of, used_by_node
from spotd_providers.kubernetes.wire import (
    IN_CLUSTER,
    KEY,
    LABEL_INSTALL,
    PROVIDER,
    TAKEN,
    WHO,
    KubernetesSettings,
    child,
    text,
)

SCRIPT_BYTES_MAX: Final = 200_000
KEY_CHARS_MAX: Final = 64
PAGE_ROWS: Final = 250
"""A node takes up to 50 KB, most of it names of images."""
LOG_BYTES_MAX: Final = 256 * 1024
PLACED_WITHIN: Final = timedelta(seconds=20)
"""How long several pods may wait for the places that were counted for them: the scheduler needs a second."""
PLACE_WAIT: Final = timedelta(seconds=1)
POD_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LOGIN: Final = "it travels in a Secret: who may read Secrets of the namespace can read it, and each node of the job"
_MISSING: Final[Mapping[Power, str]] = {
    Power.BID_CHANGE: "a cluster has no bids",
    Power.BALANCE: "a cluster has no balance",
    Power.BILLING: "a cluster keeps no bills; what an hour counts as stands in providers.kubernetes.prices",
    Power.PRICE_HISTORY: "a cluster has no prices of a market",
    Power.REPLACE: "several pods are started as one Job, which begins anew where one is lost",
    Power.STOP_RESUME: "a pod cannot be stopped and resumed",
    Power.CAPACITY_SCORES: "a cluster states what is free, not how likely a start is",
    Power.HOST_IDENTITY: "the cluster decides on which node a job runs",
}
_NO_SHELL: Final = "spotd enters this cluster without a kubeconfig: use kubectl exec with yours"
RIGHTS: Final = (
    ("batch", "jobs", ("create", "get", "list", "delete")),
    ("", "pods", ("get", "list", "delete")),
    ("", "pods/log", ("get",)),
    ("", "secrets", ("create",)),
)
"""What is needed in the namespace."""
WIDE_RIGHTS: Final = (("", "nodes", ("list",)), ("", "pods", ("list",)))
"""What offers of the cluster's own nodes need, in the whole cluster; configured pools need none of it."""
_KEY_HINT: Final = "check providers.kubernetes.kubeconfig and context, or api_key and base_url; try: kubectl get nodes"


class KubernetesProvider(ProviderTemplate):
    """The requests that are the cluster's own."""

    name = PROVIDER
    who = WHO
    nodes_max = GANG_MAX
    machine = "Job"
    ids: ClassVar[re.Pattern[str]] = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}:[A-Za-z0-9-]{1,64}")

    def __init__(self, cluster: Cluster, settings: KubernetesSettings, services: Services) -> None:
        super().__init__(services, cluster.client)
        self._cluster = cluster
        self._client = cluster.client
        self._http = cluster.http
        self._address = cluster.address
        self._settings = settings
        self._had_pod: dict[str, Disruption] = {}
        self._jobs = f"/apis/batch/v1/namespaces/{settings.namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{settings.namespace}/pods"
        self._kubeconfig = str(Path(settings.kubeconfig).expanduser())
        self._has_kubeconfig = settings.base_url is None and settings.kubeconfig != IN_CLUSTER
        missing = _MISSING if self._has_kubeconfig else {**_MISSING, Power.SHELL: _NO_SHELL}
        self.capabilities: Mapping[Power, Capability] = all_but(missing)

    async def account(self) -> str:
        """Return the cluster's address with the namespace: another one's list says nothing of our Jobs."""
        return f"{self._address} {self._settings.namespace}"

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return what nodes have room for, and the configured pools."""
        at = self._services.clock.now()
        nodes, used, whole, note = await self._rooms()
        offers, bad = await judge_apart(partial(offers_of, nodes, used, self._settings), rows=len(nodes))
        asked = tuple(one for one in offers if one.market in query.markets)
        return OfferPage(offers=asked, rejected=listed_reasons(bad), complete=whole, note=note, at=at)

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the last lines of the container's console."""
        await self._require_ours(ref)
        row = await self._row(ref)
        if row is None or not row.pods:
            raise Unavailable(f"{WHO} shows no pod of {ref.instance_id} that could have a console")
        path = f"{self._pods}/{text(child(row.first, 'metadata'), 'name')}/log"
        params: dict[str, str | int] = {"container": "job", "tailLines": lines, "limitBytes": LOG_BYTES_MAX}
        answer = await self._http.read("GET", path, params=params)
        if answer.status != 200:
            raise Unavailable(f"{WHO} gives no console of {ref.instance_id} now (HTTP {answer.status})")
        return last_lines(answer.text.splitlines(), lines)

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return what `kubectl` of the user's computer runs in the pod, with the kubeconfig that spotd uses."""
        one = self._settings
        if not self._has_kubeconfig:
            raise NotSupported(_NO_SHELL)
        name = await self._running_pod(ref)
        context = ("--context", one.context) if one.context else ()
        way = ("kubectl", "--kubeconfig", self._kubeconfig, *context, "-n", one.namespace)
        command = (*way, "exec", "-it", name, "-c", "job", "--", "sh")
        return ShellAddress(host="", port=22, user="kubectl", command=command, no_ports="kubectl leads into the pod")

    async def open_port(self, ref: InstanceRef, port: int) -> PortConnection:
        """Connect to a port of the pod through the API server, as `kubectl port-forward` does."""
        return await open_pod_port(self._cluster, f"{self._pods}/{await self._running_pod(ref)}/portforward", port)

    async def _running_pod(self, ref: InstanceRef) -> str:
        """Return the name of the pod of a Job of ours that runs, the first one of several.

        Raises:
            Unavailable: none does.
        """
        name = text(child((await self._running_row(ref)).first, "metadata"), "name")
        if not POD_NAME.fullmatch(name):
            raise Unavailable(f"{WHO} shows no running pod of {ref.instance_id}")
        return name

    async def check(self) -> Sequence[CheckLine]:
        """Check the way in, the rights one by one, the clock and what can be offered, one line each."""

        async def greet() -> HttpAnswer:
            answer, _ = await self._client.answer("GET", "/version", what="the version")
            await self._may(*RIGHTS[0][:2], "create")  # everybody may read the version; this needs the token
            return answer

        async def rights() -> str:
            wanted = [(group, what, verb) for group, what, verbs in RIGHTS for verb in verbs]
            lacking = [f"{verb} {what}" for group, what, verb in wanted if not await self._may(group, what, verb)]
            if lacking:
                raise AuthFailed(f"in the namespace {self._settings.namespace} it may not: {', '.join(lacking)}")
            await self._require_namespace()
            return f"all that is needed in the namespace {self._settings.namespace}"

        async def nodes() -> str:
            page = await self.offers(OfferQuery())
            reasons = sorted({one.reason for one in page.rejected})
            said = f"{len(page.offers)} offers now" + (f"; not offered: {'; '.join(reasons[:3])}" if reasons else "")
            if not page.offers:
                raise Unavailable(f"{said}; {page.note}" if page.note else said)
            return f"{said}; {page.note}" if page.note else said

        return await examine(
            greet,
            lambda answer: (
                *clock_lines(answer, self._services, who=WHO),
                Check(name="rights", ask=rights, hint="docs/providers/kubernetes.md has the Role that is needed"),
                Check(name="offers", ask=nodes, hint="set providers.kubernetes.prices or pools"),
                CheckLine(name="balance", ok=True, detail=_MISSING[Power.BALANCE]),
            ),
            accepted=f"accepted by {self._address}",
            hint=_KEY_HINT,
            refused=_KEY_HINT,
        )

    async def _page(self, _token: str | None) -> Page:
        selector = {"labelSelector": f"{LABEL_INSTALL}={self._services.install}"}
        jobs, all_jobs = await self._list(self._jobs, "the list of jobs", selector)
        # Pods come second: a Job that appears in between has none yet, and a pod without its Job is one that ends.
        pods, all_pods = await self._list(self._pods, "the list of pods", selector)
        rows = rows_of(jobs, [pod for pod in pods if owner_of(pod) or text(child(pod, "metadata"), "uid") == ""])
        return rows, None if all_jobs and all_pods else ""

    async def _row(self, ref: InstanceRef) -> JobObjects | None:
        name, _, uid = ref.instance_id.partition(":")
        job = await self._client.ask_or_absent("GET", f"{self._jobs}/{name}", what="a job")
        pods, whole = await self._list(self._pods, "the pods of a job", {"labelSelector": f"{JOB_OF_POD}={name}"})
        mine = tuple(pod for pod in pods if owner_of(pod) == uid)
        if job is not None and not text(child(job, "metadata"), "uid"):
            raise Unavailable(f"{WHO}'s answer about job {name} is about none")
        is_same = job is not None and text(child(job, "metadata"), "uid") == uid
        if not is_same and not mine:
            if not whole:
                raise Unavailable(f"{WHO}'s list of the pods of job {name} is incomplete")
            return None
        return JobObjects(job=job if is_same and job is not None else {}, pods=mine)

    def _label(self, raw: Any) -> str | None:
        if not isinstance(raw, JobObjects):
            return None
        return text(raw.annotations, KEY) or raw.name

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        if not isinstance(raw, JobObjects):
            return None
        if raw.pods:
            before = self._had_pod.get(raw.uid, (None, ""))
            found = disruption_of(raw.pods)
            self._had_pod[raw.uid] = before if found[0] is None else found
            bound(self._had_pod)
        now = self._services.clock.now()
        return as_one(raw, key, self._settings, now, had_pod=self._had_pod.get(raw.uid))

    async def _buy(self, request: LaunchRequest) -> Instance:
        require_launchable(
            request,
            who=WHO,
            extra=("where", "asked", "resource"),
            script_bytes_max=SCRIPT_BYTES_MAX,
            key_chars_max=KEY_CHARS_MAX,
        )
        nodes = request.offer.nodes
        counted = nodes > 1 and self._settings.queue is None and not request.offer.pool.startswith(MADE)
        if nodes > GANG_MAX:
            raise rejected(WHO, "offer", f"at most {GANG_MAX} machines are started at once")
        if counted:
            await self._require_places(request)
        body = job_of(request, self._settings)
        try:
            answer = await self._client.buy("POST", self._jobs, body, key=request.key)
        except RestRefused as exc:
            if exc.code == TAKEN:
                raise OutcomeUnknown(f"{WHO} has a Job of this name already", key=request.key) from exc
            if exc.meaning is Meaning.ABSENT:
                # No job is at fault, and none can be started: the list of such a namespace is empty, not an error.
                words = f"{WHO} has no namespace {self._settings.namespace}"
                raise AuthFailed(f"{words}: create it, or set providers.kubernetes.namespace") from exc
            raise exc.of_purchase() from exc
        instance = as_instance(JobObjects(job=answer, pods=()), request.key, self._settings, self._services.clock.now())
        if instance is None:
            raise OutcomeUnknown(f"{WHO}'s answer to a creation names no Job", key=request.key)
        uid = instance.ref.instance_id.partition(":")[2]
        try:
            for secret in secrets_of(request, uid):
                await self._create_secret(secret)
            if nodes > 1:
                await self._require_all(answer, instance.ref, nodes, counted=counted)
        except ProviderError as exc:
            self._own(instance)
            await self._undo(instance.ref, request.key, f"it could not be started as a whole: {exc}")
            raise
        return instance

    async def _require_places(self, request: LaunchRequest) -> None:
        """Count the places: an offer says that there is one, and the scheduler would let the other pods wait.

        Raises:
            NoCapacity: there are not as many.
        """
        nodes, used, _, _ = await self._rooms()
        count = partial(places_of, nodes, used, self._settings, request.offer, request.disk_gb)
        found = await judge_apart(count, rows=len(nodes))
        if found < request.offer.nodes:
            raise NoCapacity(f"{found} places of {request.offer.pool} are free, not {request.offer.nodes}")

    async def _require_all(self, job: Any, ref: InstanceRef, nodes: int, *, counted: bool) -> None:
        """Require that no pod of several is started again, and that each gets the place that was counted for it.

        A pod that is no more had its place: what was lost is for the next list to say.

        Raises:
            NotSupported: the cluster is too old for the first.
            NoCapacity: some were taken by others meanwhile.
        """
        if child(job, "spec").get(ONCE_EACH) != 0:
            raise NotSupported(f"this cluster would start a lost pod of several again: it does not know {ONCE_EACH}")
        until, placed = self._services.clock.now() + PLACED_WITHIN, set[int]()
        while counted:
            try:
                row = await self._row(ref)
            except ProviderError:
                return  # the next list judges it
            if row is None:
                return
            placed |= {rank_of(pod) for pod in row.pods if text(child(pod, "spec"), "nodeName")}
            over = (ranks_of(child(row.job, "status"), name, nodes) for name in ("failed", "completed"))
            if len(placed.union(*over)) >= nodes:
                return
            if self._services.clock.now() >= until:
                raise NoCapacity(f"{len(placed)} of {nodes} pods got a place within {PLACED_WITHIN.seconds} s")
            await self._services.clock.sleep(PLACE_WAIT)

    async def _create_secret(self, secret: Mapping[str, Any]) -> None:
        """Create a Secret; one of this name that is there is that of an earlier try whose answer was lost."""
        path = f"/api/v1/namespaces/{self._settings.namespace}/secrets"
        try:
            await self._client.ask("POST", path, what="creating a secret", json_body=secret)
        except Unavailable as exc:
            if not isinstance(exc.__cause__, RestRefused) or exc.__cause__.code != TAKEN:
                raise

    async def _ask_end(self, ref: InstanceRef) -> None:
        """Delete the Job, then its pods: the cluster's own collection of them may be late, or stand still."""
        name, _, uid = ref.instance_id.partition(":")
        await self._delete(f"{self._jobs}/{name}", uid, "an end")
        pods, _ = await self._list(self._pods, "the pods of a job", {"labelSelector": f"{JOB_OF_POD}={name}"})
        for pod in (one for one in pods if owner_of(one) == uid):
            about = child(pod, "metadata")
            if not text(about, "deletionTimestamp"):
                await self._delete(f"{self._pods}/{text(about, 'name')}", text(about, "uid"), "the end of a pod")

    async def _delete(self, path: str, uid: str, what: str) -> None:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        only = {"preconditions": {"uid": uid}}
        await self._client.ask_or_absent("DELETE", path, what=what, json_body={**body, **only})

    async def _rooms(self) -> tuple[list[Any], Mapping[str, Mapping[str, float]] | None, bool, str]:
        """Return the nodes, what is asked for on each, as far as that may be read, and what `_nodes` says of them."""
        nodes, whole, note = await self._nodes()
        pods = await self._all_pods() if nodes else []
        used = None if pods is None else await judge_apart(partial(used_by_node, pods), rows=len(pods))
        return nodes, used, whole, note

    async def _nodes(self) -> tuple[list[Any], bool, str]:
        """Return the nodes, whether these are all, and a note where they may not be read."""
        try:
            return *await self._list("/api/v1/nodes", "the list of nodes", {}), ""
        except AuthFailed:
            if not self._settings.pools:
                raise
            return [], True, "only configured pools are offered: the nodes may not be listed"

    async def _all_pods(self) -> list[Any] | None:
        """Return the pods of the whole cluster that still ask for something; `None` where they may not be read."""
        params = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
        try:
            pods, whole = await self._list("/api/v1/pods", "the list of all pods", params)
        except AuthFailed:
            return None
        if not whole:
            raise Unavailable(f"{WHO}'s list of all pods is incomplete, so it is not known what is free")
        return pods

    async def _list(self, path: str, what: str, params: Mapping[str, str]) -> tuple[list[Any], bool]:
        """Return the items of all pages, and whether these are all.

        Raises:
            Unavailable: the first page holds no list.
        """

        async def page(token: str | None) -> Page:
            asked: dict[str, str | int] = {**params, "limit": PAGE_ROWS, **({"continue": token} if token else {})}
            answer = await self._client.ask("GET", path, what=what, params=asked)
            rows, following = answer.get("items") or [], child(answer, "metadata").get("continue")
            if not isinstance(rows, list) or not text(answer, "kind").endswith("List"):
                raise Unavailable(f"{WHO}'s answer to {what} holds no list")
            return rows, (following if isinstance(following, str) else "") if following else None

        return await all_pages(page, rows_max=ROWS_MAX)

    async def _require_namespace(self) -> None:
        """Ask for the namespace: in one that is not there rights are granted and lists are empty, until a launch.

        Raises:
            Unavailable: it does not exist.
        """
        name = self._settings.namespace
        try:
            found = await self._client.ask_or_absent("GET", f"/api/v1/namespaces/{name}", what="the namespace")
        except AuthFailed:
            return  # its Role does not let it read this, and there is no Role without a namespace
        if found is None:
            raise Unavailable(f"{WHO} has no namespace {name}: kubectl create namespace {name}")

    async def _may(self, group: str, resource: str, verb: str) -> bool:
        name, _, sub = resource.partition("/")
        asked = {"group": group, "resource": name, "subresource": sub, "verb": verb}
        asked["namespace"] = self._settings.namespace
        version, kind = "authorization.k8s.io/v1", "SelfSubjectAccessReview"
        body = {"apiVersion": version, "kind": kind, "spec": {"resourceAttributes": asked}}
        path = f"/apis/{version}/selfsubjectaccessreviews"
        answer = await self._client.ask("POST", path, what="a question about rights", json_body=body)
        return child(answer, "status").get("allowed") is True


def _traits(settings: KubernetesSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        # A pod waits for a node, which may have to be made, and then pulls the image.
        provision_timeout=settings.schedule_within + timedelta(minutes=30),
        hosts_share_filesystem=settings.base_url is not None and is_loopback(settings.base_url),
        private_images=Capability(available=True, reason=_LOGIN),
        bills_from_running=True,
        bills_from_script=True,
        # What an autoscaler makes for a pod is rented by the hour.
        owned=not settings.pools,
    )


@asynccontextmanager
async def _open(settings: KubernetesSettings, services: Services) -> AsyncIterator[Provider]:
    async with open_cluster(settings, services) as cluster:
        yield KubernetesProvider(cluster, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Kubernetes",
    settings_model=KubernetesSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
    powers={**all_but(_MISSING), Power.SHELL: Capability(available=True, reason="with a kubeconfig")},
    tried="a real API server with pretended nodes",
)

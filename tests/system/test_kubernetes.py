"""The Kubernetes provider on a real control plane: what its controllers do to our Jobs, and what we make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog

from spotd_providers.contract.errors import (
    AuthFailed,
    OutcomeUnknown,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    Instance,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    OfferQuery,
)
from spotd_providers.kubernetes import plugin
from spotd_providers.kubernetes.access import open_pod_port
from spotd_providers.kubernetes.plugin import PLUGIN, RIGHTS, WIDE_RIGHTS, KubernetesProvider
from tests.system.engines.kube import H100, Kube, KubeNode, running_kube

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
INSTALL = InstallId("lab")
SPOT = {**H100, "karpenter.sh/capacity-type": "spot"}
NUMBERS = count(1)
Story = Callable[[KubernetesProvider], Awaitable[None]]


class RealClock:
    """Time as it is."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, duration: timedelta) -> None:
        await asyncio.sleep(duration.total_seconds())

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with running_kube(tmp_path_factory.mktemp("kube")) as found:
        for name, labels in (("own-1", H100), ("spot-1", SPOT)):
            found.add_node(KubeNode(name=name, labels=labels, allocatable=room("2")))
        yield found


@pytest.fixture
def kube(started: Kube) -> Kube:
    started.empty("own-1", "spot-1")
    return started


def room(gpus: str) -> dict[str, str]:
    return {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": gpus, "ephemeral-storage": "200Gi", "pods": "100"}


def play(kube: Kube, folder: Path, story: Story, token: str = "admin-token", **more: Any) -> None:  # noqa: S107 - of the test's own server
    """Open the provider in this control plane and play the story."""
    settings = PLUGIN.settings_model(
        kubeconfig=str(kube.kubeconfig(token)), prices=[{"gpu": "h100", "price": "1.20"}], **more
    )
    services = Services(install=INSTALL, clock=RealClock(), rng=Random(1), log=structlog.get_logger(), state_dir=folder)

    async def main() -> None:
        async with PLUGIN.open(settings, services) as provider:
            assert isinstance(provider, KubernetesProvider)
            await story(provider)

    asyncio.run(main())


async def ask_for(provider: KubernetesProvider, market: Market = Market.ON_DEMAND, gpus: int = 1) -> LaunchRequest:
    page = await provider.offers(OfferQuery())
    offer = next(one for one in page.offers if one.market is market and one.gpu_count == gpus)
    key = AttemptKey(f"spotd-lab.test-j{next(NUMBERS)}-1")
    return LaunchRequest(
        key=key, install=INSTALL, offer=offer, price_max=offer.gpu_price, image="busybox", disk_gb=5,
        start_script="echo https://store.example/grant?signature=secret",
    )  # fmt: skip


async def seen(provider: KubernetesProvider, key: AttemptKey, what: Callable[[Instance], bool]) -> Instance:
    """Return the machine of this key once it is as expected."""
    for _ in range(600):
        found = await provider.find(key)
        if found and what(found[0]):
            return found[0]
        await asyncio.sleep(0.2)
    pytest.fail(f"{key} did not get there: {await provider.find(key)}")


async def listed_as_gone(provider: KubernetesProvider, key: AttemptKey) -> Instance:
    for _ in range(300):
        for one in (await provider.instances()).instances:
            if one.key == key and one.state is InstanceState.GONE:
                return one
        await asyncio.sleep(0.2)
    pytest.fail(f"{key} is not listed as gone: {await provider.instances()}")


async def gone(provider: KubernetesProvider, key: AttemptKey) -> None:
    for _ in range(300):
        listing = await provider.instances()
        if listing.complete and all(one.key != key for one in listing.instances):
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"{key} is still listed: {await provider.instances()}")


def is_running(one: Instance) -> bool:
    return one.state is InstanceState.RUNNING


def test_a_job_is_one_machine_from_its_creation_to_the_end_of_its_pod(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        again = await seen(provider, request.key, is_running)
        assert again.ref == made.ref
        assert again.host_id == "own-1"
        assert again.price == 1_200_000
        pod = next(one for one in kube.pods() if one["metadata"]["name"].startswith(request.key))
        assert "secret" not in str(pod["spec"]["containers"][0].get("env"))
        assert "signature" not in str(pod)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert len(await provider.find(request.key)) == 1
        assert kube.secrets()
        await provider.terminate(made.ref)
        await gone(provider, request.key)
        await provider.terminate(made.ref)
        # The cluster deletes what the Job owned piece by piece, and a pod may go before a Secret.
        await asyncio.to_thread(kube.wait_until, lambda: not kube.secrets())

    play(kube, tmp_path, story)


def test_a_job_that_ends_by_itself_is_gone_with_its_exit_code(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        kube.end_pod(next(p["metadata"]["name"] for p in kube.pods() if request.key in p["metadata"]["name"]), 3)
        over = await listed_as_gone(provider, request.key)
        assert over.loss is Loss.SELF
        assert "3" in over.detail
        assert await provider.find(request.key) == ()
        await provider.terminate(made.ref)

    play(kube, tmp_path, story)


def test_a_pod_that_a_higher_priority_takes_away_gets_a_notice_and_is_preempted(kube: Kube, tmp_path: Path) -> None:
    kube.ask(
        "POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "urgent"}, "value": 1000}
    )  # fmt: skip
    kube.nodes["spot-1"].alive = True

    async def story(provider: KubernetesProvider) -> None:
        victim = await ask_for(provider, Market.SPOT, 2)
        await provider.launch(victim)
        await seen(provider, victim.key, is_running)
        node, node.alive = kube.nodes["spot-1"], False  # its kubelet takes a while to end the container
        body = {
            "metadata": {"name": "urgent-1", "namespace": "spotd"},
            "spec": {
                "priorityClassName": "urgent", "nodeSelector": {"karpenter.sh/capacity-type": "spot"},
                "containers": [{"name": "job", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "2"}}}],
            },
        }  # fmt: skip
        kube.ask("POST", "/api/v1/namespaces/spotd/pods", body)
        noticed = await seen(provider, victim.key, lambda one: one.notice_at is not None)
        assert noticed.state is InstanceState.RUNNING
        assert "PreemptionByScheduler" in noticed.detail
        node.alive = True
        over = await listed_as_gone(provider, victim.key)
        assert over.loss is Loss.PREEMPTED
        await provider.terminate(over.ref)
        kube.ask("DELETE", "/api/v1/namespaces/spotd/pods/urgent-1", {"gracePeriodSeconds": 0})
        await gone(provider, victim.key)

    play(kube, tmp_path, story)


def test_a_node_that_says_nothing_keeps_its_pod_listed_and_ends_it_late(kube: Kube, tmp_path: Path) -> None:
    kube.add_node(
        KubeNode(name="lost-1", labels={**H100, "topology.kubernetes.io/zone": "lost"}, allocatable=room("1"))
    )

    async def story(provider: KubernetesProvider) -> None:
        page = await provider.offers(OfferQuery())
        offer = next(one for one in page.offers if "lost" in one.pool)
        request = replace(await ask_for(provider), offer=offer)
        made = (await provider.launch(request)).instance
        running = await seen(provider, request.key, is_running)
        assert running.host_id == "lost-1"
        kube.nodes["lost-1"].alive = False
        await asyncio.to_thread(
            kube.wait_until, lambda: any(t["effect"] == "NoExecute" for t in _taints(kube, "lost-1"))
        )  # fmt: skip
        page = await provider.offers(OfferQuery())
        assert not [one for one in page.offers if "lost" in one.pool]
        await provider.terminate(made.ref)
        listed = [one for one in (await provider.instances()).instances if one.key == request.key]
        assert [one.state for one in listed] == [InstanceState.ENDING], "release is not proved by the Job's deletion"
        kube.ask("DELETE", "/api/v1/nodes/lost-1")
        kube.nodes.pop("lost-1")
        name = next(p["metadata"]["name"] for p in kube.pods() if request.key in p["metadata"]["name"])
        kube.ask("DELETE", f"/api/v1/namespaces/spotd/pods/{name}", {"gracePeriodSeconds": 0})
        await gone(provider, request.key)

    play(kube, tmp_path, story)


def _taints(kube: Kube, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kube.ask("GET", f"/api/v1/nodes/{name}")["spec"].get("taints", [])
    return found


def test_a_full_cluster_offers_nothing_and_a_pod_that_waits_too_long_is_given_up(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        both = await ask_for(provider, gpus=2)
        other = await ask_for(provider, gpus=1)
        await provider.launch(both)
        await seen(provider, both.key, is_running)
        page = await provider.offers(OfferQuery())
        assert {one.market for one in page.offers} == {Market.SPOT}
        late = (await provider.launch(other)).instance
        waiting = await seen(provider, other.key, lambda one: "nodes are available" in one.detail)
        assert waiting.state is InstanceState.PENDING
        in_an_hour = datetime.now(UTC) + timedelta(hours=1)
        object.__setattr__(provider._services, "clock", Later(in_an_hour))
        given_up = next(one for one in await provider.find(other.key))
        assert (given_up.state, given_up.loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        await provider.terminate(late.ref)
        await provider.terminate((await provider.find(both.key))[0].ref)
        await gone(provider, both.key)

    play(kube, tmp_path, story)


class Later(RealClock):
    """Time as it will be."""

    def __init__(self, at: datetime) -> None:
        self._ahead = at - datetime.now(UTC)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead


def test_a_job_that_its_queue_suspends_again_is_preempted(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        queued = await seen(provider, request.key, lambda one: "queue" in one.detail)
        assert queued.state is InstanceState.PENDING
        path = f"/apis/batch/v1/namespaces/spotd/jobs/{request.key}"

        def suspend(value: bool) -> None:
            kube.ask("PATCH", path, {"spec": {"suspend": value}}, kind="application/merge-patch+json")

        suspend(False)
        await seen(provider, request.key, is_running)
        await asyncio.sleep(1)
        suspend(True)
        taken = await seen(provider, request.key, lambda one: one.state is not InstanceState.RUNNING)
        assert (taken.state, taken.loss) == (InstanceState.PAUSED, Loss.PREEMPTED)
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, story, queue="gpu")


def test_a_list_that_grew_too_old_between_two_pages_proves_no_absence(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(provider: KubernetesProvider) -> None:
        first, second = await ask_for(provider, Market.SPOT), await ask_for(provider, Market.SPOT)
        await provider.launch(first)
        await provider.launch(second)
        monkeypatch.setattr(plugin, "PAGE_ROWS", 1)
        whole = await provider.instances()
        assert whole.complete
        assert {one.key for one in whole.instances} == {first.key, second.key}
        ask, pages = provider._client.ask, count()

        async def forgetful(method: str, path: str, **options: Any) -> Any:
            answer = await ask(method, path, **options)
            if path.endswith("/jobs") and not next(pages):
                kube.ask(
                    "PATCH",
                    "/api/v1/namespaces/spotd",
                    {"metadata": {"labels": {"a": "b"}}},
                    kind="application/merge-patch+json",
                )
                kube.forget_the_past()
            return answer

        monkeypatch.setattr(provider._client, "ask", forgetful)
        torn = await provider.instances()
        assert not torn.complete or {one.key for one in torn.instances} == {first.key, second.key}
        monkeypatch.undo()
        for key in (first.key, second.key):
            await provider.terminate((await provider.find(key))[0].ref)
            await gone(provider, key)

    play(kube, tmp_path, story)


def test_an_api_server_that_restarts_is_unavailable_and_then_says_the_same(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        kube.end("kube-apiserver")
        with pytest.raises(Unavailable):
            await provider.instances()
        with pytest.raises(Unavailable):
            await provider.launch(replace(request, key=AttemptKey("spotd-lab.test-jx-1")))
        await asyncio.to_thread(kube.restart_api)
        assert (await seen(provider, request.key, is_running)).ref == made.ref
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, story)


def test_the_stated_rights_are_enough_and_without_them_doctor_names_what_lacks(kube: Kube, tmp_path: Path) -> None:
    async def lacking(provider: KubernetesProvider) -> None:
        lines = {line.name: line for line in await provider.check()}
        assert not lines["rights"].ok
        assert "create jobs" in lines["rights"].detail
        with pytest.raises(AuthFailed):
            await provider.instances()

    play(kube, tmp_path, lacking, token="least-token")
    _grant(kube)

    async def enough(provider: KubernetesProvider) -> None:
        lines = {line.name: line for line in await provider.check()}
        assert all(line.ok for line in lines.values()), lines
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, enough, token="least-token")


def _grant(kube: Kube) -> None:
    """Give the least rights that the provider states to a user who has none."""
    api = "/apis/rbac.authorization.k8s.io/v1"
    rules = [{"apiGroups": [g], "resources": [r], "verbs": list(v)} for g, r, v in RIGHTS]
    wide = [{"apiGroups": [g], "resources": [r], "verbs": list(v)} for g, r, v in WIDE_RIGHTS]
    subjects = [{"kind": "User", "name": "least", "apiGroup": "rbac.authorization.k8s.io"}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "spotd"}
    space = f"{api}/namespaces/spotd"
    kube.ask("POST", f"{space}/roles", {"metadata": {"name": "spotd"}, "rules": rules})
    kube.ask("POST", f"{space}/rolebindings", {"metadata": {"name": "spotd"}, "roleRef": role, "subjects": subjects})
    kube.ask("POST", f"{api}/clusterroles", {"metadata": {"name": "spotd"}, "rules": wide})
    bound = {"metadata": {"name": "spotd"}, "roleRef": {**role, "kind": "ClusterRole"}, "subjects": subjects}
    kube.ask("POST", f"{api}/clusterrolebindings", bound)


def test_a_quota_and_a_policy_of_the_cluster_are_refusals_and_not_a_wrong_key(kube: Kube, tmp_path: Path) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    kube.ask("POST", "/api/v1/namespaces/spotd/resourcequotas", quota)

    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        await asyncio.to_thread(
            kube.wait_until,
            lambda: bool(kube.ask("GET", "/api/v1/namespaces/spotd/resourcequotas/few").get("status", {}).get("hard")),
        )
        with pytest.raises(QuotaExceeded):
            await provider.launch(request)
        kube.ask("DELETE", "/api/v1/namespaces/spotd/resourcequotas/few")
        with pytest.raises(RequestRejected):
            await provider.launch(replace(request, image=""))
        assert await provider.find(request.key) == ()

    play(kube, tmp_path, story)


def test_a_port_that_the_cluster_gives_no_way_to_is_refused_in_its_words(kube: Kube, tmp_path: Path) -> None:
    """There is no kubelet, so every way ends at the API server."""
    path = "/api/v1/namespaces/spotd/pods/nope/portforward"

    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        with pytest.raises(Unavailable, match=r"port 6006 of the pod \(HTTP 500\) no preferred addresses found"):
            await provider.open_port(made.ref, 6006)
        with pytest.raises(Unavailable, match=r'\(HTTP 404\) pods "nope" not found'):
            await open_pod_port(provider._cluster, path, 6006)
        with pytest.raises(Unavailable, match=r"\(HTTP 200\)"):  # an answer without an upgrade, as of a proxy
            await open_pod_port(provider._cluster, "/api/v1/namespaces/spotd/pods", 6006)
        kube.end("kube-apiserver")
        with pytest.raises(Unavailable, match="gives no way to port 6006 of the pod"):
            await open_pod_port(provider._cluster, path, 6006)
        await asyncio.to_thread(kube.restart_api)
        await provider.terminate(made.ref)
        await gone(provider, request.key)
        with pytest.raises(Unavailable, match="does not run"):
            await provider.open_port(made.ref, 6006)

    play(kube, tmp_path, story)
    for token, words in (("least-token", "does not allow: create pods/portforward"), ("no-token", "does not take the")):

        async def refused(provider: KubernetesProvider, words: str = words) -> None:
            with pytest.raises(AuthFailed, match=words):
                await open_pod_port(provider._cluster, path, 6006)

        play(kube, tmp_path, refused, token=token)


def test_a_job_that_a_finalizer_keeps_is_listed_until_its_pod_is_gone_and_a_while(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        path = f"/apis/batch/v1/namespaces/spotd/jobs/{request.key}"
        kube.ask("PATCH", path, {"metadata": {"finalizers": ["example.com/hold"]}}, kind="application/merge-patch+json")
        await provider.terminate(made.ref)
        await asyncio.to_thread(kube.wait_until, lambda: not kube.pods())
        assert kube.ask("GET", path)["metadata"]["deletionTimestamp"]
        object.__setattr__(provider._services, "clock", Later(datetime.now(UTC) + timedelta(minutes=2)))
        assert await provider.find(request.key) == ()
        over = await listed_as_gone(provider, request.key)
        assert over.ref == made.ref
        kube.ask("PATCH", path, {"metadata": {"finalizers": None}}, kind="application/merge-patch+json")

    play(kube, tmp_path, story)


def test_a_namespace_that_is_deleted_takes_no_job_and_its_machines_end_with_their_pods(
    kube: Kube, tmp_path: Path
) -> None:
    kube.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "short"}})

    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        node = kube.nodes[str((await provider.find(request.key))[0].host_id)]
        node.alive = False
        kube.ask("DELETE", "/api/v1/namespaces/short")
        other = replace(request, key=AttemptKey(f"{request.key[:-1]}2"))
        with pytest.raises(AuthFailed, match="it is being terminated"):
            await provider.launch(other)
        leaving = await seen(provider, request.key, lambda one: not is_running(one) or one.notice_at is not None)
        assert leaving.ref == made.ref
        node.alive = True
        await gone(provider, request.key)
        await asyncio.to_thread(kube.wait_until, lambda: kube.ask("GET", "/api/v1/namespaces/short").get("code") == 404)
        with pytest.raises(AuthFailed, match="has no namespace short"):
            await provider.launch(other)
        [rights] = [line for line in await provider.check() if line.name == "rights"]
        assert (rights.ok, rights.detail) == (
            False, "Kubernetes has no namespace short: kubectl create namespace short",
        )  # fmt: skip

    play(kube, tmp_path, story, namespace="short")

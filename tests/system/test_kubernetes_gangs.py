"""Several pods as one on a real control plane: what is done to them, and what we make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import NoCapacity
from spotd_providers.contract.values import Instance, InstanceState, LaunchRequest, Loss
from spotd_providers.kubernetes.plugin import KubernetesProvider
from spotd_providers.testkit.behaviours.gangs import gang_of
from tests.system.engines.kube import H100, Kube, KubeNode, running_kube
from tests.system.test_kubernetes import Later, ask_for, gone, is_running, listed_as_gone, play, room, seen

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
RANK = "batch.kubernetes.io/job-completion-index"
PODS = "/api/v1/namespaces/spotd/pods"
JOBS = "/apis/batch/v1/namespaces/spotd/jobs"
RUNNING, PENDING, PAUSED = InstanceState.RUNNING, InstanceState.PENDING, InstanceState.PAUSED


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with running_kube(tmp_path_factory.mktemp("kube")) as found:
        for name in ("one", "two"):
            found.add_node(KubeNode(name=name, labels=H100, allocatable=room("2")))
        yield found


@pytest.fixture
def kube(started: Kube) -> Kube:
    started.empty("one", "two")
    return started


async def ask_for_all(provider: KubernetesProvider, nodes: int = 2, gpus: int = 2) -> LaunchRequest:
    request = await ask_for(provider, gpus=gpus)
    offer = gang_of(request.offer, nodes)
    return replace(request, offer=offer, price_max=offer.gpu_price)


def ranks(kube: Kube) -> dict[str, str]:
    """Return by rank the name of each pod of ours."""
    pods = (pod for pod in kube.pods() if RANK in pod["metadata"].get("annotations", {}))
    return {pod["metadata"]["annotations"][RANK]: pod["metadata"]["name"] for pod in pods}


def taker(gpus: int) -> dict[str, Any]:
    container = {"name": "job", "image": "x", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"metadata": {"name": "other", "namespace": "spotd"}, "spec": {"containers": [container]}}


def test_two_pods_get_ranks_and_places_and_end_as_one(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        made = (await provider.launch(request)).instance
        found = await seen(provider, request.key, is_running)
        assert (found.ref, found.price, found.notice_at) == (made.ref, 4 * 1_200_000, None)
        pods = [pod for pod in kube.pods() if RANK in pod["metadata"]["annotations"]]
        assert sorted(pod["metadata"]["annotations"][RANK] for pod in pods) == ["0", "1"]
        assert {pod["spec"]["nodeName"] for pod in pods} == {"one", "two"}
        assert "signature" not in str(pods)
        assert kube.secrets()
        await provider.terminate(made.ref)
        await gone(provider, request.key)
        assert not ranks(kube)
        # The cluster deletes what the Job owned piece by piece, and a pod may go before a Secret.
        await asyncio.to_thread(kube.wait_until, lambda: not kube.secrets())

    play(kube, tmp_path, story)


def test_more_than_the_cluster_has_room_for_is_refused_and_nothing_is_created(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        with pytest.raises(NoCapacity, match="2 places of"):
            await provider.launch(await ask_for_all(provider, nodes=3))
        assert kube.ask("GET", JOBS)["items"] == []

    play(kube, tmp_path, story)


def test_a_place_that_another_takes_in_between_undoes_all_of_them(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        buy = provider._client.buy

        async def late(*args: Any, **options: Any) -> Any:
            kube.ask("POST", PODS, taker(2))
            await asyncio.to_thread(
                kube.wait_until, lambda: any(pod["spec"].get("nodeName") for pod in kube.pods())
            )  # fmt: skip
            return await buy(*args, **options)

        monkeypatch.setattr(provider._client, "buy", late)
        with pytest.raises(NoCapacity, match="1 of 2 pods got a place"):
            await provider.launch(request)
        await gone(provider, request.key)
        assert kube.ask("GET", JOBS)["items"] == []
        assert not ranks(kube)
        assert [pod["metadata"]["name"] for pod in kube.pods()] == ["other"], "what is another's stays"

    play(kube, tmp_path, story)


def test_what_a_daemon_left_half_placed_is_found_as_one_row_and_given_up(kube: Kube, tmp_path: Path) -> None:
    kube.ask("POST", PODS, taker(2))
    kube.wait_until(lambda: any(pod["spec"].get("nodeName") for pod in kube.pods()))

    async def bought(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        requests.append(request)
        provider._rooms = everything_free  # type: ignore[method-assign]  # what was counted a moment ago
        launch = asyncio.create_task(provider.launch(request))
        await asyncio.to_thread(kube.wait_until, lambda: len(ranks(kube)) == 2)
        launch.cancel()  # the daemon dies while it waits for the places

    async def everything_free() -> Any:
        nodes = kube.ask("GET", "/api/v1/nodes")["items"]
        return nodes, None, True, ""

    async def story(provider: KubernetesProvider) -> None:
        (request,) = requests
        waits = await seen(provider, request.key, lambda one: "nodes are available" in one.detail)
        assert waits.state is PENDING
        object.__setattr__(provider._services, "clock", Later(datetime.now(UTC) + timedelta(hours=1)))
        (late,) = await provider.find(request.key)
        assert (late.state, late.loss) == (PAUSED, Loss.NO_CAPACITY)
        await provider.terminate(late.ref)
        await gone(provider, request.key)
        assert not ranks(kube)

    requests: list[LaunchRequest] = []
    play(kube, tmp_path, bought)
    play(kube, tmp_path, story)


def test_a_pod_of_two_that_is_evicted_is_announced_and_never_replaced(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        before = ranks(kube)
        name = before["1"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "spotd"}}
        kube.ask("POST", f"{PODS}/{name}/eviction", eviction)
        job = f"{JOBS}/{made.ref.instance_id.partition(':')[0]}"
        await asyncio.to_thread(kube.wait_until, lambda: kube.ask("GET", job)["status"].get("failedIndexes") == "1")
        noticed = await seen(provider, request.key, lambda one: one.notice_at is not None)
        assert (noticed.state, noticed.ref) == (RUNNING, made.ref)
        assert "machine 2 of 2" in noticed.detail
        kube.end_pod(before["0"], 0)
        over = await listed_as_gone(provider, request.key)
        assert over.loss in (Loss.PREEMPTED, Loss.SELF, Loss.HOST_LOST)
        assert ranks(kube).keys() <= {"0"}, "the Job controller started it again"
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, story)


def test_the_end_of_the_second_ends_neither_the_first_nor_the_row(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        made = (await provider.launch(request)).instance
        await seen(provider, request.key, is_running)
        names = ranks(kube)
        job = f"{JOBS}/{made.ref.instance_id.partition(':')[0]}"

        async def end(rank: str, code: int, field: str) -> Instance:
            kube.end_pod(names[rank], code)
            await asyncio.to_thread(kube.wait_until, lambda: kube.ask("GET", job)["status"].get(field) == rank)
            return next(one for one in (await provider.instances()).instances if one.key == request.key)

        still = await end("1", 0, "completedIndexes")
        assert (still.state, still.notice_at) == (RUNNING, None)
        kube.end_pod(names["0"], 0)
        assert (await listed_as_gone(provider, request.key)).loss is Loss.SELF
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, story)


def test_a_quota_that_has_room_for_one_pod_undoes_both(kube: Kube, tmp_path: Path) -> None:
    quota = f"{PODS.rpartition('/')[0]}/resourcequotas"
    kube.ask("POST", quota, {"metadata": {"name": "one-pod"}, "spec": {"hard": {"pods": "1"}}})
    kube.wait_until(lambda: bool(kube.ask("GET", f"{quota}/one-pod").get("status", {}).get("hard")))

    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        with pytest.raises(NoCapacity, match="1 of 2 pods got a place"):
            await provider.launch(request)
        await gone(provider, request.key)
        assert not ranks(kube)

    play(kube, tmp_path, story)


def test_a_queue_suspends_two_until_it_has_room_and_takes_both_back(kube: Kube, tmp_path: Path) -> None:
    async def story(provider: KubernetesProvider) -> None:
        request = await ask_for_all(provider)
        made = (await provider.launch(request)).instance
        job = f"{JOBS}/{made.ref.instance_id.partition(':')[0]}"

        def suspend(value: bool) -> None:
            kube.ask("PATCH", job, {"spec": {"suspend": value}}, kind="application/merge-patch+json")

        assert (await seen(provider, request.key, lambda one: "queue" in one.detail)).state is PENDING
        assert not ranks(kube)
        suspend(False)
        await seen(provider, request.key, is_running)
        suspend(True)
        taken = await seen(provider, request.key, lambda one: one.state is PAUSED)
        assert taken.loss is Loss.PREEMPTED
        await provider.terminate(made.ref)
        await gone(provider, request.key)

    play(kube, tmp_path, story, queue="gpu")

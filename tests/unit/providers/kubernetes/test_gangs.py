"""Several pods of one Job: all of them get a place or none, and their rows are one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from spotd_providers.contract.errors import NoCapacity, NotSupported, RequestRejected
from spotd_providers.contract.values import Billing, Instance, InstanceRef, InstanceState, LaunchRequest, Loss
from spotd_providers.kubernetes.gangs import as_one
from spotd_providers.kubernetes.machines import GANG_MAX, JobObjects, job_name, job_of, secrets_of
from spotd_providers.kubernetes.market import offers_of, places_of, used_by_node
from spotd_providers.kubernetes.plugin import KubernetesProvider
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.clock import until
from spotd_providers.testkit.serve import Call, Canned
from tests.cases import every
from tests.fakes.kubernetes import KubeQuirks
from tests.unit.providers.kubernetes.harness import KubernetesHarness, play
from tests.unit.providers.kubernetes.test_objects import (
    JUNK,
    KEY,
    LEAVING,
    NOW,
    OVERDUE,
    SETTINGS,
    _at,
    condition,
    disrupted,
    ended,
    node,
    offer,
    own_pod,
    pod,
    request,
    unplaced,
    waiting,
)

RANK = "batch.kubernetes.io/job-completion-index"
PENDING, RUNNING, PAUSED = InstanceState.PENDING, InstanceState.RUNNING, InstanceState.PAUSED
ENDING, GONE = InstanceState.ENDING, InstanceState.GONE


# What is asked of the cluster.


def gang_request(nodes: int = 2) -> LaunchRequest:
    one = gang_of(offer(), nodes)
    return replace(request(), offer=one, price_max=one.gpu_price)


def test_several_pods_are_one_job_that_starts_none_of_them_again_and_costs_what_all_do() -> None:
    job = job_of(gang_request(3), SETTINGS)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimitPerIndex"] == 0
    assert not {"backoffLimit", "podFailurePolicy"} & spec.keys(), "one's end must not end the first, which saves"
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert job["metadata"]["annotations"]["spotd.dev/price"] == str(3 * 2_000_000)
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert fields == {"SPOTD_NODE_RANK": f"metadata.annotations['{RANK}']", "SPOTD_NODE_ADDRESS": "status.podIP"}
    secret, *_ = secrets_of(gang_request(3), "u-1")
    assert secret["metadata"]["name"] == secret["metadata"]["ownerReferences"][0]["name"] == job["metadata"]["name"]


def test_the_name_of_several_can_be_a_host_name_with_any_rank_behind_it() -> None:
    keys = (KEY, KEY.replace(".", "-"), "spotd-" + "x" * 40 + ".y-j1-1", "spotd-" + "x" * 40 + ".z-j1-1")
    names = [job_name(key, 2) for key in keys]
    assert len(set(names)) == len(keys)
    assert all("." not in name and len(f"{name}-{GANG_MAX - 1}") <= 63 for name in names)


@every(
    ("busy", "gpus_each", "places"),
    [({}, 1, 16), ({}, 4, 4), ({"n1": 5}, 1, 11), ({"n1": 5}, 4, 2), ({"n1": 8, "n2": 8}, 1, 0)],
)
def test_places_are_counted_by_what_each_node_has_left(busy: Mapping[str, int], gpus_each: int, places: int) -> None:
    nodes = [node("n1"), node("n2"), node("other", topology_kubernetes_io__zone="b")]
    one = next(o for o in offers_of(nodes[:2], {}, SETTINGS)[0] if o.gpu_count == gpus_each)
    used = used_by_node([pod(name, gpus) for name, gpus in busy.items()])
    assert places_of(nodes, used, SETTINGS, gang_of(one, 2), 20) == places
    full = {name: {"ephemeral-storage": 2**40} for name in ("n1", "n2")}
    assert places_of(nodes, full, SETTINGS, gang_of(one, 2), 20) == 0


# What the cluster says of them.


def gang_job(**status: Any) -> dict[str, Any]:
    made = job_of(gang_request(), SETTINGS)
    made["metadata"] |= {"uid": "u-1", "creationTimestamp": _at(timedelta(minutes=30))}
    return {**made, "status": {"startTime": _at(timedelta(minutes=5)), **status}}


def member(rank: int, like: dict[str, Any] | None = None) -> dict[str, Any]:
    made = copy.deepcopy(own_pod() if like is None else like)
    made["metadata"] |= {"uid": f"p-{rank}", "annotations": {RANK: str(rank)}}
    made["spec"]["nodeName"] = f"n{rank}"
    return made


def shown(pods: list[dict[str, Any]], job: dict[str, Any] | None = None, had_pod: Any = None) -> Instance:
    row = JobObjects(job=gang_job() if job is None else job, pods=tuple(pods))
    found = as_one(row, KEY, SETTINGS, NOW, had_pod=had_pod)
    assert found is not None
    assert found.ref.instance_id.endswith(":u-1")
    return found


UP, LEAVES, LATE = own_pod(), own_pod(**LEAVING), own_pod(**OVERDUE)
STARTS, NO_PLACE, NO_PLACE_YET = waiting("ContainerCreating"), unplaced(11), unplaced(9)
DONE, FAILED, TAKEN = ended(0, "Completed"), ended(137, "OOMKilled"), disrupted("PreemptionByScheduler")
IMAGE = waiting("ImagePullBackOff")


@every(
    ("first", "second", "state", "loss", "has_notice"),
    [
        (UP, UP, RUNNING, None, False),
        (NO_PLACE_YET, NO_PLACE_YET, PENDING, None, False),
        (NO_PLACE_YET, NO_PLACE, PAUSED, Loss.NO_CAPACITY, False),
        (UP, NO_PLACE, PAUSED, Loss.NO_CAPACITY, False),
        (NO_PLACE, UP, PAUSED, Loss.NO_CAPACITY, False),
        (UP, NO_PLACE_YET, PENDING, None, False),
        (UP, STARTS, PENDING, None, False),
        (DONE, STARTS, PAUSED, Loss.SELF, False),
        (STARTS, DONE, PENDING, None, False),
        (UP, IMAGE, PAUSED, Loss.IMAGE_ERROR, False),
        (UP, LEAVES, RUNNING, None, True),
        (LEAVES, UP, RUNNING, None, True),
        (UP, LATE, RUNNING, None, True),
        (UP, TAKEN, RUNNING, None, True),
        (UP, FAILED, RUNNING, None, True),
        (UP, DONE, RUNNING, None, False),
        (STARTS, TAKEN, PAUSED, Loss.PREEMPTED, False),
        (STARTS, FAILED, PAUSED, Loss.SELF, False),
        (TAKEN, UP, PAUSED, Loss.PREEMPTED, False),
        (DONE, UP, PAUSED, Loss.SELF, False),
        (DONE, DONE, GONE, Loss.SELF, False),
        (TAKEN, DONE, GONE, Loss.HOST_LOST, False),
        (TAKEN, TAKEN, GONE, Loss.PREEMPTED, False),
    ],
)
def test_two_pods_are_one_state(
    first: dict[str, Any], second: dict[str, Any], state: InstanceState, loss: Loss | None, has_notice: bool
) -> None:
    found = shown([member(1, second), member(0, first)])
    assert (found.state, found.loss, found.notice_at is not None) == (state, loss, has_notice)


@every(("first", "second"), [(TAKEN, UP), (UP, NO_PLACE), (UP, IMAGE), (LATE, UP)])
def test_what_cannot_go_on_as_a_whole_costs_what_all_do_while_one_runs(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    found = shown([member(0, first), member(1, second)])
    assert (found.state, found.billing) == (PAUSED, Billing.FULL)
    assert shown([member(0, IMAGE), member(1, NO_PLACE)]).billing is not Billing.FULL


FAILED_1 = {"failedIndexes": "1"}
FAILED_INDEXES = condition("Failed", "FailedIndexes")
SUSPENDED = [condition("Suspended", "JobSuspended", ago=timedelta(minutes=1))]


@every(
    ("status", "there", "state", "loss", "has_notice"),
    [
        ({}, [0], PENDING, None, False),
        ({}, [1], PENDING, None, False),
        ({"startTime": _at(timedelta(minutes=11))}, [0], PAUSED, Loss.NO_CAPACITY, False),
        (FAILED_1, [0], RUNNING, None, True),
        ({"failedIndexes": "0"}, [1], PAUSED, Loss.HOST_LOST, False),
        ({"completedIndexes": "1"}, [0], RUNNING, None, False),
        ({"failedIndexes": "0-1", "conditions": [FAILED_INDEXES]}, [], GONE, Loss.HOST_LOST, False),
        ({"failedIndexes": "x,٣,9-99999,1-"}, [0], RUNNING, None, True),
    ],
)  # fmt: skip
def test_a_pod_that_is_no_more_counts_as_its_job_says(
    status: dict[str, Any], there: list[int], state: InstanceState, loss: Loss | None, has_notice: bool
) -> None:
    found = shown([member(rank) for rank in there], gang_job(**status))
    assert (found.state, found.loss, found.notice_at is not None) == (state, loss, has_notice)


@given(JUNK, JUNK)
def test_whatever_a_job_and_its_pods_say_nothing_falls(of_job: Any, of_pod: Any) -> None:
    shown([member(0), {**member(1), "status": of_pod}], {**gang_job(), "status": of_job})


def test_a_disruption_that_was_seen_is_the_cause_when_the_pod_is_no_more() -> None:
    before = (Loss.PREEMPTED, "PreemptionByScheduler")
    assert shown([member(1)], gang_job(failedIndexes="0"), had_pod=before).loss is Loss.PREEMPTED


def test_several_that_their_queue_suspends_again_are_preempted_and_may_save_until_they_end() -> None:
    job = gang_job(conditions=SUSPENDED)
    job["spec"]["suspend"] = True
    assert shown([member(0, LEAVES)], job).notice_at is not None
    later = shown([member(1, LEAVES)], job)
    assert (later.state, later.loss) == (PAUSED, Loss.PREEMPTED)


def test_several_of_a_deleted_job_end_until_no_pod_is_left_that_runs() -> None:
    job = gang_job()
    job["metadata"]["deletionTimestamp"] = _at()
    for a_job in (job, {}):
        assert shown([member(0, DONE), member(1)], a_job).state is ENDING
        assert shown([member(0, DONE), member(1, TAKEN)], a_job).state is GONE


# At the fake cluster.


async def _request(h: KubernetesHarness, provider: KubernetesProvider, nodes: int = 2, gpus: int = 4) -> LaunchRequest:
    page = await provider.offers(h.query())
    one = next(o for o in page.offers if o.gpu == "H100_SXM" and o.gpu_count == gpus and o.market == "on-demand")
    return h.request(gang_of(one, nodes))


async def _bought(h: KubernetesHarness, provider: KubernetesProvider) -> tuple[LaunchRequest, Instance]:
    asked = await _request(h, provider)
    await provider.launch(asked)
    await h.settle()
    (found,) = await provider.find(asked.key)
    assert found.state is RUNNING, found
    return asked, found


def _pods(h: KubernetesHarness) -> dict[int, dict[str, Any]]:
    rows = h.cloud.objects["pods"].rows.values()
    return {int(one["metadata"]["annotations"][RANK]): one for one in rows}


def _is_empty(h: KubernetesHarness) -> bool:
    return not any(h.cloud.objects[kind].rows for kind in ("jobs", "pods", "secrets"))


def test_more_than_there_are_places_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        with pytest.raises(NoCapacity, match="2 places of H100_SXM:on-demand are free, not 3"):
            await provider.launch(await _request(h, provider, nodes=3))
        assert h.launch_calls() == 0
        with pytest.raises(RequestRejected):
            await provider.launch(await _request(h, provider, nodes=GANG_MAX + 1))

    play(tmp_path, story)


def test_several_of_which_one_gets_no_pod_in_time_are_undone(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        with pytest.raises(NoCapacity, match="1 of 2 pods got a place within 20 s"):
            await provider.launch(await _request(h, provider))
        await h.settle()
        assert h.launch_calls() == 1
        assert _is_empty(h)

    play(tmp_path, story, quirks=KubeQuirks(quota_pods=1))


@every("is_seen", [True, False], ids=["after it had its place", "before that was seen"])
def test_a_pod_that_is_deleted_by_force_during_the_launch_is_lost_and_no_lack_of_room(
    tmp_path: Path, *, is_seen: bool
) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked, left, row = await _request(h, provider), [0], provider._row

        def delete() -> None:
            if left and 0 in _pods(h):
                h.cloud.evict(_pods(h)[left.pop()], grace=timedelta(0))

        async def losing(ref: InstanceRef) -> Any:
            if is_seen:
                found = await row(ref)
                delete()
                return found
            delete()
            return await row(ref)

        provider._row = losing  # type: ignore[method-assign]  # the cluster's owner, at the worst moment
        made = (await provider.launch(asked)).instance
        await h.settle()
        (found,) = await provider.find(asked.key)
        assert (found.ref, found.state) == (made.ref, PAUSED)
        assert found.loss in {Loss.PREEMPTED, Loss.HOST_LOST}
        await provider.terminate(found.ref)
        await h.settle()
        assert _is_empty(h)

    play(tmp_path / str(is_seen), story, quirks=KubeQuirks(quota_pods=1))


def test_several_that_a_daemon_left_half_started_wait_as_one_row_and_are_given_up(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked = await _request(h, provider)
        body = job_of(asked, h.settings())
        made = h.cloud.create("jobs", "spotd", body)
        for secret in secrets_of(asked, made["metadata"]["uid"]):
            h.cloud.create("secrets", "spotd", secret)
        await h.advance(timedelta(minutes=9))
        (found,) = await provider.find(asked.key)
        assert found.state is PENDING
        await h.advance(timedelta(minutes=2))
        (found,) = await provider.find(asked.key)
        assert (found.state, found.loss) == (PAUSED, Loss.NO_CAPACITY)
        await provider.terminate(found.ref)
        await h.settle()
        assert _is_empty(h)
        assert await provider.find(asked.key) == ()

    play(tmp_path, story, quirks=KubeQuirks(quota_pods=1))


def test_a_cluster_that_is_away_while_places_are_awaited_leaves_the_launch_to_the_next_list(
    tmp_path: Path,
) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked = await _request(h, provider)
        busy = {"kind": "Status", "status": "Failure", "reason": "ServiceUnavailable", "message": "x", "code": 503}
        answer = Canned(status=503, body=json.dumps(busy).encode(), headers={"content-type": "application/json"})
        h.faults.answer(Call.LIST, answer, times=100)  # before it is created, only nodes and pods are read
        made = (await provider.launch(asked)).instance
        h.faults.clear()
        await h.settle()
        (found,) = await provider.find(asked.key)
        assert (found.ref, found.state) == (made.ref, RUNNING)

    play(tmp_path, story)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_that_is_taken_away_is_announced_and_never_started_again(rank: int, tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked, found = await _bought(h, provider)
        h.cloud.quirks.grace_used = timedelta(minutes=1)
        h.cloud.evict(_pods(h)[rank], "PreemptionByScheduler")
        (noticed,) = await provider.find(asked.key)
        assert (noticed.state, noticed.ref, noticed.notice_at is not None) == (RUNNING, found.ref, True)
        await h.settle()
        (after,) = await provider.find(asked.key)
        assert _pods(h).keys() == {1 - rank}, "the cluster started it again"
        assert (after.state, after.loss) == ((RUNNING, None) if rank else (PAUSED, Loss.PREEMPTED))
        assert rank == 0 or after.notice_at is not None
        await provider.terminate(after.ref)
        await h.settle()
        assert _is_empty(h)

    play(tmp_path, story)


def test_a_cluster_that_would_start_a_lost_pod_again_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        with pytest.raises(NotSupported, match="backoffLimitPerIndex"):
            await provider.launch(await _request(h, provider))
        await h.settle()
        assert _is_empty(h)

    play(tmp_path, story, quirks=KubeQuirks(is_old=True))


def test_a_queue_starts_all_of_them_and_what_is_free_is_not_counted(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked = await _request(h, provider, nodes=3)
        made = (await provider.launch(asked)).instance
        await h.settle()
        job = h.cloud.get("jobs", "spotd", made.ref.instance_id.partition(":")[0])
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
        assert not _pods(h)
        assert (await provider.find(asked.key))[0].state is PENDING
        h.cloud.add_node("new", gpus=4)
        h.cloud.suspend(job, value=False)
        await h.settle()
        await h.settle()
        assert (await provider.find(asked.key))[0].state is RUNNING
        h.cloud.suspend(job, value=True)
        await h.settle()
        (taken,) = await provider.find(asked.key)
        assert (taken.state, taken.loss) == (PAUSED, Loss.PREEMPTED)
        await provider.terminate(taken.ref)
        await h.settle()
        assert _is_empty(h)

    play(tmp_path, story, queue="gpu")


def test_nodes_that_an_autoscaler_makes_are_not_counted(tmp_path: Path) -> None:
    pool: dict[str, Any] = {"name": "big", "gpu": "H100", "count": 8, "price": 16, "cpus": 90, "memory_gb": 900}
    pool["node_selector"] = {"made": "later"}

    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        page = await provider.offers(h.query())
        asked = h.request(gang_of(next(one for one in page.offers if one.pool == "pool:big"), 2))
        await provider.launch(asked)
        await h.settle()
        (found,) = await provider.find(asked.key)
        assert (found.state, found.price) == (PENDING, 32_000_000)

    play(tmp_path, story, pools=[pool])


def test_the_console_is_that_of_the_first(tmp_path: Path) -> None:
    async def story(h: KubernetesHarness, provider: KubernetesProvider) -> None:
        asked = replace(await _request(h, provider), start_script="echo rank $SPOTD_NODE_RANK; exec sleep 1000\n")
        made = (await provider.launch(asked)).instance
        await h.settle()
        await provider.find(asked.key)
        console = h.cloud.machines.console
        first = _pods(h)[0]["metadata"]["uid"]
        await until(lambda: bool(console(first, lines=1)))
        assert list(await provider.logs(made.ref, lines=5)) == ["rank 0"]

    play(tmp_path, story)


def test_what_any_author_of_objects_can_write_of_ranks_breaks_nothing() -> None:
    odd, far = member(0), member(9_999)
    odd["metadata"]["annotations"][RANK] = json.dumps({"a": 1})
    assert shown([odd, member(1)]).state is RUNNING
    assert (shown([member(0), member(1), far]).state) is PAUSED
    huge = gang_job()
    huge["spec"]["completions"] = 10**12
    assert shown([member(0)], huge).state is PENDING

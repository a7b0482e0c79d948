"""What nodes, Jobs and pods mean here: pure functions, by tables."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    Instance,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    Offer,
    RegistryLogin,
    Secret,
)
from spotd_providers.kit.rest import Meaning
from spotd_providers.kubernetes.machines import as_instance, disruption_of, job_name, job_of, rows_of, secrets_of
from spotd_providers.kubernetes.market import offers_of, used_by_node
from spotd_providers.kubernetes.wire import DIALECT, KubernetesSettings, instant, problem_of, quantity
from tests.cases import every

NOW = datetime(2026, 11, 28, 12, 0, 0, tzinfo=UTC)
PRICES = [{"gpu": "h100", "price": "2.00"}, {"gpu": "h100", "price": "1.20", "market": "spot"}]
SETTINGS = KubernetesSettings(prices=PRICES)
KEY = AttemptKey("spotd-lab.0123-j1-1")


def _at(before: timedelta = timedelta(0)) -> str:
    return (NOW - before).strftime("%Y-%m-%dT%H:%M:%SZ")


def node(name: str = "n1", *, gpus: int = 8, **labels: str) -> dict[str, Any]:
    own = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    return {
        "metadata": {
            "name": name,
            "labels": own | {key.replace("__", "/").replace("_", "."): v for key, v in labels.items()},
        },
        "spec": {},
        "status": {
            "allocatable": {
                "cpu": "100",
                "memory": "1000Gi",
                "nvidia.com/gpu": str(gpus),
                "ephemeral-storage": "1000Gi",
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(on: str, gpus: int, *, phase: str = "Running") -> dict[str, Any]:
    container = {"resources": {"requests": {"nvidia.com/gpu": str(gpus), "cpu": "10"}}}
    return {"spec": {"nodeName": on, "containers": [container]}, "status": {"phase": phase}}


def sizes(offers: list[Offer]) -> list[int]:
    return sorted(one.gpu_count for one in offers)


@every(
    ("text", "value"),
    [("3920m", 3.92), ("8", 8.0), ("131900Mi", 131900 * 2**20), ("1.5Gi", 1.5 * 2**30), ("2e3", 2000.0), (4, 4.0),
     ("1e99", 0.0), ("NaN", 0.0), ("-1", 0.0), ("", 0.0), (None, 0.0), (True, 0.0), ("1Zi", 0.0), (math.inf, 0.0),
     ("9" * 19 + "Pi", 0.0), ("1" * 5000, 0.0), ({}, 0.0), ("1_000", 0.0), ("٣", 0.0)],
)  # fmt: skip
def test_a_quantity_is_a_finite_figure_or_nothing(text: object, value: float) -> None:
    assert quantity(text) == value


@every(
    ("text", "said"),
    [("2026-11-28T12:00:00Z", NOW), ("2026-11-28T12:00:00.000000Z", NOW), ("2026-11-28T14:00:00+02:00", NOW),
     ("2026-11-28T12:00:00", None), ("9999-12-31T23:59:59-14:00", None), ("0001-01-01T00:00:00+14:00", None), (1, None),
     ("", None), ("x" * 100, None)],
)  # fmt: skip
def test_an_instant_is_aware_or_nothing(text: object, said: datetime | None) -> None:
    assert instant(text) == said


def test_a_pool_is_offered_in_the_sizes_that_one_node_can_take_now() -> None:
    used = used_by_node([pod("n1", 5), pod("n2", 7), pod("n2", 4, phase="Succeeded"), pod("", 8)])
    offers, bad = offers_of([node("n1"), node("n2")], used, SETTINGS)
    assert not bad
    assert sizes(offers) == [1, 2, 3]
    assert {one.gpu for one in offers} == {"H100_SXM"}
    assert [one.gpu_price for one in offers] == [2_000_000, 4_000_000, 6_000_000]


def test_where_pods_may_not_be_read_every_gpu_counts_as_free() -> None:
    assert sizes(offers_of([node()], None, SETTINGS)[0]) == [1, 2, 3, 4, 6, 8]


def test_spot_and_on_demand_nodes_are_two_pools_and_neither_takes_the_others_jobs() -> None:
    spot = node("s", gpus=1, **{"karpenter.sh/capacity-type": "spot"})
    offers, _ = offers_of([spot, node("d", gpus=1)], {}, SETTINGS)
    by_market = {one.market: one for one in offers}
    assert by_market[Market.SPOT].gpu_price == 1_200_000
    assert by_market[Market.SPOT].on_demand_price == by_market[Market.ON_DEMAND].gpu_price == 2_000_000
    where = {market: json.loads(one.extra["where"]) for market, one in by_market.items()}
    assert {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]} in where[Market.SPOT]
    assert {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]} in where[Market.ON_DEMAND]


def _changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    made = node()
    change(made)
    return made


@every(
    ("made", "reason"),
    [
        (_changed(lambda n: n["spec"].update(unschedulable=True)), "takes no new pods"),
        (_changed(lambda n: n["status"].update(conditions=[])), "not ready"),
        (_changed(lambda n: n["status"]["conditions"][0].update(status="Unknown")), "not ready"),
        (_changed(lambda n: n["spec"].update(taints=[{"key": "a", "effect": "NoExecute"}])), "taint"),
        (_changed(lambda n: n["metadata"]["labels"].pop("nvidia.com/gpu.product")), "no label"),
        (_changed(lambda n: n["metadata"]["labels"].update({"nvidia.com/gpu.product": "Tesla-T4-SHARED"})), "shared"),
        (_changed(lambda n: n["metadata"]["labels"].update({"nvidia.com/gpu.sharing-strategy": "mps"})), "shared"),
        (_changed(lambda n: n["metadata"]["labels"].update({"nvidia.com/gpu.product": "Tesla-T4"})), "no price for"),
    ],
)
def test_a_node_that_cannot_be_offered_says_why(made: dict[str, Any], reason: str) -> None:
    offers, bad = offers_of([made], {}, SETTINGS)
    assert not offers
    assert reason in bad[0].reason


def test_usual_taints_of_gpus_and_spot_nodes_are_no_obstacle_and_others_are_by_config() -> None:
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "team", "value": "b", "effect": "NoSchedule"}]
    tainted = _changed(lambda n: n["spec"].update(taints=taints))
    assert not offers_of([tainted], {}, SETTINGS)[0]
    own = KubernetesSettings(prices=PRICES, tolerations=[{"key": "team", "value": "b"}])
    assert offers_of([tainted], {}, own)[0]
    other = KubernetesSettings(prices=PRICES, tolerations=[{"key": "team", "value": "c"}])
    assert not offers_of([tainted], {}, other)[0]


def test_a_slice_of_a_card_is_an_offer_of_its_own() -> None:
    def slice_it(n: dict[str, Any]) -> None:
        n["metadata"]["labels"].update(
            {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.memory": "40960"}
        )
        n["status"]["allocatable"].pop("nvidia.com/gpu")
        n["status"]["allocatable"]["nvidia.com/mig-1g.5gb"] = "7"

    own = KubernetesSettings(prices=[{"gpu": "A100_SXM_40_MIG_1G_5GB", "price": "0.30"}])
    offers, _ = offers_of([_changed(slice_it)], {}, own)
    assert {one.gpu for one in offers} == {"A100_SXM_40_MIG_1G_5GB"}
    assert {one.extra["resource"] for one in offers} == {"nvidia.com/mig-1g.5gb"}


def test_configured_pools_are_offered_without_any_node() -> None:
    gpu = {"name": "big", "gpu": "H100", "count": 8, "price": "19.20", "market": "spot", "cpus": 100, "memory_gb": 900}
    cpu = {"name": "prep", "price": "0.40", "cpus": 16, "memory_gb": 64, "node_selector": {"role": "cpu"}}
    offers, _ = offers_of([], None, KubernetesSettings(pools=[gpu, cpu]))
    assert [(one.gpu, one.gpu_count, one.gpu_price) for one in offers] == [("H100", 8, 19_200_000), ("CPU", 0, 400_000)]


WORDS = "metadata labels status allocatable spec taints conditions name nvidia.com/gpu containers uid deletionTimestamp"
LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers()
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS.split()), inner, max_size=4),
    max_leaves=20,
)


@given(JUNK)
def test_whatever_stands_where_objects_should_nothing_falls(junk: Any) -> None:
    offers_of([junk, node()], used_by_node([junk, pod("n1", 1)]), SETTINGS)
    for row in rows_of([junk], [junk]):
        if row is not None:
            as_instance(row, KEY, SETTINGS, NOW)


# The objects of one machine.


def offer() -> Offer:
    return offers_of([node()], {}, SETTINGS)[0][0]


def request(**more: Any) -> LaunchRequest:
    one = offer()
    return LaunchRequest(
        key=KEY, install=InstallId("lab"), offer=one, price_max=one.gpu_price, image="pytorch", disk_gb=20,
        start_script="export SPOTD_GRANT_URL=https://store/secret", **more,
    )  # fmt: skip


def job(**status: Any) -> dict[str, Any]:
    made = job_of(request(), SETTINGS)
    made["metadata"] |= {"uid": "u-1", "creationTimestamp": _at(timedelta(minutes=30))}
    return {**made, "status": status}


def own_pod(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "metadata": {
            "name": f"{KEY}-abcde", "uid": "p-1", "creationTimestamp": _at(timedelta(minutes=29)),
            "labels": {"batch.kubernetes.io/job-name": KEY}, "annotations": {"spotd.dev/key": KEY},
            "ownerReferences": [{"kind": "Job", "uid": "u-1"}],
        },
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "startTime": _at(timedelta(minutes=28))},
    }  # fmt: skip
    for part, values in more.items():
        made[part] |= values
    return made


def status(phase: str, *conditions: Mapping[str, str], reason: str = "", **state: Any) -> dict[str, Any]:
    containers = [{"state": state}] if state else []
    said = {"phase": phase, "reason": reason, "conditions": list(conditions), "containerStatuses": containers}
    return {"status": said}


def condition(kind: str, reason: str, value: str = "True", *, ago: timedelta = timedelta(0)) -> dict[str, str]:
    return {
        "type": kind,
        "status": value,
        "reason": reason,
        "message": f"about {reason}",
        "lastTransitionTime": _at(ago),
    }


def seen(
    *pods: dict[str, Any], a_job: dict[str, Any] | None = None, had_pod: tuple[Loss | None, str] | None = None
) -> Instance:
    rows = rows_of([job() if a_job is None else a_job] if a_job != {} else [], pods)
    assert rows[0] is not None
    found = as_instance(rows[0], KEY, SETTINGS, NOW, had_pod=had_pod)
    assert found is not None
    return found


LEAVING = {"metadata": {"deletionTimestamp": _at(-timedelta(seconds=60))}}
OVERDUE = {"metadata": {"deletionTimestamp": _at(timedelta(seconds=61))}}


def waiting(reason: str) -> dict[str, Any]:
    return own_pod(**status("Pending", waiting={"reason": reason}))


def ended(code: int, reason: str, *conditions: Mapping[str, str]) -> dict[str, Any]:
    phase = "Failed" if code else "Succeeded"
    return own_pod(**status(phase, *conditions, terminated={"exitCode": code, "reason": reason}))


def unplaced(minutes: int) -> dict[str, Any]:
    since = timedelta(minutes=minutes)
    return own_pod(**status("Pending", condition("PodScheduled", "Unschedulable", "False", ago=since)))


def disrupted(reason: str) -> dict[str, Any]:
    return ended(143, "Error", condition("DisruptionTarget", reason))


PENDING, RUNNING, PAUSED = InstanceState.PENDING, InstanceState.RUNNING, InstanceState.PAUSED
ENDING, GONE = InstanceState.ENDING, InstanceState.GONE


@every(
    ("pods", "state", "loss"),
    [
        ([], PENDING, None),
        ([own_pod(**status("Pending"))], PENDING, None),
        ([waiting("ContainerCreating")], PENDING, None),
        ([own_pod(**status("Running", running={"startedAt": _at()}))], RUNNING, None),
        ([unplaced(9)], PENDING, None),
        ([unplaced(11)], PAUSED, Loss.NO_CAPACITY),
        ([waiting("ImagePullBackOff")], PAUSED, Loss.IMAGE_ERROR),
        ([waiting("InvalidImageName")], PAUSED, Loss.IMAGE_ERROR),
        ([waiting("CreateContainerConfigError")], PAUSED, Loss.PROVISION_FAILED),
        ([ended(0, "Completed")], GONE, Loss.SELF),
        ([ended(137, "OOMKilled")], GONE, Loss.SELF),
        ([ended(127, "StartError")], GONE, Loss.IMAGE_ERROR),
        ([disrupted("EvictionByEvictionAPI")], GONE, Loss.PREEMPTED),
        ([disrupted("TerminationByKubelet")], GONE, Loss.HOST_LOST),
        ([own_pod(**status("Failed", reason="NodeLost"))], GONE, Loss.HOST_LOST),
        ([own_pod(**status("Failed", reason="UnexpectedAdmissionError"))], GONE, Loss.PROVISION_FAILED),
        ([own_pod(**LEAVING)], RUNNING, None),
        ([own_pod(**OVERDUE)], ENDING, Loss.HOST_LOST),
        ([own_pod(), own_pod(metadata={"uid": "p-2"})], PAUSED, Loss.PREEMPTED),
        ([own_pod(**status("Failed")), own_pod(metadata={"uid": "p-2"})], PAUSED, Loss.PREEMPTED),
    ],
)
def test_what_a_pod_shows_is_one_state(pods: list[dict[str, Any]], state: InstanceState, loss: Loss | None) -> None:
    found = seen(*pods)
    assert (found.state, found.loss) == (state, loss)


def test_a_pod_that_leaves_has_a_notice_until_its_instant() -> None:
    assert seen(own_pod(**LEAVING)).notice_at == NOW + timedelta(seconds=60)


def test_a_fresh_pull_error_is_not_yet_one_of_the_image() -> None:
    fresh = own_pod(**status("Pending", waiting={"reason": "ErrImagePull", "message": "503"}))
    fresh["status"]["startTime"] = _at(timedelta(seconds=100))
    assert seen(fresh).state is InstanceState.PENDING


def test_a_job_that_is_deleted_ends_as_long_as_its_pod_is_there() -> None:
    deleted = job()
    deleted["metadata"]["deletionTimestamp"] = _at()
    assert seen(own_pod(), a_job=deleted).state is InstanceState.ENDING
    alone = seen(own_pod(), a_job={})
    assert (alone.state, alone.ref.instance_id) == (InstanceState.ENDING, f"{KEY}:u-1")


def test_a_deleted_job_that_a_finalizer_keeps_is_gone_once_it_has_no_pod() -> None:
    held = job()
    held["metadata"] |= {"deletionTimestamp": _at(timedelta(seconds=30)), "finalizers": ["example.com/hold"]}
    assert seen(a_job=held).state is InstanceState.ENDING, "a pod that was made in that moment may not be listed yet"
    held["metadata"]["deletionTimestamp"] = _at(timedelta(seconds=61))
    over = seen(a_job=held)
    assert (over.state, over.loss, over.detail) == (InstanceState.GONE, Loss.PREEMPTED, "its Job was deleted")
    assert seen(own_pod(), a_job=held).state is InstanceState.ENDING


@every(
    ("a_job", "state", "loss"),
    [
        (job(conditions=[condition("Complete", "")]), InstanceState.GONE, Loss.SELF),
        (job(conditions=[condition("Failed", "BackoffLimitExceeded")]), InstanceState.GONE, Loss.HOST_LOST),
        (job(conditions=[condition("Failed", "PodFailurePolicy")]), InstanceState.GONE, Loss.PREEMPTED),
        (job(conditions=[condition("Failed", "x", "False")]), InstanceState.PENDING, None),
    ],
)
def test_a_job_without_a_pod_is_judged_by_its_own_conditions(
    a_job: dict[str, Any], state: InstanceState, loss: Loss | None
) -> None:
    found = seen(a_job=a_job)
    assert (found.state, found.loss) == (state, loss)


@every("ended", [condition("Complete", ""), condition("Failed", "BackoffLimitExceeded")])
def test_a_job_whose_pod_was_taken_away_is_preempted_also_once_the_pod_is_no_more(ended: dict[str, Any]) -> None:
    taken = own_pod(**LEAVING, status={"conditions": [condition("DisruptionTarget", "PreemptionByScheduler")]})
    seen_before = disruption_of((taken,))
    assert seen_before == (Loss.PREEMPTED, "PreemptionByScheduler: about PreemptionByScheduler")
    found = seen(a_job=job(conditions=[ended]), had_pod=seen_before)
    assert (found.state, found.loss, found.detail) == (InstanceState.GONE, *seen_before)


def test_a_job_that_waits_in_a_queue_is_told_from_one_that_lost_its_place() -> None:
    waiting = job(conditions=[condition("Suspended", "JobSuspended", ago=timedelta(minutes=30))])
    waiting["spec"]["suspend"] = True
    assert seen(a_job=waiting).state is InstanceState.PENDING
    again = copy.deepcopy(waiting)
    again["status"]["conditions"] = [condition("Suspended", "JobSuspended", ago=timedelta(minutes=5))]
    assert seen(a_job=again).loss is Loss.PREEMPTED


def test_the_script_and_the_login_are_in_secrets_that_go_with_the_job_and_nowhere_else() -> None:
    login = RegistryLogin(server="ghcr.io", username="me", password=Secret("hunter2-canary"))
    asked = request(login=login)
    assert "secret" not in json.dumps(job_of(asked, SETTINGS)).replace("secretName", "").replace('"secret"', "")
    made = secrets_of(asked, "u-1")
    assert [one["metadata"]["ownerReferences"][0]["uid"] for one in made] == ["u-1", "u-1"]
    assert job_of(asked, SETTINGS)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": f"{KEY}-login"}]


def test_a_job_is_never_started_twice_by_the_cluster_itself() -> None:
    spec = job_of(request(), SETTINGS)["spec"]
    assert (spec["backoffLimit"], spec["completions"], spec["parallelism"]) == (0, 1, 1)
    assert spec["podReplacementPolicy"] == "Failed"
    assert [one["action"] for one in spec["podFailurePolicy"]["rules"]] == ["FailJob"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_a_name_stands_for_one_key_whatever_its_length() -> None:
    assert job_name(KEY) == KEY
    long = [f"spotd-{'x' * 40}-{letter}-1{'0' * 15}" for letter in "ab"]
    names = [job_name(one) for one in long]
    assert all(len(one) <= 63 for one in names)
    assert names[0] != names[1]


RIGHTS_LACK = (
    'jobs.batch is forbidden: User "x" cannot create resource "jobs" in API group "batch" in the namespace "y"'
)


@every(
    ("code", "reason", "message", "meaning"),
    [
        (403, "Forbidden", RIGHTS_LACK, Meaning.AUTH),
        (403, "Forbidden", 'pods "a" is forbidden: exceeded quota: few, requested: pods=1', Meaning.QUOTA),
        (403, "Forbidden", "violates PodSecurity restricted", Meaning.REJECTED),
        (403, "Forbidden", "no new content in namespace spotd because it is being terminated", Meaning.AUTH),
        (401, "Unauthorized", "Unauthorized", Meaning.AUTH),
        (404, "NotFound", "x", Meaning.ABSENT),
        (409, "Conflict", "the UID in the precondition does not match", Meaning.ABSENT),
        (409, "AlreadyExists", "x", Meaning.REJECTED),
        (410, "Expired", "too old", Meaning.REJECTED),
        (422, "Invalid", "x", Meaning.REJECTED),
        (429, "TooManyRequests", "x", Meaning.TOO_OFTEN),
        (500, "InternalError", "x", Meaning.UNAVAILABLE),
        (504, "Timeout", "x", Meaning.UNAVAILABLE),
    ],
)  # fmt: skip
def test_a_refusal_is_one_meaning(code: int, reason: str, message: str, meaning: Meaning) -> None:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}
    assert DIALECT.meaning(code, problem_of(body), is_purchase=False) is meaning

"""From pod rows to machines, and why a pod stopped.

Theory. `status` is what RunPod observes: PROVISIONING and STARTING (the image is pulled), RUNNING, EXITED (stopped:
the pod keeps its host but not its GPU, so it may never run again), ERROR (the container cannot run), TERMINATED. No
word says *why* a pod stopped. spotd never stops pods, it deletes them; so an EXITED pod lost its host or was stopped by
RunPod, perhaps for want of money, which the next create finds out. It says nothing about the job either: a pod whose
process ends is *restarted*, for ever, on a wiped disk.
"""

from __future__ import annotations

from typing import Final

from spotd_providers.contract.money import MicroUsdPerHour, micro_usd
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
)
from spotd_providers.kit.text import quote_safely
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.wire import PodRow

IMAGE_FAILURE_WORDS: Final = (
    "layer does not exist",
    "manifest unknown",
    "manifest for",
    "pull access denied",
    "error response from daemon",
    "error pulling image",
    "repository does not exist",
    "no such image",
    "unauthorized: authentication required",
    "toomanyrequests",
)
_STATES: Final = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.PAUSED,
    "ERROR": InstanceState.PAUSED,
    "TERMINATED": InstanceState.GONE,
}
_BILLED: Final = {
    InstanceState.PENDING: Billing.FULL,
    InstanceState.RUNNING: Billing.FULL,
    InstanceState.PAUSED: Billing.NOTHING,
}
"""A pod bills from its creation. One that stopped would bill its volume, and a pod of ours has none."""
_LOSSES: Final = {"EXITED": Loss.HOST_LOST, "ERROR": Loss.PROVISION_FAILED}
_DETAILS: Final = {
    "EXITED": "RunPod shows the pod as exited, though spotd did not stop it",
    "ERROR": "RunPod says that the container is in an error it cannot recover from",
}


_NO_GPU: Final = "RunPod calls it running and shows no GPU on it"


def ref_of(pod_id: str) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(pod_id))


def as_instance(row: PodRow, key: AttemptKey) -> Instance:
    word = (row.status or "").strip().upper()
    state = _STATES.get(word, InstanceState.UNKNOWN)
    loss = _LOSSES.get(word)
    without_gpu = state is InstanceState.RUNNING and row.gpu is not None and row.gpu.count == 0
    if without_gpu:
        state = InstanceState.UNKNOWN  # it is being moved to another machine, or came back without what it is paid for
    odd = f"RunPod calls its status {quote_safely(row.status or '')!r}"
    detail = _DETAILS.get(word, "" if word in _STATES else odd)
    return Instance(
        ref=ref_of(row.id),
        key=key,
        state=state,
        market=Market.ON_DEMAND,
        price=MicroUsdPerHour(micro_usd(row.cost)) if row.cost else None,
        created_at=row.created_at,
        loss=loss,
        detail=_NO_GPU if without_gpu else detail,
        billing=_BILLED.get(state, Billing.UNKNOWN),
    )


def unreadable(pod_id: str, key: AttemptKey) -> Instance:
    """Describe a machine that certainly exists under our name, though its row is malformed."""
    return Instance(
        ref=ref_of(pod_id), key=key, state=InstanceState.UNKNOWN, detail="RunPod's row about it is malformed"
    )

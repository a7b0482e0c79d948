"""The pods that RunPod lists: what a row says, why a pod does not start, and what it was billed."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import AuthFailed, ProviderError, RequestRejected, Unavailable
from spotd_providers.contract.provider import Logger, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerHour,
    ProviderCharge,
    RegistryLogin,
    micro_usd,
)
from spotd_providers.kit.calls import PAGES_MAX
from spotd_providers.kit.rest import RestRefused
from spotd_providers.kit.shapes import charges_of
from spotd_providers.kit.text import CONSOLE_LINES, clean, quote_safely, start_complaint, write_atomically
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.wire import BillingRow, PodRow, says

# From pod rows to machines, and why a pod stopped.
#
# Theory. `status` is what RunPod observes: PROVISIONING and STARTING (the image is pulled), RUNNING, EXITED (stopped:
# the pod keeps its host but not its GPU, so it may never run again), ERROR (the container cannot run), TERMINATED. No
# word says *why* a pod stopped. spotd never stops pods, it deletes them; so an EXITED pod lost its host or was
# stopped by RunPod, perhaps for want of money, which the next create finds out. It says nothing about the job either:
# a pod whose process ends is *restarted*, for ever, on a wiped disk.


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
STATES: Final = {
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
LOSSES: Final = {"EXITED": Loss.HOST_LOST, "ERROR": Loss.PROVISION_FAILED}
_DETAILS: Final = {
    "EXITED": "RunPod shows the pod as exited, though spotd did not stop it",
    "ERROR": "RunPod says that the container is in an error it cannot recover from",
}


_NO_GPU: Final = "RunPod calls it running and shows no GPU on it"


def ref_of(pod_id: str) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(pod_id))


def as_instance(row: PodRow, key: AttemptKey) -> Instance:
    word = (row.status or "").strip().upper()
    state = STATES.get(word, InstanceState.UNKNOWN)
    loss = LOSSES.get(word)
    without_gpu = state is InstanceState.RUNNING and row.gpu is not None and row.gpu.count == 0
    if without_gpu:
        state = InstanceState.UNKNOWN  # it is being moved to another machine, or came back without what it is paid for
    odd = f"RunPod calls its status {quote_safely(row.status or '')!r}"
    detail = _DETAILS.get(word, "" if word in STATES else odd)
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


# The keys of pods, kept because bills name pods by id only, also long after the pod is gone.
#
# Losing the file costs the keys of old bills, never a machine.


PODS_MAX: Final = 5000


class PodKeys:
    """The key of each pod of ours, in one small file."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._file = folder / "pods.json"
        self._log = log
        self._keys: dict[str, str] = {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._keys = {str(pod): str(key) for pod, key in content["pods"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("runpod.pod_keys_unreadable", reason=type(exc).__name__)

    def record(self, pod_id: str, key: AttemptKey) -> None:
        """Keep the key of this pod; the oldest entry beyond the bound is dropped."""
        if self._keys.get(pod_id) == key:
            return
        self._keys[pod_id] = key
        while len(self._keys) > PODS_MAX:
            del self._keys[next(iter(self._keys))]
        try:
            write_atomically(self._file, json.dumps({"pods": self._keys}))
        except OSError as exc:
            self._log.warning("runpod.pod_keys_unwritable", reason=type(exc).__name__)

    def key_of(self, pod_id: str) -> AttemptKey | None:
        """Return the key of this pod, if it is or was one of ours."""
        key = self._keys.get(pod_id)
        return None if key is None else AttemptKey(key)


# The logins of private images, which RunPod stores in the account and pods name by id.
#
# A credential's name begins with our label and ends with a code made of the login with the API key, so that one login
# has one name, a changed password another one, and the name betrays neither. No other name is ever touched.


CODE_DIGITS: Final = 16


class StoredLogins:
    """The registry credentials of this install: made when first needed, deleted once the config drops them."""

    def __init__(self, client: RunpodClient, services: Services) -> None:
        self._client = client
        self._services = services
        self._prefix = f"spotd-{services.install}.image-"
        self._mark = services.state_dir / "registries"
        """Exists once any was made: without it there is nothing to delete, and RunPod is not asked."""
        self._kept: frozenset[str] | None = None
        self._one = anyio.Lock()

    async def id_of(self, login: RegistryLogin) -> str:
        """Return the id of this login's credential, which is made if there is none.

        Raises:
            RequestRejected: RunPod does not store it.
            RateLimited, Unavailable: it is not known.
        """
        name = self._name(login)
        async with self._one:
            try:
                known = next((identity for identity, other in await self._ours() if other == name), None)
                if known is not None:
                    return known
                make_mark(self._mark)
                self._kept = None
                return await self._client.add_registry(name, login)
            except (RestRefused, AuthFailed) as exc:
                raise RequestRejected(
                    f"RunPod does not store the login of {login.server}: {exc}; {_ACCESS}",
                    field="login",
                    reason="not stored",
                ) from exc

    async def drop_unused(self) -> None:
        """Delete ours that no login of the config uses; what cannot be deleted now is tried again at the next call."""
        wanted = frozenset(self._name(login) for login in self._services.logins())
        if wanted == self._kept:
            return
        done = True
        async with self._one:
            if self._mark.exists():
                try:
                    for identity, name in await self._ours():
                        done = (name in wanted or await self._is_deleted(identity)) and done
                except ProviderError as exc:
                    self._services.log.warning("runpod.registries_unknown", reason=type(exc).__name__)
                    done = False
        if done:
            self._kept = wanted

    async def _is_deleted(self, identity: str) -> bool:
        try:
            await self._client.delete_registry(identity)
        except RestRefused as exc:
            return "not found" in exc.detail.lower()
        return True

    async def _ours(self) -> list[tuple[str, str]]:
        rows = [row for row in await self._client.registries() if isinstance(row, dict)]
        return [
            (row["id"], row["name"])
            for row in rows
            if is_id(row.get("id")) and isinstance(row.get("name"), str) and row["name"].startswith(self._prefix)
        ]

    def _name(self, login: RegistryLogin) -> str:
        key = (self._services.credential or "").encode()
        text = "\0".join((login.server, login.username, login.password.reveal()))
        code = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:CODE_DIGITS]
        return f"{self._prefix}{code}"


_ACCESS: Final = "its API key needs read and write access to registry credentials"


PULL_SUSPECT_AFTER: Final = timedelta(minutes=6)
LOG_READ_EVERY: Final = timedelta(minutes=5)
SYSTEM_LINES: Final = 50
CONSOLE_SUSPECT_AFTER: Final = timedelta(minutes=2)


class PodLosses:
    """Why pods do not start, read from their logs: RunPod's rows do not say so."""

    def __init__(self, client: RunpodClient, services: Services, pod_of: Callable[[InstanceRef], str]) -> None:
        self._client = client
        self._services = services
        self._pod_of = pod_of
        self._image_checks: dict[str, tuple[datetime, str]] = {}
        self._started: dict[str, datetime] = {}
        self._console_due: set[str] = set()
        self._complaints: dict[str, str] = {}

    async def explain(self, instances: Sequence[Instance]) -> tuple[Instance, ...]:
        """Explain all at once: each may have to read a log, and no loss may wait for the logs of the others."""
        found: dict[int, Instance] = {}

        async def explain(number: int, instance: Instance) -> None:
            found[number] = await self._explain_loss(instance)

        async with anyio.create_task_group() as group:
            for number, instance in enumerate(instances):
                group.start_soon(explain, number, instance, name=f"runpod.explain:{instance.ref.instance_id}")
        return tuple(found[number] for number in range(len(instances)))

    def note_start(self, row: PodRow) -> None:
        """Mark its console to be read, if the pod stopped, was restarted, or is a few minutes old.

        RunPod starts a container whose process ends again and again and calls it RUNNING all the time.
        """
        before = self._started.get(row.id, row.started_at)
        if row.started_at is not None:
            self._started[row.id] = row.started_at
        stopped = (row.status or "").strip().upper() == "EXITED"
        settled = row.created_at is not None and self._services.clock.now() - row.created_at > CONSOLE_SUSPECT_AFTER
        if before != row.started_at or (row.id not in self._complaints and (stopped or settled)):
            self._console_due.add(row.id)

    async def _start_complaint(self, pod_id: str) -> str:
        """Return the error that spotd's own start script reported on this pod, if any."""
        if pod_id in self._console_due and not self._complaints.get(pod_id):
            self._console_due.discard(pod_id)
            try:
                lines = await self._client.log_lines(pod_id, source="container", lines=CONSOLE_LINES)
            except ProviderError:
                lines = []
            self._complaints[pod_id] = start_complaint(lines)
        return self._complaints.get(pod_id, "")

    async def _explain_loss(self, instance: Instance) -> Instance:
        """Set the loss of a machine whose image cannot start our script or cannot be pulled."""
        pod_id = self._pod_of(instance.ref)
        complaint = await self._start_complaint(pod_id)
        if complaint and instance.state is not InstanceState.GONE:
            return replace(instance, state=InstanceState.PAUSED, loss=Loss.IMAGE_ERROR, detail=complaint)
        late = (
            instance.state is InstanceState.PENDING
            and instance.created_at is not None
            and self._services.clock.now() - instance.created_at > PULL_SUSPECT_AFTER
        )
        if late or instance.loss is Loss.PROVISION_FAILED:
            complaint = await self._image_complaint(pod_id)
            if complaint:
                return replace(instance, state=InstanceState.PAUSED, loss=Loss.IMAGE_ERROR, detail=complaint)
        return instance

    async def _image_complaint(self, pod_id: str) -> str:
        """Return the line of the host's log that names the image as the fault, if any. RunPod itself waits for ever."""
        now = self._services.clock.now()
        at, complaint = self._image_checks.get(pod_id, (datetime.min.replace(tzinfo=UTC), ""))
        if complaint or now - at < LOG_READ_EVERY:
            return complaint
        try:
            lines = await self._client.log_lines(pod_id, source="system", lines=SYSTEM_LINES)
        except ProviderError:
            lines = []
        complaint = next((clean(line) for line in reversed(lines) if says(line, IMAGE_FAILURE_WORDS)), "")
        if len(self._image_checks) > PAGES_MAX:
            self._image_checks.clear()
        self._image_checks[pod_id] = (now, complaint)
        return complaint


def make_mark(file: Path) -> None:
    """Keep for ever, as an empty file of the state folder, that something was done once.

    Raises:
        Unavailable: it cannot be kept, so it may not be done.
    """
    try:
        write_atomically(file, "")
    except OSError as exc:
        raise Unavailable(f"the state folder cannot be written: {exc.strerror}") from exc


def is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128


# The charges of our pods, from RunPod's own billing records.


def as_charges(row: BillingRow, pod_keys: PodKeys) -> list[ProviderCharge]:
    """Translate one record; no charges for what was not ours. The parts are used only if they add up."""
    key = pod_keys.key_of(row.machine)
    if key is None:
        return []
    named = (("gpu", row.gpu), ("cpu", row.cpu), ("disk", row.disk), ("network", row.networking))
    parts = [(kind, amount) for kind, amount in named if amount]
    return charges_of(
        key, row.machine, row.start, row.end, total=row.total, parts=parts, rounding=1e-6, currency=row.currency
    )

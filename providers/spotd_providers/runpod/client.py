"""The calls spotd makes to RunPod's REST v2, each with a typed outcome.

Every answer carries what is left of the account's minute, hour and day (`RateLimit`): when one of them is used up,
the next call waits for its reset if that is near, and is refused here if it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final
from urllib.parse import quote

from spotd_providers.contract.errors import OutcomeUnknown, RateLimited, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import AttemptKey, RegistryLogin
from spotd_providers.kit.calls import Rest, judge_apart
from spotd_providers.kit.http import Http, HttpAnswer
from spotd_providers.kit.rest import PURCHASE, RestClient, RestRefused
from spotd_providers.kit.shapes import Rows, as_model, row_or_none
from spotd_providers.runpod.wire import (
    DIALECT,
    WHO,
    BillingPage,
    ClusterPage,
    GpuRow,
    NamedCluster,
    PodPage,
    PodRow,
    SshKeys,
    gpu_rows,
    running_low,
    used_up,
)

SEARCH_TIMEOUT_S: Final = 45.0
WAIT_MAX: Final = timedelta(seconds=15)
MINUTE_WINDOW: Final = timedelta(seconds=61)
PODS_PER_PAGE: Final = 1000
PROBE: Final[Mapping[str, Any]] = {"spotdCheck": True}
LOG_LINES_MAX: Final = 5000
REGISTRIES_MAX: Final = 10_000
ID_CHARS_MAX: Final = 128
PODS, CLUSTERS = "pods", "clusters"
LIST, END = "the list of pods", "a deletion"
URGENT: Final = frozenset({LIST, END})


class RunpodClient(RestClient):
    """Typed calls over one HTTP client that carries the key."""

    def __init__(self, http: Http, *, clock: Clock, rng: Random) -> None:
        super().__init__(http, DIALECT, clock=clock, rng=rng)
        self._used_up = Rest(clock)
        self._low = Rest(clock)

    async def gpus(self, *, cloud: str, count: int, cuda_min: str | None, product: str = "POD") -> Rows[GpuRow]:
        """Return the GPU types for machines of this size, alone or in clusters (`CLUSTER`).

        Not repeated on failure: the poller comes back anyway.

        Prices are asked for most often and matter least: the last quarter of a minute's requests is kept for machines.
        """
        if (low := self._low.left()) > timedelta(0):
            raise RateLimited("RunPod's minute is nearly used up (the catalogue)", retry_after=low)
        params: dict[str, str | int] = {"include": "AVAILABILITY", "product": product, "count": count, "cloud": cloud}
        if cuda_min is not None:
            params["minCudaVersion"] = cuda_min
        value = await self.ask(
            "GET", "/v2/catalog/gpus", what="the catalogue", attempts=1, params=params, timeout_s=SEARCH_TIMEOUT_S
        )
        listed = value.get("gpus")
        rows = await judge_apart(lambda: gpu_rows(value), rows=len(listed) if isinstance(listed, list) else 0)
        if rows.is_cut:
            raise Unavailable(f"RunPod's catalogue has more than {rows.count:,} rows, which no answer has")
        return rows

    async def create(self, body: Mapping[str, Any], *, key: AttemptKey) -> PodRow:
        """Make one pod by one POST, never two.

        Raises:
            OutcomeUnknown: the pod may exist.
            RestRefused, RateLimited, AuthFailed, Unavailable: it certainly does not.
        """
        row = row_or_none(PodRow, await self.buy("POST", "/v2/pods", body, key=key))
        if row is None:
            raise OutcomeUnknown("RunPod's answer to a create names no pod", key=key)
        return row

    async def create_cluster(self, body: Mapping[str, Any], *, key: AttemptKey) -> str:
        """Make one cluster by one POST, never two; return its id. Raises as `create` does."""
        row = row_or_none(NamedCluster, await self.buy("POST", "/v2/clusters", body, key=key))
        if row is None:
            raise OutcomeUnknown("RunPod's answer to a create names no cluster", key=key)
        return row.id

    async def may_create(self) -> None:
        """Send a create that is certainly refused, with nothing but a field that no create has.

        A key that may create is answered what is wrong with it. RunPod has no other way to find out.

        Raises:
            AuthFailed: this key may read and not create.
            ProviderError: it was not found out.
        """
        try:
            answer = await self.change("POST", "/v2/pods", what="creating pods", attempts=1, json_body=PROBE)
        except RestRefused:
            return
        made = row_or_none(PodRow, answer)
        if made is not None:
            await self.delete(made.id)

    async def pod(self, pod_id: str, of: str = PODS) -> Any | None:
        """Return the row of one pod or cluster, or `None` when RunPod says that it does not exist (or not yet)."""
        return await self.ask_or_absent("GET", _path(pod_id, of), what="a pod")

    async def clusters(self) -> Sequence[Any]:
        """Return the rows of the account's clusters."""
        return as_model(ClusterPage, await self.ask("GET", "/v2/clusters", what=LIST), who=WHO, what=CLUSTERS).clusters

    async def members(self, cluster_id: str) -> Sequence[Any]:
        """Return the rows of a cluster's pods."""
        answer = await self.ask("GET", f"{_path(cluster_id, CLUSTERS)}/pods", what="the pods of a cluster")
        return as_model(PodPage, answer, who=WHO, what="the pods of a cluster").pods

    async def pod_page(self, *, cursor: str | None) -> PodPage:
        """Return a page of the account's pods, those of clusters included, as long as RunPod allows.

        Filters would be ignored, so none are sent.
        """
        params: dict[str, str | int] = {"limit": PODS_PER_PAGE, "includeClusterPods": "true"}
        params |= {} if cursor is None else {"cursor": cursor}
        return as_model(PodPage, await self.ask("GET", "/v2/pods", what=LIST, params=params), who=WHO, what=LIST)

    async def delete(self, pod_id: str, of: str = PODS) -> None:
        """Delete this pod or cluster; return once RunPod accepted that, or said that there is no such one."""
        await self.ask_or_absent("DELETE", _path(pod_id, of), what=END, attempts=4)

    async def registries(self) -> Sequence[Any]:
        """Return the rows of the account's registry credentials; RunPod never shows their passwords."""
        rows = (await self.ask("GET", "/v2/registries", what="the registry credentials")).get("registries")
        if not isinstance(rows, list) or len(rows) > REGISTRIES_MAX:
            raise Unavailable("RunPod's answer holds no list of registry credentials")
        return rows

    async def add_registry(self, name: str, login: RegistryLogin) -> str:
        """Store a login under this name, by one POST; return its id.

        Raises:
            RestRefused, RateLimited, AuthFailed: it is not stored.
            Unavailable: it may be stored.
        """
        body = {"name": name, "username": login.username, "password": login.password.reveal()}
        what = "a registry credential"
        found = (await self.change("POST", "/v2/registries", what=what, attempts=1, json_body=body)).get("id")
        if not isinstance(found, str) or not 0 < len(found) <= ID_CHARS_MAX:
            raise Unavailable("RunPod's answer to a registry credential names none")
        return found

    async def delete_registry(self, identity: str) -> None:
        """Delete a registry credential, once.

        Raises:
            RestRefused: it is absent, which RunPod answers with a 400, or a pod uses it.
        """
        path = f"/v2/registries/{quote(identity, safe='')}"
        await self.change("DELETE", path, what="the end of a registry credential", attempts=1)

    async def log_lines(self, pod_id: str, *, source: str, lines: int) -> list[str]:
        """Return the last lines of a pod's log: `container`, or `system` (what the host did with it)."""
        what = "a log"
        await self._turn(what)
        answer = await self._http.read_stream(
            f"{_path(pod_id)}/logs",
            params={"source": source, "tail": min(max(lines, 0), LOG_LINES_MAX)},
            headers={"accept": "text/event-stream"},
        )
        if not 200 <= answer.status < 300:
            try:
                self.judge(answer, what)
            except RestRefused as exc:
                raise Unavailable(f"RunPod has no log of pod {pod_id}: {exc.detail or exc.status}") from exc
        self._note(answer)
        return _events(answer.text)[-lines:] if lines > 0 else []

    async def billing(self, since: datetime, until: datetime, of: str = PODS) -> BillingPage:
        """Return what was billed for pods or clusters, hour by hour."""
        params: dict[str, str | int] = {"bucketSize": "hour", "startTime": _zulu(since), "endTime": _zulu(until)}
        value = await self.ask("GET", f"/v2/billing/{of}", what="billing", params=params)
        return as_model(BillingPage, value, who=WHO, what="billing")

    async def ssh_keys(self) -> int:
        """Return how many public keys the account has for its pods."""
        value = await self.ask("GET", "/v2/account/ssh-keys", what="list of ssh keys")
        return len(as_model(SshKeys, value, who=WHO, what="list of ssh keys").keys)

    async def greeting(self) -> HttpAnswer:
        """Send the cheapest call that needs the key; its answer is used for the `Date` header."""
        answer, body = await self.answer("GET", "/v2/pods", what=LIST)
        as_model(PodPage, body, who=WHO, what=LIST)
        return answer

    def judge(self, answer: HttpAnswer, what: str) -> Mapping[str, Any]:
        self._note(answer)
        return super().judge(answer, what)

    def _note(self, answer: HttpAnswer) -> None:
        if answer.status != 429 and (wait := used_up(answer)) is not None:
            self._used_up.take(wait)
        low = running_low(answer)
        self._low = Rest(self._clock)
        if low is not None:
            self._low.take(low)

    async def _turn(self, what: str) -> None:
        """Wait until the account has a request left, if that is soon; a create does not wait.

        An end, and the list that shows whether it took effect, wait for no longer window than that of a minute: they
        are sent all the same, as seldom as their callers do, and RunPod may refuse them itself.
        """
        wait = self._used_up.left()
        if what in URGENT and wait > MINUTE_WINDOW:
            return
        if wait > (timedelta(0) if what == PURCHASE else WAIT_MAX):
            raise RateLimited(f"RunPod's rate limit is used up ({what})", retry_after=wait)
        if wait > timedelta(0):
            await self._clock.sleep(wait)
        self._used_up = Rest(self._clock)


def _path(identity: str, of: str = PODS) -> str:
    return f"/v2/{of}/{quote(identity, safe='')}"


def _zulu(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def _events(text: str) -> list[str]:
    """Return the lines in a stream of log events; other events are left out."""
    found = []
    for line in text.splitlines():
        if not line.startswith("data:"):
            continue
        try:
            event = json.loads(line.removeprefix("data:"))
        except ValueError:
            continue  # the stream was cut in the middle of an event
        text_line = event.get("line") if isinstance(event, dict) else None
        if isinstance(text_line, str):
            found.extend(text_line.splitlines() or [""])
    return found

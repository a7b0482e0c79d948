"""RunPod's instant clusters: several equal pods of one data centre that are made, shown and ended as one.

Theory. A cluster has our key as its name, and its pods have other names. They are listed with all pods, each with the
id of its cluster, and can be neither changed nor deleted alone. So a pod of a cluster is never a machine of its own
here: the cluster's row is, with the price that its pods state together. The row says how many pods are in which state,
not which of them were lost: a cluster that had all of its pods and has not any more has lost one. RunPod replaces none.

What only pods show (their cluster is deleted, and they run on) stays a machine of ours until they are gone.

Most keys never had to do with clusters. Where RunPod refuses their list, there are none, unless spotd bought one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, ProviderError
from spotd_providers.contract.provider import Services
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
    micro_usd,
)
from spotd_providers.kit.shapes import readable_rows, row_or_none
from spotd_providers.kit.template import as_unreadable, bound
from spotd_providers.kit.text import quote_safely
from spotd_providers.runpod.client import CLUSTERS, RunpodClient
from spotd_providers.runpod.listing import LOSSES, STATES, PodKeys, is_id, make_mark
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.wire import WHO, ClusterRow, PodRow, RunpodSettings

STARTS_WITHIN: Final = timedelta(minutes=20)
"""A cluster that lacks pods after it has lost them, if they were never seen together: this process began later.

One that is found late, as after an answer that was lost, lacks none while all that do not run yet still start.
"""
NO_LOGIN: Final = "RunPod's clusters take no login of a private registry"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCluster:
    """A cluster with its pods; `raw` is its row, or `None` where only its pods are listed."""

    cluster_id: str
    raw: Any | None
    pods: Sequence[PodRow] = ()


def ref_of(cluster_id: str) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(cluster_id), scope=CLUSTERS)


def is_member(raw: Any) -> bool:
    """Whether this row of a pod is that of a cluster's: it is no machine of its own, whatever its name."""
    return isinstance(raw, dict) and raw.get("cluster") is not None


class Clusters:
    """The clusters of the account, and what their rows do not say.

    Attributes:
        refused: why this key may not use clusters; empty while it may.
    """

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services, keys: PodKeys) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._keys = keys
        self._mark = services.state_dir / "clusters"
        self._whole: dict[str, bool] = {}
        self._lost_at: dict[str, datetime] = {}
        self._prices: dict[str, MicroUsdPerHour] = {}
        self._first_pods: dict[str, str] = {}
        self.refused = ""

    @property
    def missing(self) -> str:
        """Why no cluster can be bought; empty if it can."""
        return self._settings.no_clusters or self.refused

    @property
    def were_used(self) -> bool:
        """Whether this install ever bought a cluster, or may have."""
        return self._mark.exists()

    def note_use(self) -> None:
        """Keep for ever that there may be clusters of ours.

        Raises:
            Unavailable: it cannot be kept, so none may be bought.
        """
        if not self._mark.exists():
            make_mark(self._mark)

    async def with_pods(self, members: Iterable[Any]) -> tuple[list[ListedCluster], bool]:
        """Return the account's clusters with those of all listed pods that are theirs, and whether these are all."""
        try:
            rows = await self._client.clusters()
        except AuthFailed as exc:
            self.refused = (
                f"this key may not use clusters of RunPod ({exc}); give it access to them, or set cluster_gpu_counts"
                " to []"
            )
            return [], not self.were_used
        except ProviderError:
            return [], False
        self.refused = ""
        pods: defaultdict[str, list[PodRow]] = defaultdict(list)
        for raw in members:
            row, of = row_or_none(PodRow, raw), raw["cluster"]
            if row is not None and isinstance(of, dict) and is_id(of.get("id")):
                pods[of["id"]].append(row)
        found = []
        for raw in rows:
            identity = raw.get("id") if isinstance(raw, dict) else None
            name = identity if isinstance(identity, str) and is_id(identity) else ""
            found.append(ListedCluster(cluster_id=name, raw=raw, pods=pods.pop(name, ())))
        ours = (one for one in pods.items() if self._keys.key_of(one[0]) is not None)
        left = [ListedCluster(cluster_id=name, raw=None, pods=own) for name, own in ours if any(map(_is_there, own))]
        return [*found, *left], True

    async def row(self, cluster_id: str) -> ListedCluster | None:
        """Return one cluster with its pods, where they can be read; `None` when RunPod says that it does not exist."""
        raw = await self._client.pod(cluster_id, CLUSTERS)
        if raw is None:
            return None
        pods: Sequence[Any] = ()
        with suppress(ProviderError):
            pods = await self._client.members(cluster_id)
        return ListedCluster(cluster_id=cluster_id, raw=raw, pods=readable_rows(PodRow, pods))

    def name_of(self, one: ListedCluster) -> Any:
        """Return the name in its row; for one without a row the key that it was bought or listed with."""
        if one.raw is None:
            return self._keys.key_of(one.cluster_id)
        return one.raw.get("name") if isinstance(one.raw, dict) else None

    def first_pod(self, ref: InstanceRef) -> str:
        """Return the id of the pod that speaks for the whole, of a pod its own; empty where none is known."""
        return self._first_pods.get(ref.instance_id, "") if ref.scope == CLUSTERS else ref.instance_id

    def machine(self, one: ListedCluster, key: AttemptKey) -> Instance | None:
        """Return what the pods of a cluster are together; `None` if its row does not even name it."""
        if not one.cluster_id:
            return None
        row, ref = row_or_none(ClusterRow, one.raw), ref_of(one.cluster_id)
        if row is None and one.raw is not None:
            return as_unreadable(ref, key, who=WHO)
        if row is None:
            left = sum(map(_is_there, one.pods))
            detail = f"RunPod lists this cluster no more, and still {left} of its pods"
            return Instance(ref=ref, key=key, state=InstanceState.UNKNOWN, detail=detail, billing=Billing.FULL)
        costs = [micro_usd(pod.cost) for pod in one.pods if pod.cost]
        if len(costs) == row.compute.pods:
            self._prices[row.id] = MicroUsdPerHour(sum(costs))
        if row.primary is not None:
            self._first_pods[row.id] = row.primary.pod
        for remembered in (self._prices, self._first_pods, self._whole, self._lost_at):
            bound(remembered)
        state, loss, notice_at, detail = self._state(row)
        is_billed = state in _BILLED or any(STATES.get(word) in _BILLED for word in _words(row))
        return Instance(
            ref=ref,
            key=key,
            state=state,
            market=Market.ON_DEMAND,
            price=self._prices.get(row.id),
            created_at=row.created_at,
            notice_at=notice_at,
            loss=loss,
            billing=Billing.FULL if is_billed else Billing.NOTHING,
            detail=detail,
        )

    def _state(self, row: ClusterRow) -> tuple[InstanceState, Loss | None, datetime | None, str]:
        """Return the state of the whole, why it cannot go on, since when one pod is lost, and that in words."""
        words, now, pods = _words(row), self._services.clock.now(), row.compute.pods
        if odd := [word for word in words if word not in STATES]:
            return InstanceState.UNKNOWN, None, None, f"RunPod calls the status of a pod {quote_safely(odd[0])!r}"
        running = words.get("RUNNING", 0)
        if running >= pods:
            self._whole[row.id] = True
            self._lost_at.pop(row.id, None)
            return InstanceState.RUNNING, None, None, ""
        detail = f"{running} of its {pods} pods run"
        is_old = row.created_at is not None and now - row.created_at > STARTS_WITHIN
        losses = [LOSSES[word] for word in sorted(words) if word in LOSSES]
        starts = sum(count for word, count in words.items() if STATES[word] is InstanceState.PENDING)
        if not self._whole.get(row.id) and not (is_old and running + starts < pods):
            state = InstanceState.PAUSED if losses else InstanceState.PENDING
            return state, next(iter(losses), None), None, detail
        first = "" if row.primary is None else (row.primary.status or "").strip().upper()
        if first != "RUNNING":
            return InstanceState.PAUSED, LOSSES.get(first, Loss.HOST_LOST), None, detail
        return InstanceState.RUNNING, None, self._lost_at.setdefault(row.id, now), f"{detail}, and all of them end"


_BILLED: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING})


def _words(row: ClusterRow) -> dict[str, int]:
    return {word.strip().upper(): count for word, count in row.pods.by_status.items() if count}


def _is_there(pod: PodRow) -> bool:
    return (pod.status or "").strip().upper() != "TERMINATED"

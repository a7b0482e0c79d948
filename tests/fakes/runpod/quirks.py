"""The switches of the fake: every odd behaviour of RunPod that a launcher has met, one field each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(slots=True, kw_only=True)
class Quirks:
    """How this RunPod behaves; change a field while it runs and the next request sees it.

    Attributes:
        provisioning: from create to `STARTING`.
        starting: from `STARTING` to `RUNNING`.
        list_lag: how long a new pod is missing from the list and from its own route (404).
        restarts: a pod whose process ends is started again on a wiped disk, for ever; else it is `EXITED`.
        restart_after: how long that takes.
        sells_nothing: every create answers that there are no instances, whatever the catalogue says.
        capacity_text: the sentence of that answer.
        refuses_create: status and sentence of every create's answer.
        read_only_key: the account's key reads everything and is answered 403 to every create.
        unknown_to_create: ids of the catalogue that a create does not know.
        undead: a deleted pod runs and bills on, and is shown, until it is deleted this many times more.
        knows_entrypoint: `entrypoint` and `cmd` are part of the schema, as dstack's client takes for granted.
        spend_limit: $ per hour all pods together may cost.
        page_rows: rows of one page at most, whatever `limit` asks; `None` for lists without pages.
        last_page_fails: the last page of a list answers 500.
        cursor_missing: a page says that there is more and not where.
        cost_factor: what pods cost, over their list price.
        rate_limits: the account's windows are enforced.
        requests_a_minute: the size of the smallest window.
        log_stays_open: a log's stream goes on after what there was to say.
        log_never_rests: while it is open, it says more, or keeps the line open with comments, without a pause.
        refuses_agents: clients that do not name themselves are refused by the edge, with 403 and no JSON.
        refuses_clusters: the status of every answer about clusters, say 403 for a key without them; 0 for none.
        late_ranks: of the next clusters, which pods are placed so much later than the others.
        surviving_ranks: which pods run on after their cluster was deleted.
        pod_key_ends_cluster: a pod's own key may delete its cluster; nothing says whether it may.
        edit_cluster: by cluster id, as `edit_pod`.
        edit_gpus: the last word on the rows of the catalogue.
        edit_pod: by pod id, fields that replace a row's, or anything else to stand for the row.
    """

    provisioning: timedelta = timedelta(seconds=5)
    starting: timedelta = timedelta(seconds=15)
    list_lag: timedelta = timedelta(0)
    restarts: bool = True
    restart_after: timedelta = timedelta(seconds=2)
    sells_nothing: bool = False
    capacity_text: str = (
        "There are no longer any instances available with the requested specifications. Please refresh and try again."
    )
    refuses_create: tuple[int, str] | None = None
    read_only_key: bool = False
    unknown_to_create: frozenset[str] = frozenset({"NVIDIA RTX PRO 4500 Blackwell Server Edition"})
    undead: int = 0
    knows_entrypoint: bool = True
    spend_limit: float = 80.0
    page_rows: int | None = 25
    last_page_fails: bool = False
    cursor_missing: bool = False
    cost_factor: float = 1.0
    rate_limits: bool = True
    requests_a_minute: int = 60
    log_stays_open: bool = False
    log_never_rests: bool = False
    refuses_agents: bool = True
    refuses_clusters: int = 0
    late_ranks: dict[int, timedelta] = field(default_factory=dict)
    surviving_ranks: frozenset[int] = frozenset()
    pod_key_ends_cluster: bool = False
    edit_cluster: dict[str, Any] = field(default_factory=dict)
    edit_gpus: Callable[[list[Any]], list[Any]] | None = None
    edit_pod: dict[str, Any] = field(default_factory=dict)

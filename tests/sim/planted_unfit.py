"""Bugs of canaries: a job that they keep from running, machines that are measured in vain, hosts that are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from spotd.core import canary
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd.daemon.grants.builder import canary_rules
from spotd.daemon.hosts import reader
from spotd_jobs.wire.reports import Outcome
from tests.sim import daemon, process
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.planted_reuse import SHARED
from tests.sim.worlds import Shape

MEASURED: Final = replace(
    SHARED, jobs=6, limits={"canary": timedelta(minutes=1)}, hazards=frozenset({Hazard.UNFIT, Hazard.OWN})
)


def refuses_without_end() -> AbstractContextManager[None]:
    return patched((canary, "REFUSALS_MAX", 10**9))


def takes_it_for_the_jobs_fault() -> AbstractContextManager[None]:
    right = reader.exit_reason

    def wrong(outcome: Outcome, code: int | None) -> EndReason:
        return EndReason.USER_ERROR if outcome is Outcome.UNFIT else right(outcome, code)

    return patched((daemon, "exit_reason", wrong))


def measures_own_machines() -> AbstractContextManager[None]:
    right: Callable[..., Any] = canary_rules

    def wrong(attempt: Attempt, owner: Job, policy: Policy, *rest: Any) -> Any:
        rented = {name: replace(rules, is_own=False) for name, rules in policy.providers.items()}
        item = replace(attempt, quote=replace(attempt.quote, is_own=False))
        return right(item, owner, replace(policy, providers=rented), *rest)

    return patched((process, "canary_rules", wrong))


def shape(**changes: Any) -> Shape:
    return replace(MEASURED, **changes)


UNFIT: Mapping[str, Bug] = {
    "let canaries keep a job from running": Bug(
        patch=refuses_without_end, rule=("refusals_bounded",), shape=shape(hazards=frozenset({Hazard.UNFIT}))
    ),
    "take an unfit machine for the job's fault": Bug(
        patch=takes_it_for_the_jobs_fault,
        rule=("refused_are_remembered",),
        shape=shape(hazards=frozenset({Hazard.UNFIT})),
    ),
    "measure own machines": Bug(
        patch=measures_own_machines,
        rule=("measured_where_it_may",),
        shape=shape(limits={**MEASURED.limits, "rent_after": timedelta(hours=1)}),
    ),
}

"""The end of an attempt that could not even begin, reported without anything on this machine's disk."""

from __future__ import annotations

from spotd_jobs.runner.grants import RunnerGrant
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.clocks import steady

_REPORT_S = 30.0


def report_end(grant: RunnerGrant, boot: int, outcome: str, reason: str) -> None:
    """Store the end of an attempt that could not even begin, or give up after a while."""
    give_up_at = steady() + _REPORT_S
    store = RunnerStore(lambda: grant, boot, lambda: steady() > give_up_at)
    store.events.start()
    row = {"exit_code": None, "signal": None, "oom": None, "outputs_lost": 0}
    store.events.add("exit", outcome=outcome, phase="boot", reason=reason, **row)
    store.events.flush(_REPORT_S)

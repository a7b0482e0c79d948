"""Where things are in the object store. The wire package names what hosts write; these are the daemon's own."""

from __future__ import annotations

from spotd.core.model import AttemptId, JobId
from spotd_jobs.wire.fields import attempt_prefix


def runner_key(sha256: str) -> str:
    return f"runner/{sha256}.pyz"


def code_key(sha256: str) -> str:
    return f"code/{sha256}.tar.gz"


def spec_key(job: JobId) -> str:
    return f"jobs/{job}/spec.json"


def prefix_of(attempt: AttemptId) -> str:
    return attempt_prefix(attempt.job, attempt.number)


def grant_key(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "grant.json"


def heartbeat_key(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "heartbeat.json"


def events_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "events/"


def log_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "log/"


def data_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "data/"


def outputs_key(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "outputs/manifest.json"

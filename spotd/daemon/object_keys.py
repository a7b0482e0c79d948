"""Where things are in the object store. The wire package names what hosts write; these are the daemon's own."""

from __future__ import annotations

from spotd.core.domain.intents import AttemptId, JobId
from spotd_jobs.wire.grant import LIVENESS_PREFIX, attempt_prefix, liveness_marker_name


def runner_key(sha256: str) -> str:
    return f"runner/{sha256}.pyz"


def code_key(sha256: str) -> str:
    return f"code/{sha256}.tar.gz"


def spec_key(job: JobId) -> str:
    return f"jobs/{job}/spec.json"


def job_records_prefix(install: str) -> str:
    """Below this lies a file of each job of the install (`spotd.daemon.job_records`); no host may write here."""
    return f"jobrecords/{install}/"


def job_record_key(install: str, name: str) -> str:
    return job_records_prefix(install) + name


def shared_prices_prefix(install: str) -> str:
    """Below this lie the prices that daemons of the install polled, a folder a day; no host may write here."""
    return f"prices/{install}/"


def launches_prefix(job: JobId) -> str:
    """Below this lies a record of every attempt that was ever prepared; no host may write here."""
    return f"jobs/{job}/launches/"


def launch_key(job: JobId, number: int) -> str:
    return f"{launches_prefix(job)}{number:010d}.json"


def prefix_of(attempt: AttemptId) -> str:
    return attempt_prefix(attempt.job, attempt.number)


def grant_key(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "grant.json"


def next_key(former: AttemptId) -> str:
    """Where the machine of this attempt finds the one to which it goes on; no host may write here."""
    return f"jobs/{former.job}/next/{former.number:010d}.json"


def gang_key(attempt: AttemptId) -> str:
    """Where the first of several machines leaves how the others reach it."""
    return prefix_of(attempt) + "gang.json"


def waits_prefix(attempt: AttemptId) -> str:
    """Below this lies a word of each of several machines that waits without the first one."""
    return prefix_of(attempt) + "waits/"


def heartbeat_key(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "heartbeat.json"


def liveness_key(attempt: AttemptId) -> str:
    return LIVENESS_PREFIX + liveness_marker_name(attempt.job, attempt.number)


def events_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "events/"


def log_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "log/"


def data_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "data/"


def data_urls_key(attempt: AttemptId, number: int, page: int) -> str:
    """Where a host reads the URLs of a dataset: they are too many for its grant, which is read every few seconds."""
    return prefix_of(attempt) + f"data-urls-{number}-{page}.json.gz"


def owner_of(manifest_key: str) -> AttemptId:
    """Which attempt wrote this manifest.

    Raises:
        ValueError: no manifest has such a key.
    """
    jobs, job, attempts, number, *_ = (*manifest_key.split("/"), "", "", "", "")
    if jobs != "jobs" or attempts != "attempts" or not job or not number.isdecimal():
        raise ValueError(f"{manifest_key} is no key of a manifest")
    return AttemptId(job=JobId(job), number=int(number))


def outputs_key(attempt: AttemptId) -> str:
    return outputs_prefix(attempt) + "manifest.json"


def outputs_prefix(attempt: AttemptId) -> str:
    return prefix_of(attempt) + "outputs/"

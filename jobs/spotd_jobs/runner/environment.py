"""The environment of the job's own processes: the machine's, the job's, its secrets, and what spotd promises."""

from __future__ import annotations

import os

from spotd_jobs.runner.ending import INSTANCE_KEYS
from spotd_jobs.runner.grants import RunnerGrant

GRANT_URL_VARIABLE = "SPOTD_GRANT_URL"
_HIDDEN = (*INSTANCE_KEYS, GRANT_URL_VARIABLE)


def job_environment(grant: RunnerGrant, places: dict[str, str]) -> dict[str, str]:
    """Later ones win: nothing of the image, the job file or the secrets can change the value of `SPOTD_*`.

    The host's keys over this machine, and the URL of the grant, are not in it.
    """
    env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    env.setdefault("PYTHONUNBUFFERED", "1")  # output that waits in a buffer is lost with the machine
    for more in (grant.spec.get("env") or {}, grant.raw.get("secrets") or {}):
        env.update({str(name): str(value) for name, value in more.items()})
    every_s = grant.checkpoint.get("every_s")
    array = grant.raw.get("array") or {}
    env.update(
        SPOTD_ARRAY_INDEX=str(array.get("index", "")),
        SPOTD_ARRAY_COUNT=str(array.get("count", "")),
        SPOTD_JOB_ID=grant.job_id,
        SPOTD_JOB_NAME=grant.job_name,
        SPOTD_ATTEMPT=str(grant.attempt),
        SPOTD_CHECKPOINT_INTERVAL_S="%g" % float(every_s) if every_s else "",
    )
    env.update(places)
    return env

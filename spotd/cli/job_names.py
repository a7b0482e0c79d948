"""Names of jobs for the completion of a shell: at once or not at all, and never a word that a shell would act on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError

if TYPE_CHECKING:
    import click

WAIT_S: Final = 0.2
_HARMLESS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of jobs that begin so, newest first; ids where no name does. Silent without a daemon."""
    del ctx, param
    try:
        jobs = Daemon().jobs({"limit": 300}, timeout_s=WAIT_S)["jobs"]
    except ClientError:
        return []
    for key in ("name", "id"):
        words = dict.fromkeys(str(job[key]) for job in jobs)
        found = [word for word in words if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]
        if found:
            return found
    return []

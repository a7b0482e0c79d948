"""The machine's own end once its attempt is over, so that it costs nothing while the daemon is away.

The credentials are the host's own, scoped by its provider to this one instance; they come from its environment and are
never handed to the job.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from spotd_jobs.wire.client.clocks import Backoff, now_text, steady
from spotd_jobs.wire.client.console import log_line, reason_of
from spotd_jobs.wire.client.files import write_whole

INSTANCE_KEYS = ("CONTAINER_API_KEY", "RUNPOD_API_KEY")
MACHINE_DONE = "machine-done"
_PAUSE_S = 2.0
_PAUSE_MAX_S = 60.0
_TRY_FOR_S = 1800.0
_LINGER_S = 300.0
_ASKED_BY_NETWORK = ("vast", "runpod")
_VAST = "https://console.vast.ai"
_RUNPOD = "https://api.runpod.io"


def end_machine(how: dict[str, Any] | None, outcome: str, try_for_s: float = _TRY_FOR_S) -> bool:
    """Ask the provider to end this machine; return whether it accepted, or there is no way to ask it.

    False after half an hour of refusals: the process then ends, and its next start comes here again. Where a
    provider starts a container again as soon as it ends (RunPod, on a wiped disk), returning would be the worst that
    can be done: so this waits to be killed, for a while.
    """
    if how is None:
        return True
    give_up_at = steady() + try_for_s
    pauses = Backoff(_PAUSE_S, _PAUSE_MAX_S)
    while True:
        try:
            _ask(how, outcome)
            if how.get("method") in _ASKED_BY_NETWORK:
                time.sleep(_LINGER_S)
            return True
        except Exception as error:  # noqa: BLE001 - a machine that is not ended costs money: whatever failed, try again
            log_line("this machine could not be ended yet: " + reason_of(error))
        pause_s = pauses.next_s()
        if steady() + pause_s >= give_up_at:
            return False
        time.sleep(pause_s)


def _ask(how: dict[str, Any], outcome: str) -> None:
    method = how.get("method")
    if method == "file":
        content = json.dumps({"at": now_text(), "outcome": outcome})
        write_whole(os.path.join(os.getcwd(), MACHINE_DONE), content.encode(), durable=True)
    elif method == "vast":
        place = "/api/v0/instances/%s/" % _quoted(_own("CONTAINER_ID"))
        _delete((how.get("base_url") or _VAST).rstrip("/") + place, _own("CONTAINER_API_KEY"))
    elif method == "runpod":
        place = "/v2/pods/%s" % _quoted(_own("RUNPOD_POD_ID"))
        _delete((how.get("base_url") or _RUNPOD).rstrip("/") + place, _own("RUNPOD_API_KEY"))
    elif method == "shutdown":
        _shut_down()
    else:
        log_line("this runner knows no way named %r to end a machine" % str(method)[:40])


def _own(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError("the host has no " + name)
    return value


def _quoted(part: str) -> str:
    from urllib.parse import quote

    return quote(part, safe="")


def _delete(url: str, key: str) -> None:
    from spotd_jobs.wire.client import web

    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json", "Accept": "application/json"}
    status, _, answer = web.request("DELETE", url, headers, [b"{}"])
    # Gone already is what was wanted; but vast.ai answers 404 to a key that it refuses, too, and bills on.
    if status == 404 and b"auth_error" in answer:
        raise RuntimeError("the provider refuses the machine's own key")
    if status not in (200, 202, 204, 404, 410):
        raise RuntimeError("the provider answers HTTP %d" % status)


def _shut_down() -> None:
    import subprocess

    for command in (["shutdown", "-h", "now"], ["poweroff"], ["systemctl", "poweroff"], ["halt", "-p"]):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return
    raise RuntimeError("no command to shut down works here")

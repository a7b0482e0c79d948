"""Early warnings: where they come from, and how the job learns of them.

Sources: SIGTERM to the runner, an order in the grant, `$SPOTD_HOME/notice` (written by the machine's owner), and
the AWS instance metadata service. A *rebalance* recommendation only asks for a checkpoint; all others end the attempt.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Callable, NamedTuple

from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.clocks import CLOCK, as_epoch, as_text
from spotd_jobs.wire.client.console import clean, log_line, reason_of
from spotd_jobs.wire.client.files import read_text, write_whole

_IMDS_EVERY_S = 5.0
_IMDS_TIMEOUT_S = 2.0
_IMDS_TOKEN_S = 21600
_STALE_S = 600.0
_NOTICE_S = 120.0


class Notice(NamedTuple):
    """The machine goes away, at `at` where that is known (seconds since 1970, the store's clock)."""

    source: str
    reason: str
    at: float | None

    @property
    def at_text(self) -> str | None:
        return None if self.at is None else as_text(self.at)


class JobFile:
    """`SPOTD_NOTICE_FILE`: what the job itself may read of all this."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seq = 0

    def write(self, kind: str, reason: str, at: float | None) -> None:
        self._seq += 1
        content = {
            "schema": 1,
            "kind": kind,
            "at": None if at is None else as_text(at),
            "reason": reason,
            "seq": self._seq,
        }
        try:
            write_whole(self.path, json.dumps(content).encode(), mode=0o644)
        except OSError as error:
            log_line("the notice file could not be written: " + reason_of(error))


def from_file(path: str) -> Notice | None:
    """Return the notice that the machine's owner left at this path. Half a file is no notice yet."""
    text = read_text(path, 65536)
    if text is None:
        return None
    try:
        content = json.loads(text)
        at = content.get("at")
        return Notice("file", clean(str(content.get("reason") or "preempted")), as_epoch(at) if at else None)
    except (ValueError, TypeError, AttributeError):
        return None


class ImdsWatch:
    """Asks the metadata service of an AWS machine (IMDSv2) until it announces an interruption.

    Args:
        on_notice, on_rebalance: called from this watch's thread, each once.
    """

    def __init__(self, base_url: str, on_notice: Callable[[Notice], None], on_rebalance: Callable[[str], None]) -> None:
        self._base = base_url.rstrip("/")
        self._on_notice = on_notice
        self._on_rebalance = on_rebalance
        self._token: str | None = None
        self._rebalance_seen = False

    def start(self) -> None:
        threading.Thread(target=self._watch, name="imds", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._ask_on()
        finally:
            web.drop_connections()

    def _ask_on(self) -> None:
        while True:
            try:
                if self._ask_both():
                    return
            except web.WebError:
                pass  # it is not always there, and asking again is all that can be done
            except Exception as error:  # noqa: BLE001 - one odd answer must not end the watch for warnings
                log_line("the metadata service gave an odd answer: " + reason_of(error))
            time.sleep(_IMDS_EVERY_S)

    def _ask_both(self) -> bool:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            at = _time_of(action)
            # After a termination that failed, the old announcement stays.
            if at > CLOCK.now() - _STALE_S:
                self._on_notice(Notice("imds", "spot " + clean(str(action.get("action") or "interruption")), at))
                return True
        if not self._rebalance_seen:
            advice = self._get("/latest/meta-data/events/recommendations/rebalance")
            if advice is not None:
                self._rebalance_seen = True
                self._on_rebalance("spot rebalance recommendation")
        return False

    def _get(self, path: str) -> dict[str, Any] | None:
        status, body = self._get_once(path)
        if status == 401:
            self._token = None
            status, body = self._get_once(path)
        if status == 404:
            return None
        if status != 200:
            raise web.error_of(status)
        content = json.loads(body)
        return content if isinstance(content, dict) else None

    def _get_once(self, path: str) -> tuple[int, bytes]:
        if self._token is None:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_IMDS_TOKEN_S)}
            status, _, body = web.request("PUT", self._base + "/latest/api/token", life, [b""], _IMDS_TIMEOUT_S)
            if status != 200:
                raise web.error_of(status)
            self._token = body.decode("ascii", "replace").strip()
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, _, body = web.request("GET", self._base + path, headers, None, _IMDS_TIMEOUT_S)
        return status, body


def _time_of(action: dict[str, Any]) -> float:
    """When the machine is taken; as soon as AWS ever takes one where the announcement does not state it legibly."""
    try:
        return as_epoch(str(action["time"]))
    except (KeyError, ValueError, OverflowError) as error:
        log_line(
            "the announced interruption has no time that can be read, so it is two minutes from now: "
            + reason_of(error)
        )
        return CLOCK.now() + _NOTICE_S


def imds_url(wanted: str | None) -> str | None:
    """Where to ask: as the grant states, or the setting that AWS's own tools read."""
    return wanted or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or None

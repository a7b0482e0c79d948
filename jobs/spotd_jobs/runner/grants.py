"""The grant: leave to act, until when, and what is asked now. Kept fresh by a thread of its own.

The lease is renewed exactly when a grant arrives that was issued later than every one before, so a store that goes on
serving an old file (its daemon is dead or asleep) renews nothing.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Callable

from spotd_jobs.runner.leasefile import LeaseFile
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.clocks import CLOCK, Backoff, as_epoch, steady
from spotd_jobs.wire.client.console import log_line, reason_of

GRANT_BYTES_MAX = 64 * 1024 * 1024
MISSING_MAX = 3
_FIRST_PAUSE_S = 0.2
_PAUSE_MAX_S = 10.0
_MISSING_PAUSE_S = 1.0
_FIRST_TRY_S = 900.0


class NotCurrent(Exception):
    """No permission to run anything on this machine. The text states why.

    Attributes:
        end: how the machine may end itself, where a grant still named a way.
    """

    def __init__(self, why: str, end: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.end = end


class RunnerGrant:
    """One grant.json. `raw` holds secrets and is never shown.

    Attributes:
        asked_at: when it was asked for. The lease counts from then: how long the answer took is not known to be less.
    """

    def __init__(self, raw: dict[str, Any], asked_at: float) -> None:
        if raw.get("schema") != 1:
            raise ValueError("this runner understands grants of schema 1 only")
        self.raw = raw
        self.asked_at = asked_at
        self.job_id = str(raw["job"]["id"])
        self.job_name = str(raw["job"]["name"])
        self.attempt = int(raw["attempt"])
        self.prefix = str(raw["upload"]["prefix"])
        self.issued_at = as_epoch(raw["issued_at"])
        self.issued_at_text = str(raw["issued_at"])
        self.expires = as_epoch(raw["expires"])
        self.lease_s = float(raw["lease_s"])
        self.heartbeat_s = float(raw["heartbeat_s"])
        self.refresh_s = float(raw["refresh_s"])
        self.url = str(raw["grant_url"])
        self.spec = raw["spec"]
        self.checkpoint = raw["spec"]["checkpoint"]
        self.stop_grace_s = float(self.checkpoint.get("stop_grace_s") or 0.0)
        self.transfer = raw.get("transfer") or {}
        watch_s = raw["spec"].get("watch_s")
        self.watch_s = float(watch_s) if watch_s else None
        self.stop = (raw.get("orders") or {}).get("stop")
        self.checkpoint_order = int((raw.get("orders") or {}).get("checkpoint") or 0)

    def is_of(self, other: RunnerGrant) -> bool:
        return (self.job_id, self.attempt) == (other.job_id, other.attempt)


def read_grant(url: str) -> RunnerGrant:
    """Return the grant at this URL.

    Raises:
        web.WebError: nothing that is a grant can be read there now.
    """
    asked_at = steady()
    data = web.read(url, GRANT_BYTES_MAX)
    try:
        return RunnerGrant(json.loads(data), asked_at)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Never the content: it holds the job's secrets.
        raise web.WebError("what is there is no grant") from None


def first_grant(url: str, wait: Callable[[float], bool], *, published: bool = False) -> RunnerGrant:
    """Return a grant that permits to run now.

    Args:
        wait: sleeps, and returns whether to give up.
        published: this attempt has stored a checkpoint from this machine before.

    Raises:
        NotCurrent: it is gone, holds a stop order, or did not become current in time.
    """
    pauses, missing = Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S), 0
    expired_since: float | None = None
    give_up_at = steady() + _FIRST_TRY_S
    end: dict[str, Any] | None = None
    while True:
        why = ""
        try:
            grant = read_grant(url)
        except web.Missing:
            missing += 1
            why = "there is no grant for this machine"
            if missing >= MISSING_MAX:
                raise NotCurrent(why, end) from None
        except web.WebError as error:
            why = "the grant can not be read: %s" % error
        else:
            missing = 0
            if grant.stop is not None:
                reason = str(grant.stop.get("reason") or "no reason given")
                raise NotCurrent("ordered to stop: " + reason, grant.raw.get("self_terminate"))
            end = grant.raw.get("self_terminate")
            if (published or grant.raw.get("seen_running")) and not grant.raw.get("restore"):
                # The provider started this machine again. Starting the job over would put it back.
                raise NotCurrent("this attempt has run before, and nothing to resume from is offered", end)
            if grant.expires > CLOCK.now():
                return grant
            why = "the grant has expired"
            expired_since = expired_since or steady()
            give_up_at = min(give_up_at, expired_since + grant.lease_s)
            url = grant.url
        if steady() >= give_up_at or wait(pauses.next_s()):
            raise NotCurrent(why, end)
        log_line(why + ", trying again")


class GrantKeeper:
    """Reads the grant again and again; `wake` is called when there is something new to react to."""

    def __init__(self, grant: RunnerGrant, wake: Callable[[], None]) -> None:
        self._grant = grant
        self._first = grant
        self._wake = wake
        self._missing = 0
        self._foreign = False
        self._closing = threading.Event()
        self._mark = LeaseFile(wanted=(grant.raw.get("self_terminate") or {}).get("method") in ("file", "shutdown"))
        self._thread = threading.Thread(target=self._keep, name="grant", daemon=True)

    def start(self) -> None:
        self._mark_lease()
        self._thread.start()

    def _mark_lease(self) -> None:
        self._mark.mark(self._grant.lease_s, self._grant.stop_grace_s)

    def close(self) -> None:
        self._closing.set()

    @property
    def grant(self) -> RunnerGrant:
        """The newest grant of this attempt."""
        return self._grant

    @property
    def withdrawn(self) -> bool:
        """Whether the place of the grant shows that this attempt is no longer the current one."""
        return self._foreign or self._missing >= MISSING_MAX

    def lease_left_s(self) -> float:
        """How long this attempt may still act; negative when it may not."""
        return self._grant.asked_at + self._grant.lease_s - steady()

    def _keep(self) -> None:
        while not self._closing.wait(min(self._grant.refresh_s, _MISSING_PAUSE_S if self._missing else 1e9)):
            try:
                self.refresh()
            except Exception as error:  # noqa: BLE001 - the lease must end by its own clock, not by a dead thread
                log_line("reading the grant failed: " + reason_of(error))

    def refresh(self) -> None:
        """Ask for the grant once, and take it if it is a newer one of this attempt."""
        try:
            grant = read_grant(self._grant.url)
        except web.Missing:
            self._missing += 1
            if self.withdrawn:
                self._wake()
            return
        except web.WebError:
            return
        self._missing = 0
        if not grant.is_of(self._first):
            self._foreign = True
            self._wake()
            return
        self._foreign = False
        if grant.issued_at > self._grant.issued_at:
            self._grant = grant
            self._mark_lease()
            if grant.stop is not None or grant.checkpoint_order:
                self._wake()

"""A mark for the machine outside this process: as long as it changes, the lease is being renewed.

A machine that this process can not end by itself any more, because it hangs, is ended by a watchdog of the machine's
own shell (where a provider's start has one), which knows the lease from this file alone.
"""

from __future__ import annotations

import os

from spotd_jobs.wire.client.console import log_line, reason_of

MACHINE_LEASE = "machine-lease"
BEYOND_S = 1800.0
"""What a machine may do after its lease: stop the job, save and upload what is left, end itself."""
_LIMIT_MAX_S = 999_999


class LeaseFile:
    """The file that shows how long this machine may go on without another mark."""

    def __init__(self, *, wanted: bool) -> None:
        self._path = os.path.join(os.getcwd(), MACHINE_LEASE) if wanted else ""
        self._marks = 0
        self._failed = False

    def mark(self, lease_s: float, grace_s: float) -> None:
        """Record that the lease was renewed now. Failing is no reason to stop anything."""
        if not self._path:
            return
        self._marks += 1
        limit_s = int(min(max(lease_s, 0.0) + max(grace_s, 0.0) + BEYOND_S, _LIMIT_MAX_S))
        # In place and always as long, so that a full disk does not hinder it.
        text = "%010d %06d\n" % (self._marks, limit_s)
        try:
            place = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(place, text.encode())
            finally:
                os.close(place)
        except OSError as error:
            if not self._failed:
                log_line("the mark of the lease can not be written: " + reason_of(error))
            self._failed = True

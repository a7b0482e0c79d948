"""`python3 runner.pyz --grant-url URL --home DIR`: carries one attempt on this machine, at most once.

Providers start machines again at their own will, and start scripts twice. So: one runner at a time (a lock), none after
the attempt has ended (a mark), and none without a current grant. A machine that has nothing to run ends itself.
With `SPOTD_PREFETCH` in its environment it runs nothing, and only fetches what the attempt will restore.

Exit code 0: the attempt is over. 3: another runner is at work here. 1: the machine should be ended and could not be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any

from spotd_jobs.runner import handover, prefetch
from spotd_jobs.runner.attempt import AGAIN, MARK_FILE, AttemptRun
from spotd_jobs.runner.checkpoint_uploader import PUBLISHED
from spotd_jobs.runner.gang_places import join, report_end
from spotd_jobs.runner.process import CANARY_MARK, GRANT_URL_VARIABLE, end_machine, marked_processes
from spotd_jobs.runner.store import NotCurrent, RunnerGrant, RunnerStore, first_grant
from spotd_jobs.wire.client.sinks import is_full, lock, log_line, read_text, reason_of, write_whole
from spotd_jobs.wire.client.web import CLOCK, now_text, steady

DONE = "done"
END = "end.json"
BOOT = "boot"
EXIT_BUSY = 3
_REPORT_S = 30.0
BOOT_MAX = 8 * 10**9
"""Times the numbers of each boot it has at most 16 digits, to which names of reports are filled up."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="spotd-runner", description="Carries one attempt of a job on this machine.")
    parser.add_argument("--grant-url", default=os.environ.get(GRANT_URL_VARIABLE), help="where grant.json is")
    parser.add_argument("--home", default=os.environ.get("SPOTD_HOME") or "spotd", help="a folder of the runner's own")
    options = parser.parse_args(arguments)
    if not options.grant_url:
        parser.error("--grant-url (or %s) is needed" % GRANT_URL_VARIABLE)
    home = os.path.abspath(options.home)
    only_prefetch = bool(os.environ.get(prefetch.VARIABLE))
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        held = None if only_prefetch else lock(os.path.join(home, "lock"))
    except OSError as error:
        if only_prefetch:
            raise
        return _unusable(options.grant_url, home, error)
    if only_prefetch:
        prefetch.prefetch_newest(options.grant_url, home)
        return 0
    if held is None:
        log_line("another runner is at work here")
        return EXIT_BUSY
    done = _json(os.path.join(home, DONE))
    if done is not None:
        log_line("this machine's attempt has ended; nothing is run")
        return _end(done.get("self_terminate"), str(done.get("outcome")))
    _kill_leftovers(home)
    # Of a machine that was handed over, the provider's start script knows the first grant only.
    return _carry(read_text(os.path.join(home, handover.NEXT)) or options.grant_url, home)


def _carry(grant_url: str, home: str) -> int:
    restarted, boot = _next_boot(home)
    try:
        grant = first_grant(grant_url, _sleep, published=os.path.exists(os.path.join(home, PUBLISHED)))
    except NotCurrent as not_current:
        log_line("nothing is run: %s" % not_current)
        how = not_current.end or (_json(os.path.join(home, END)) or {}).get("self_terminate")
        return _conclude(home, how, "not_current")
    how = grant.raw.get("self_terminate")
    try:
        write_whole(os.path.join(home, END), json.dumps({"self_terminate": how}).encode())
    except OSError as error:
        log_line("how to end could not be noted on disk: " + reason_of(error))
    try:
        run = AttemptRun(grant, home, boot, restarted=restarted, gang=join(grant, boot))
        outcome = run.carry()
        if outcome == AGAIN and run.next_attempt:
            handover.become(run.next_attempt, home, os.path.join(home, DONE))
        if outcome == AGAIN:
            _begin_again(run.grant_url, home)
        if run.handover.waits:
            _go_on(run, home, how, outcome)
    except NotCurrent as not_current:
        log_line("nothing is run: %s" % not_current)
        outcome = "not_current"
    except Exception as error:  # noqa: BLE001 - whatever broke, this machine costs money until it has ended
        log_line("the runner failed: " + reason_of(error))
        outcome = "disk_full" if is_full(error) else "runner_error"
        _report_end(grant, boot, outcome, reason_of(error))
    return _conclude(home, how, outcome)


def _go_on(run: AttemptRun, home: str, how: dict[str, Any] | None, outcome: str) -> None:
    """Become the runner of the machine's next attempt; return where there is none."""
    try:
        _note_end(home, how, outcome)  # a machine that starts again meanwhile does not do the job once more
        grant_url = run.next_grant()
        if grant_url:
            handover.become(grant_url, home, os.path.join(home, DONE))
    except Exception as error:  # noqa: BLE001 - whatever broke, the attempt is reported, and the machine must end
        log_line("this machine goes on with no other job: " + reason_of(error))


def _begin_again(grant_url: str, home: str) -> None:
    """Become a runner that has just started: what it finds here, it finds as after a restart of the machine."""
    environment = dict(os.environ)
    environment[GRANT_URL_VARIABLE] = grant_url
    sys.stderr.flush()
    program = os.path.abspath(sys.argv[0])
    os.execve(sys.executable, [sys.executable, "-IS", program, "--home", home], environment)  # noqa: S606 - its own program


def _unusable(grant_url: str, home: str, error: OSError) -> int:
    """Nothing can be kept on this machine, so nothing is run: that is reported, and the machine ends."""
    log_line("this machine can not be used: " + reason_of(error))
    try:
        grant = first_grant(grant_url, _sleep)
    except NotCurrent as not_current:
        return _end(not_current.end, "not_current")
    outcome = "disk_full" if is_full(error) else "runner_error"
    _report_end(grant, int(CLOCK.now()), outcome, "this machine can not be used: " + reason_of(error))
    return _conclude(home, grant.raw.get("self_terminate"), outcome)


def _report_end(grant: RunnerGrant, boot: int, outcome: str, reason: str) -> None:
    """Store the end of an attempt that could not even begin, by nothing on this machine's disk, or give up."""
    row = {"exit_code": None, "signal": None, "oom": None, "outputs_lost": 0}
    if report_end(grant, boot, {"outcome": outcome, "reason": reason, **row}):
        return
    give_up_at = steady() + _REPORT_S
    store = RunnerStore(lambda: grant, boot, lambda: steady() > give_up_at)
    store.events.start()
    store.events.add("exit", outcome=outcome, phase="boot", reason=reason, **row)
    store.events.flush(_REPORT_S)


def _conclude(home: str, how: dict[str, Any] | None, outcome: str) -> int:
    """Nothing will ever run here again, and the machine ends."""
    try:
        _note_end(home, how, outcome)
    except OSError as error:
        log_line("the end could not be noted on disk: " + reason_of(error))
    return _end(how, outcome)


def _note_end(home: str, how: dict[str, Any] | None, outcome: str) -> None:
    """Note on disk that nothing runs here any more.

    Raises:
        OSError: it cannot be written.
    """
    mark = {"outcome": outcome, "at": now_text(), "self_terminate": how}
    write_whole(os.path.join(home, DONE), json.dumps(mark).encode(), durable=True)


def _end(how: dict[str, Any] | None, outcome: str) -> int:
    # From here on a signal may end the program at once, as there is nothing to save.
    for name in ("SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    return 0 if end_machine(how, outcome) else 1


def _next_boot(home: str) -> tuple[bool, int]:
    """Whether a runner was here before, and a number above all it used: the second, in which this one started."""
    path = os.path.join(home, BOOT)
    text = (read_text(path, 64) or "").strip()
    before = int(text) if text.isdigit() else 0
    now = int(CLOCK.now())
    # A clock that is centuries ahead must not make numbers longer than their places in a name.
    boot = max(before + 1, now if now < BOOT_MAX else 0)
    try:
        write_whole(path, str(boot).encode(), durable=True)
    except OSError as error:
        log_line("the start could not be noted on disk: " + reason_of(error))
    return before > 0, boot


def _kill_leftovers(home: str) -> None:
    """Kill processes of a runner that was killed here, so that they do not go on beside the new one."""
    mark = (read_text(os.path.join(home, MARK_FILE), 256) or "").strip()
    if not mark:
        return
    for _ in range(200):
        rest = marked_processes(mark) | marked_processes(CANARY_MARK % mark)
        if not rest:
            return
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.01)


def _json(path: str) -> dict[str, Any] | None:
    text = read_text(path)
    try:
        value = json.loads(text) if text is not None else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else None


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def run() -> None:
    """Never returns: the process ends with `main`'s exit code, daemon threads or not."""
    try:
        code = main()
    except Exception as error:  # noqa: BLE001 - a traceback on a console without readers helps no user
        log_line("this machine can not be used: " + reason_of(error))
        code = 1
    sys.stderr.flush()
    os._exit(code)

"""One attempt from its grant to its last report.

The order of things: code and checkpoint come in side by side, the setup runs as soon as the code is there, the command
as soon as both are done. While it runs this thread only waits, for the job's end or for a reason to stop it. Then what
is complete goes to the store, and last of all the report of it.
"""

from __future__ import annotations

import binascii
import os
import signal
import sys
import threading
from functools import partial
from typing import Any, Callable

from spotd_jobs.runner import VERSION, process, shutdown
from spotd_jobs.runner.checkpoint_uploader import CheckpointUploader
from spotd_jobs.runner.gang import KEPT, Gang
from spotd_jobs.runner.handover import NextJob
from spotd_jobs.runner.heartbeat import HeartbeatWriter, Status
from spotd_jobs.runner.logs import LogShipper, ProgressMeter, patience_s
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.prefetch import Prefetch
from spotd_jobs.runner.process import OomWatch, job_environment
from spotd_jobs.runner.restore import Restored, RestoreRun, clear_aside
from spotd_jobs.runner.shutdown import TICK_S, Background, ShutdownWatch, Stop, Wakeups
from spotd_jobs.runner.store import GrantKeeper, RunnerGrant, RunnerStore
from spotd_jobs.runner.upload import Progress
from spotd_jobs.wire.client.sinks import (
    DiskFull,
    clean,
    folder_lock_path,
    free_bytes,
    is_full,
    lock,
    log_line,
    reason_of,
    remove,
    write_whole,
)
from spotd_jobs.wire.client.web import CLOCK, steady

MARK_FILE = "mark"
AGAIN = "again"
"""The outcome of an attempt that goes on with other machines beside this one: its runner is to start once more."""
_SETUP_GRACE_S = 5.0
_FLUSH_MIN_S, _FLUSH_MAX_S = 2.0, 600.0
_WITHDRAWN_FLUSH_S = 5.0
_REPORT_S = 30.0
_CANARY_GRACE_S = 5.0
_BEFORE_AGAIN_S = 10.0
_REASON_S = 5.0
"""Slurm gives half a minute, systemd one and a half, between the signal and the kill."""
_UNUSABLE = {
    "CodeUnusable": "code_unusable",
    "InputUnusable": "input_unusable",
    "DataUnusable": "input_unusable",
    "DataAway": "input_away",
    "GangIncomplete": "member_lost",
    "ByAnotherNumber": "input_unusable",
}
_FULL_BYTES = 16 * 1024 * 1024
"""A disk with less room than this was full for every process that wrote to it."""


class _Halt(Exception):
    """The attempt ends here, with this outcome."""

    def __init__(self, outcome: str, reason: str, ended: process.ProcessEnd | None = None) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.reason = reason
        self.ended = ended


def _failure(error: OSError, what: str) -> _Halt:
    """Return the end that an error of this machine's own disk makes."""
    return _Halt("disk_full" if is_full(error) else "runner_error", "%s: %s" % (what, reason_of(error)))


class AttemptRun:
    """What one start of the runner does for one attempt.

    Args:
        restarted: a runner has been at work on this machine before.
        gang: this machine's part in the work of several.
    """

    def __init__(self, grant: RunnerGrant, home: str, boot: int, *, restarted: bool, gang: Gang | None = None) -> None:
        self._home = home
        self._boot = boot
        self._restarted = restarted
        self._flush_until = float("inf")
        self._cancel = threading.Event()
        self._wakeups = Wakeups()
        self._keeper = GrantKeeper(grant, self._wakeups.wake)
        self._gang = gang
        store_type = RunnerStore if gang is None else gang.store_type
        self._store = store_type(lambda: self._keeper.grant, boot, self._is_hopeless)
        self._status = Status(boot)
        self._status.grant_issued_at = grant.issued_at_text
        self._heartbeat = HeartbeatWriter(self._store, self._status, home, lambda: self._keeper.grant.heartbeat_s)
        self._job_file = shutdown.JobFile(os.path.join(home, "job-notice.json"))
        remove(self._job_file.path)
        self._shutdown_watch = ShutdownWatch(
            self._keeper, self._wakeups, self._store, self._status, self._job_file, home, gang
        )
        secrets = [str(value) for value in (grant.raw.get("secrets") or {}).values()]
        rate = int(grant.transfer.get("log_bytes_per_h") or 16 * 1024 * 1024)
        self._logs = LogShipper(self._store, secrets, rate, patience_s(grant.heartbeat_s))
        self._known = ChunkIndex(os.path.join(home, "known-chunks"), grant.prefix)
        self._chunk_bytes = int(grant.transfer.get("chunk_bytes") or 8 * 1024 * 1024)
        self._workdir = os.path.join(home, "work")
        self._output_dir = os.path.join(home, "outputs")
        self._input_dir = os.path.join(home, "inputs")
        path = grant.checkpoint.get("path")
        default = os.path.join(home, "checkpoints")
        self._checkpoint_dir = os.path.normpath(os.path.join(self._workdir, path)) if path else default
        self._status.progress = ProgressMeter(lambda: self._logs.printed, self._checkpoint_dir)
        self._status.watch_s = grant.watch_s
        self.handover = NextJob(grant, home)
        self._mark = binascii.hexlify(os.urandom(12)).decode()
        self._uploader: CheckpointUploader | None = None
        self._restored: Restored | None = None
        self._oom = OomWatch()
        self._last_phase = "boot"

    def carry(self) -> str:
        """Carry the attempt until it is over and reported as far as the store allows; return its outcome."""
        grant = self._keeper.grant
        self._heartbeat.start()
        self._store.events.start()
        self._keeper.start()
        self._logs.start()
        if self._gang is not None:
            self._gang.attach(self._store, self._wakeups.wake, self._logs.add_output)
        python = "%d.%d.%d" % sys.version_info[:3]
        self._store.events.add("boot", boot=self._boot, runner=VERSION, python=python, restart=self._restarted)
        try:
            ended = self._run_job(grant)
            stop = self._shutdown_watch.stop
            halt = _Halt(stop.outcome, stop.reason, ended) if stop is not None else self._judge(ended)
        except _Halt as early:
            halt = early
        except Exception as error:  # noqa: BLE001 - whatever broke, it must be reported and the machine must end
            log_line("the runner failed: " + reason_of(error))
            halt = _Halt("disk_full" if is_full(error) else "runner_error", reason_of(error))
        if halt.outcome == AGAIN:
            return AGAIN
        if self._gang is not None and halt.outcome in (KEPT, "member_lost"):
            found = self._step("the wait for another machine", lambda: (self._await_round(halt),))
            if found == (None,):
                return AGAIN
            halt = found[0] if found else halt
            self._flush_until = float("inf")
        self._cancel.set()
        return self._finish(halt)

    def _await_round(self, halt: _Halt) -> _Halt | None:
        """Save, and wait for a machine in the place of a lost one; return why that ends, `None` once it is there."""
        gang = self._gang
        if gang is None or not gang.keeps(halt.outcome):
            return halt
        if self._limit_flush():
            self._drain(halt.ended)
        self._flush_until = float("inf")
        self._phase("save")
        self._logs.add_line("kept: %s" % halt.reason)
        self._shutdown_watch.stop = None
        give_up_at = steady() + gang.keep_s
        while steady() < give_up_at:
            row = {"round": gang.round, "lost": gang.await_round()}
            if gang.saves and self._status.gang != row:
                self._status.gang = row
                self._heartbeat.soon()
            stop = self._tick()
            if stop is not None and gang.waits_through(stop):
                self._shutdown_watch.stop = stop = None
                continue
            if stop is not None and not gang.next_grant:
                return _Halt(stop.outcome, stop.reason, halt.ended)
            if gang.begins_again(self._keeper.grant):
                self._step("the log", lambda: self._logs.close(_BEFORE_AGAIN_S))
                self._step("the last events", lambda: self._store.events.flush(_BEFORE_AGAIN_S))
                return None
        return halt

    @property
    def grant_url(self) -> str:
        """Where the newest grant is."""
        return self._keeper.grant.url

    @property
    def next_attempt(self) -> str:
        """Where the grant of the attempt is with which a machine of several goes on; empty: with this one."""
        return "" if self._gang is None else self._gang.next_grant

    def _run_job(self, grant: RunnerGrant) -> process.ProcessEnd:
        self._make_folders()
        if grant.raw.get("canary") and self._gang is None:
            self._run_canary(grant)
        inside = (self._checkpoint_dir + os.sep).startswith(self._workdir + os.sep)
        restoring = None if inside else self._begin_restore(grant)
        self._phase("code")
        inputs = self._begin_inputs(grant)
        data = self._begin_data(grant)
        self._await_work(self._begin_code(grant))
        if inputs is not None:
            self._await_work(inputs)
        if data is not None:
            self._place_data(self._await_work(data))
        if restoring is None:
            restoring = self._begin_restore(grant)
        if grant.spec.get("setup"):
            self._phase("setup")
            ended = self._run_group(["/bin/sh", "-c", grant.spec["setup"]], self._environment(grant, ""))
            stop = self._shutdown_watch.stop
            if stop is not None:
                raise _Halt(stop.outcome, stop.reason, ended)
            if not ended.succeeded:
                raise _Halt("setup_failed", "setup: " + ended.words(), ended)
        self._phase("restore")
        self._restored = self._await_work(restoring)
        self._report_restore()
        self._start_uploader(grant)
        resume = self._restored.path if self._restored is not None else ""
        if self._gang is not None:
            manifest = "" if self._restored is None else self._restored.manifest_sha256
            self._await_work(Background(partial(self._gang.gather, manifest), self._wakeups, "gang"))
            self._status.gang = {"round": self._gang.round, "lost": []}
        self._phase("run")
        ended = self._run_group(
            [str(word) for word in grant.spec["run"]],
            self._environment(grant, resume),
            lambda pid: self._store.events.add("started", pid=pid, resume=self._restored and self._restored.name),
        )
        if self._uploader is not None:
            self._uploader.note_end(ended)
        return ended if self._gang is None else self._gang.settle(ended, self._tick)

    def _run_canary(self, grant: RunnerGrant) -> None:
        from spotd_jobs.runner.canary import FILE, Canary

        if self._restarted:
            remove(os.path.join(self._home, FILE))  # of a measurement that was cut off
            return
        self._phase("canary")
        mark = process.CANARY_MARK % self._mark
        canary = Canary(grant.raw["canary"], grant.raw, self._home, mark, self.handover.folders)
        work = Background(canary.measure, self._wakeups, "canary")
        try:
            # A disk that hangs keeps its thread: the job does not wait for it.
            while not work.done and steady() < canary.until + _CANARY_GRACE_S:
                stop = self._tick()
                if stop is not None:
                    raise _Halt(stop.outcome, stop.reason)
        finally:
            canary.stop()
        found = clean(canary.words())
        seconds = round(steady() - canary.began, 1)
        self._store.events.add("canary", finding=found, seconds=seconds, unfit=canary.unfit or None)
        self._logs.add_line("canary: " + found)
        if canary.unfit and canary.may_refuse:
            raise _Halt("unfit", "its canary found " + canary.unfit)

    def _judge(self, ended: process.ProcessEnd) -> _Halt:
        """How the attempt ends when its command has ended by itself."""
        if ended.succeeded:
            return _Halt("succeeded", ended.words(), ended)
        for folder in (self._checkpoint_dir, self._workdir, self._home):
            free = free_bytes(folder)
            if free is not None and free < _FULL_BYTES:
                return _Halt("disk_full", ended.words() + ", and the disk is full", ended)
        return _Halt("failed", ended.words(), ended)

    def _make_folders(self) -> None:
        try:
            write_whole(os.path.join(self._home, MARK_FILE), self._mark.encode())
            for folder in (self._workdir, self._output_dir, self._input_dir, *self.handover.folders.values()):
                os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise _failure(error, "the work folder can not be made") from None

    def _begin_code(self, grant: RunnerGrant) -> Background:
        def fetch_and_unpack() -> None:
            code = grant.raw.get("code")
            if code is None:
                return
            from spotd_jobs.runner import outputs as unpack

            archive = os.path.join(self._home, "code.tar.gz")
            unpack.fetch_code(code, archive, self._cancel.wait)
            unpack.unpack(archive, self._workdir)
            remove(archive)

        return Background(fetch_and_unpack, self._wakeups, "code")

    def _begin_inputs(self, grant: RunnerGrant) -> Background | None:
        if not grant.raw.get("inputs"):
            return None

        def fetch() -> None:
            from spotd_jobs.runner.outputs import fetch_inputs

            fetch_inputs(
                lambda: self._keeper.grant.raw.get("inputs") or grant.raw.get("inputs") or [],
                self._input_dir,
                int(grant.transfer.get("connections") or 4),
                self._cancel.wait,
                self._cancel.is_set,
                lambda: self._keeper.grant.expires > CLOCK.now(),
            )

        return Background(fetch, self._wakeups, "inputs")

    def _begin_data(self, grant: RunnerGrant) -> Background | None:
        if not grant.raw.get("data"):
            return None

        from spotd_jobs.runner.data import DataProgress, fetch_data
        from spotd_jobs.runner.elsewhere import data_run

        progress = self._status.data = DataProgress()

        def fetch() -> list[Any]:
            progress.runs = runs = [
                data_run(
                    lambda: self._keeper.grant.raw.get("data") or grant.raw.get("data") or [],
                    number,
                    self._home,
                    self._workdir,
                    int(grant.transfer.get("connections") or 4),
                    self._cancel.wait,
                    self._cancel.is_set,
                    lambda: self._keeper.grant.expires > CLOCK.now(),
                    self._logs.add_line,
                )
                for number in range(len(grant.raw["data"]))
            ]
            fetch_data(runs, self._home)
            return runs

        return Background(fetch, self._wakeups, "data")

    def _place_data(self, runs: list[Any]) -> None:
        def place() -> None:
            for run in runs:
                run.put_in_place()

        self._await_work(Background(place, self._wakeups, "data in place"))

    def _begin_restore(self, grant: RunnerGrant) -> Background:
        own = (self._checkpoint_dir + os.sep).startswith(self._home + os.sep)
        if not own and lock(folder_lock_path(self._checkpoint_dir)) is None:
            raise _Halt("runner_error", "another job on this machine uses the same checkpoint folder")
        try:
            if self._gang is None:
                clear_aside(self._checkpoint_dir, self._boot)
            else:
                clear_aside(self._checkpoint_dir, self._boot, grant.prefix, self._gang.place.rank)
        except OSError as error:
            raise _failure(error, "the checkpoint folder can not be used") from None
        restore = RestoreRun(
            lambda: self._keeper.grant.raw.get("restore") or grant.raw.get("restore") or [],
            self._checkpoint_dir,
            int(grant.transfer.get("connections") or 4),
            self._cancel.wait,
            self._cancel.is_set,
            lambda: self._keeper.grant.expires > CLOCK.now(),
            Prefetch(self._home),
            1 if self._gang is None else self._gang.place.nodes,
            0 if self._gang is None else self._gang.place.rank,
        )
        self._status.restore = restore
        return Background(restore.run, self._wakeups, "restore")

    def _report_restore(self) -> None:
        fallbacks = self._status.restore.fallbacks
        for number, fallback in enumerate(fallbacks):
            later = fallbacks[number + 1].name if number + 1 < len(fallbacks) else None
            following = later or (self._restored.name if self._restored is not None else None)
            self._store.events.add("checkpoint_fallback", name=fallback.name, reason=fallback.reason, next=following)
            self._logs.add_line("checkpoint %s can not be used: %s" % (fallback.name, fallback.reason))
        if self._restored is not None:
            done = self._restored
            self._store.events.add(
                "restored", name=done.name, step=done.step, bytes=done.bytes, seconds=done.seconds, key=done.key
            )

    def _start_uploader(self, grant: RunnerGrant) -> None:
        if self._gang is not None and not self._gang.saves and not self._gang.has_parts:
            return
        # A machine that lost its disk may be this attempt's second: then its own manifests are on offer.
        own = any(str(offer["manifest"]["key"]).startswith(grant.prefix) for offer in grant.raw.get("restore") or [])
        places = self._store, self._known, self._checkpoint_dir, self._home
        if self._gang is not None and self._gang.has_parts:
            from spotd_jobs.runner.parts import Gatherer, Keeper

            kind = Gatherer if self._gang.saves else Keeper
            self._uploader = kind(self._gang, *places, grant.checkpoint, self._chunk_bytes)
        else:
            self._uploader = CheckpointUploader(*places, grant.checkpoint, self._chunk_bytes)
        restored = self._restored
        self._uploader.start(
            restored.entry if restored is not None else None,
            restored.manifest_sha256 if restored is not None else None,
            first_boot=not self._restarted and not own,
        )
        self._status.uploader = self._uploader

    def _environment(self, grant: RunnerGrant, resume: str) -> dict[str, str]:
        return job_environment(
            grant,
            {
                "SPOTD_CHECKPOINT_DIR": self._checkpoint_dir,
                "SPOTD_RESUME": resume,
                "SPOTD_OUTPUT_DIR": self._output_dir,
                "SPOTD_INPUT_DIR": self._input_dir,
                "SPOTD_NOTICE_FILE": self._job_file.path,
                process.MARK: self._mark,
                **({} if self._gang is None else self._gang.environment()),
            },
            self.handover.folders,
        )

    def _phase(self, name: str) -> None:
        self._status.phase = self._last_phase = name
        self._heartbeat.soon()

    def _tick(self) -> Stop | None:
        self._wakeups.sleep(TICK_S)
        self._status.grant_issued_at = self._keeper.grant.issued_at_text
        self._status.watch_s = self._keeper.grant.watch_s
        stop = self._shutdown_watch.poll()
        if stop is not None and self._gang is not None:
            self._gang.pass_on(stop)
        if self._shutdown_watch.wants_checkpoint and self._uploader is not None:
            self._shutdown_watch.wants_checkpoint = False
            self._uploader.scan_now()
            self._heartbeat.soon()
        return stop

    def _await_work(self, work: Background) -> Any:
        while not work.done:
            stop = self._tick()
            if stop is not None:
                raise _Halt(stop.outcome, stop.reason)
            if self._gang is not None and self._gang.is_outdated(self._keeper.grant):
                raise _Halt(AGAIN, "")
        try:
            return work.result()
        except DiskFull as full:
            raise _Halt("disk_full", reason_of(full)) from None
        except OSError as error:
            raise _failure(error, "while preparing") from None
        except Exception as error:
            outcome = _UNUSABLE.get(type(error).__name__)
            if outcome is None:
                raise
            raise _Halt(outcome, str(error)) from None

    def _run_group(
        self, argv: list[str], env: dict[str, str], on_start: Callable[[int], None] | None = None
    ) -> process.ProcessEnd:
        """Run the command to its end, or stop it; nothing of it is left."""
        stop = self._shutdown_watch.poll()
        if stop is not None:
            raise _Halt(stop.outcome, stop.reason)
        job = process.JobProcess(argv, env, self._workdir, self._logs.pipe)
        self.handover.groups.append(job)
        self._status.pid = job.pid
        if on_start is not None:
            on_start(job.pid)
        self._heartbeat.soon()
        while job.poll() is None and self._tick() is None:
            continue
        self._await_reason(job.poll())
        if not (job.is_over() if self._shutdown_watch.stop is not None else job.poll()):
            rules = self._keeper.grant.checkpoint
            self._stop_group(job, rules, float(rules.get("stop_grace_s", 90.0)) if on_start else _SETUP_GRACE_S)
        ended = job.poll()
        if on_start is not None or ended is None or not ended.succeeded:
            job.kill_rest(self._mark)  # what a successful setup left running is there for the job
        self._status.pid = None
        return job.poll() or process.ProcessEnd(None, int(signal.SIGKILL), steady())

    def _await_reason(self, ended: process.ProcessEnd | None) -> None:
        """Wait a little for a reason to stop, when the command has ended as one does that was asked to.

        Where a machine ends, or its scheduler takes it away, every process is signalled: a command may be gone before
        this one is signalled, and has neither failed nor, if it leaves with exit code 0, done its work.
        """
        if ended is None or self._shutdown_watch.poll() is not None:
            return
        give_up_at = steady() + (_REASON_S if ended.is_by_request else TICK_S)
        while steady() < give_up_at and self._tick() is None:
            continue

    def _stop_group(self, job: process.JobProcess, rules: dict[str, Any], job_grace_s: float) -> None:
        began = steady()
        self._phase("save")
        if self._uploader is not None:
            self._uploader.hurry()
        if self._shutdown_watch.kill_at(began, job_grace_s) > began:
            job.send(process.signal_number(str(rules.get("stop_signal") or "SIGTERM")))
        while not job.is_over():
            left_s = self._shutdown_watch.kill_at(began, job_grace_s) - steady()
            if left_s <= 0:
                job.send(signal.SIGKILL)
                give_up_at = steady() + _REPORT_S
                while job.poll() is None and steady() < give_up_at:
                    self._wakeups.sleep(TICK_S)
                return
            self._wakeups.sleep(min(TICK_S, left_s))

    def _is_hopeless(self) -> bool:
        if steady() > self._flush_until:
            return True
        budget_s = min(max(self._keeper.grant.lease_s, _FLUSH_MIN_S), _FLUSH_MAX_S)
        return self._keeper.lease_left_s() < -budget_s

    def _limit_flush(self) -> bool:
        """Whether what is complete is still to be uploaded; sets until when."""
        stop = self._shutdown_watch.stop
        if stop is None:
            return True
        lease_s = self._keeper.grant.lease_s
        if stop.outcome == "not_current":
            self._flush_until = steady() + _WITHDRAWN_FLUSH_S
        elif stop.at is not None:
            # The machine may live longer than announced: go on until it really dies, within reason.
            self._flush_until = steady() + max(0.0, stop.at - CLOCK.now()) + _FLUSH_MAX_S
        else:
            self._flush_until = steady() + min(max(lease_s, _FLUSH_MIN_S), _FLUSH_MAX_S)
        return stop.flush

    def _finish(self, halt: _Halt) -> str:
        """Store what is complete and report the end. Whatever fails in one step, all later ones are taken."""
        phase, ended = self._last_phase, halt.ended
        may_flush = bool(self._step("the time for uploads", self._limit_flush))
        oom = self._step("the cause of death", lambda: ended is not None and self._oom.happened(ended))
        oom = oom if ended is not None else None
        reason = clean(halt.reason + (", out of memory" if oom else ""))
        if may_flush:
            self._step("the last checkpoints", lambda: self._drain(ended))
        lost = 0
        if halt.outcome == "succeeded" and (self._gang is None or self._gang.saves):
            lost = self._step("the outputs", self._store_outputs) or 0
        else:
            self._step("the log", lambda: self._logs.add_line("ended: %s (%s)" % (halt.outcome, reason)))
        self._status.exit = {
            "outcome": halt.outcome,
            "phase": phase,
            "exit_code": ended.exit_code if ended is not None else None,
            "signal": ended.signal if ended is not None else None,
            "oom": oom,
            "reason": reason,
            "outputs_lost": lost,
        }
        exit_row = self._status.exit
        if halt.outcome == "succeeded" and not lost and self._step("the next job", self._clear_for_next):
            exit_row["waits"] = True
        self._step("the log", lambda: self._logs.close(self._time_for(_REPORT_S)))
        if self._gang is not None:
            self._gang.close(exit_row)
        self._step("the report of the end", lambda: self._store.events.add("exit", **exit_row))
        self._step("the last events", lambda: self._store.events.flush(self._time_for(float("inf"))))
        self._status.phase = "done"
        self._step("the last heartbeat", self._heartbeat.last)
        self._step("the watch over the grant", self._keeper.close)
        log_line("attempt %d ended: %s (%s)" % (self._keeper.grant.attempt, halt.outcome, reason))
        return halt.outcome

    def _clear_for_next(self) -> bool:
        """Whether all that was the job's is removed, so that the machine may be handed over."""
        if self._gang is not None or self._shutdown_watch.poll() is not None or self._keeper.withdrawn:
            return False
        places = (self._checkpoint_dir, self._mark)
        return self.handover.clear(self._keeper.grant, *places, self._logs.add_line, restarted=self._restarted)

    def next_grant(self) -> str:
        """Return where the grant of the machine's next attempt is, once there is one; empty where none comes."""
        return self.handover.next_grant(self._wakeups)

    def _step(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what one step of the end gives, `None` if it failed."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the report and the end of the machine must come in any case
            log_line("%s: %s" % (what, reason_of(error)))
            return None

    def _drain(self, ended: process.ProcessEnd | None) -> None:
        if self._uploader is None:
            return
        self._phase("upload")
        try:
            self._uploader.drain(
                min(self._flush_until, steady() + 86400.0),
                ended_cleanly=ended is not None and ended.succeeded,
                died_at=ended.at if ended is not None else steady(),
            )
        except Exception as error:
            self._store.events.add("checkpoint_skipped", name="(the last ones)", reason=reason_of(error))
            raise

    def _time_for(self, most_s: float) -> float:
        return max(1.0, min(most_s, self._flush_until - steady(), 86400.0))

    def _store_outputs(self) -> int:
        """How many outputs there are and could not be stored."""
        from spotd_jobs.runner import outputs

        patterns = [str(pattern) for pattern in self._keeper.grant.spec.get("outputs") or []]
        progress = self._uploader.progress if self._uploader is not None else Progress()
        left_out = outputs.LeftOut()
        places = (self._workdir, patterns, self._output_dir, os.path.join(self._home, "gathered"))
        try:
            stored = outputs.store_outputs(self._store, self._known, progress, self._chunk_bytes, places, left_out)
        except Exception as error:  # noqa: BLE001 - the job is done, and what became of its outputs must be reported
            left_out.add("all outputs", reason_of(error))
            left_out.count = max(left_out.count, outputs.count_of(places))
            stored = None
        if stored is not None:
            self._store.events.add("outputs", files=stored.files, bytes=stored.bytes, key=stored.key)
        if left_out.count:
            self._store.events.add("outputs_lost", files=left_out.count, reason=left_out.reason)
            self._logs.add_line("%d outputs could not be stored: %s" % (left_out.count, left_out.reason))
        return left_out.count

"""A store in a folder, a grant in it, and the real runner as a real process beside them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spotd_jobs.start import build_runner
from spotd_jobs.wire.grant import (
    Blob,
    CheckpointSaving,
    EndMethod,
    Grant,
    GrantStopOrder,
    JobRef,
    NoticeSources,
    Orders,
    Restore,
    RunSpec,
    SelfTerminate,
    TransferRules,
    Upload,
    UploadMethod,
    attempt_prefix,
)
from spotd_jobs.wire.manifest import AcceptedManifest, restore_of, verify_manifest
from spotd_jobs.wire.reports import Heartbeat, HostEvent, parse_event, parse_heartbeat
from tests import waiting
from tests.fakes.compiled_runner import compiled_runner

JOB = "j1"
PATIENCE_S = 30.0
POLL_S = 0.02


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of the condition, asked for more often than `waiting.until` does: files answer at once."""
    return waiting.until(condition, what, within=patience_s, every=POLL_S)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a look at the folder tells of an object."""

    size: int
    sha256: str | None


class FolderStore:
    """The least of a store: objects are files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.root / key

    def put(self, key: str, data: bytes) -> str:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".rig-{path.name}")
        temporary.write_bytes(data)
        temporary.replace(path)
        return self.url(key)

    def get(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        self.path(key).unlink()

    def url(self, key: str) -> str:
        return self.path(key).as_uri()

    def keys(self, prefix: str) -> list[str]:
        folder = self.path(prefix)
        if not folder.is_dir():
            return []
        return sorted(
            str(path.relative_to(self.root))
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )

    def head(self, key: str) -> Stored | None:
        data = self.get(key)
        return None if data is None else Stored(len(data), hashlib.sha256(data).hexdigest())

    def upload(self, prefix: str, expires: datetime) -> Upload:
        """Leave to write below the prefix."""
        self.path(prefix).mkdir(parents=True, exist_ok=True)
        fields = {"directory": str(self.path(prefix))}
        return Upload(method=UploadMethod.FOLDER, prefix=prefix, expires=expires, size_max=1 << 26, fields=fields)

    def blob(self, key: str, data: bytes) -> Blob:
        return Blob(url=self.put(key, data), sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def code_archive(files: Mapping[str, str]) -> bytes:
    """A packed work directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            info.mode = 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Rig:
    """One job in one store. `grant` is what the daemon would write; `start` is what a machine would run."""

    def __init__(self, folder: Path, *, python: str = sys.executable, store: Any = None) -> None:
        self.folder = folder
        self.python = python
        self.store = store if store is not None else FolderStore(folder / "store")
        self.machines: list[Machine] = []
        self._described = ExitStack()

    def grant(
        self,
        run: list[str],
        *,
        attempt: int = 1,
        setup: str | None = None,
        code: Mapping[str, str] | None = None,
        restore: list[Restore] | None = None,
        settle_s: float = 0.2,
        stop_grace_s: float = 5.0,
        stop_signal: str = "SIGTERM",
        keep: int = 3,
        checkpoint_path: str | None = None,
        every_s: float | None = None,
        chunk_bytes: int = 4096,
        connections: int = 2,
        outputs: list[str] | None = None,
        env: dict[str, str] | None = None,
        secrets: dict[str, str] | None = None,
        lease_s: float = 60.0,
        refresh_s: float = 0.1,
        heartbeat_s: float = 0.2,
        expires_s: float = 3600.0,
        log_bytes_per_h: int = 16 * 1024 * 1024,
        notice: NoticeSources | None = None,
        orders: Orders | None = None,
        upload: Upload | None = None,
    ) -> Grant:
        now = datetime.now(UTC)
        prefix = attempt_prefix(JOB, attempt)
        grant = Grant(
            job=JobRef(id=JOB, name="a job"),
            attempt=attempt,
            issued_at=now,
            expires=now + timedelta(seconds=expires_s) if expires_s > 0 else now + timedelta(milliseconds=1),
            lease_s=lease_s,
            heartbeat_s=heartbeat_s,
            refresh_s=refresh_s,
            grant_url=self.store.url(prefix + "grant.json"),
            runner=self.store.blob("runner/runner.pyz", build_runner()),
            code=None if code is None else self.store.blob("code/code.tar.gz", code_archive(code)),
            upload=upload or self.store.upload(prefix, now + timedelta(hours=1)),
            restore=restore or [],
            spec=RunSpec(
                run=run,
                setup=setup,
                env=env or {},
                outputs=outputs or [],
                checkpoint=CheckpointSaving(
                    path=checkpoint_path,
                    every_s=every_s,
                    keep=keep,
                    settle_s=settle_s,
                    stop_signal=stop_signal,
                    stop_grace_s=stop_grace_s,
                ),
            ),
            transfer=TransferRules(chunk_bytes=chunk_bytes, connections=connections, log_bytes_per_h=log_bytes_per_h),
            secrets=secrets or {},
            notice=notice or NoticeSources(),
            orders=orders or Orders(),
            self_terminate=SelfTerminate(method=EndMethod.FILE),
        )
        self.issue(grant)
        return grant

    def issue(self, grant: Grant) -> None:
        self.store.put(grant.upload.prefix + "grant.json", grant.to_bytes())

    def renew(self, grant: Grant, **changes: Any) -> Grant:
        """The same grant, issued anew, with changes."""
        renewed = grant.model_copy(update={"issued_at": datetime.now(UTC), **changes})
        self.issue(renewed)
        return renewed

    def order_stop(self, grant: Grant, reason: str = "cancelled", grace_s: float | None = None) -> Grant:
        return self.renew(grant, orders=Orders(stop=GrantStopOrder(reason=reason, grace_s=grace_s)))

    def start(
        self,
        grant: Grant,
        machine: str | None = None,
        env: Mapping[str, str] | None = None,
        *,
        script: str | None = None,
    ) -> Machine:
        """A machine at work. With a script, that is run in place of the runner, which it can import."""
        name = machine or f"m{grant.attempt}"
        found = Machine(self, grant, self.folder / name, env or {}, script)
        self.machines.append(found)
        return found

    def accepted(self, attempt: int) -> list[AcceptedManifest]:
        """The attempt's checkpoints that the daemon would believe, oldest first."""
        found = []
        for key in self.store.keys(attempt_prefix(JOB, attempt) + "checkpoints/"):
            verdict = verify_manifest(self.store.get(key) or b"", JOB, attempt, self.store.head)
            assert isinstance(verdict, AcceptedManifest), verdict
            found.append((verdict, key))
        self.manifest_keys = {verdict.sha256: key for verdict, key in found}
        return sorted((verdict for verdict, _ in found), key=lambda verdict: verdict.serial)

    def restores(self, *attempts: int) -> list[Restore]:
        """What a grant would offer to restore after these attempts, newest first."""
        offers = []
        for attempt in attempts:
            accepted = self.accepted(attempt)
            offers += [restore_of(one, self.manifest_keys[one.sha256], self.store.url) for one in accepted]
        return offers[::-1]

    def last_state(self) -> str:
        """What a wait in vain shows: how each machine ended, if it did, and the last of what its runner wrote."""
        return "\n".join(f"{m.directory.name} ({m.process.poll()}): {m.console()[-1000:]}" for m in self.machines)

    def __enter__(self) -> Self:
        self._described.enter_context(waiting.described(self.last_state))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._described.close()
        for machine in self.machines:
            machine.kill()


class Machine:
    """A directory and the runner in it."""

    def __init__(self, rig: Rig, grant: Grant, directory: Path, env: Mapping[str, str], script: str | None) -> None:
        self.rig = rig
        self.grant = grant
        self.directory = directory
        self.home = directory / "spotd"
        directory.mkdir(parents=True, exist_ok=True)
        bundle = directory / "runner.pyz"
        bundle.write_bytes(compiled_runner())
        program = ["-IS", str(bundle)]
        if script is not None:
            program = ["-ISc", f"import sys; sys.path.insert(0, {str(bundle)!r})\n{script}"]
        self._console = (directory / "console.log").open("ab")
        self.process = subprocess.Popen(
            [rig.python, *program, "--grant-url", grant.grant_url, "--home", str(self.home)],
            cwd=directory,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(rig.folder), **env},
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the runner did not end:\n{self.console()}") from None

    def kill(self) -> None:
        """As a host dies: every process of the machine at once, torchrun's workers too."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.kill()
        self.process.wait()
        self._console.close()

    def processes(self) -> set[int]:
        """Every process of the machine, also one that left its session."""
        return {*_session_members(self.process.pid), *_with_environment(f"SPOTD_NOTICE_FILE={self.home}/")}

    def console(self) -> str:
        return (self.directory / "console.log").read_text(errors="replace")

    @property
    def prefix(self) -> str:
        return self.grant.upload.prefix

    def heartbeat(self) -> Heartbeat | None:
        data = self.rig.store.get(self.prefix + "heartbeat.json")
        return None if data is None else parse_heartbeat(data, job_id=JOB, attempt=self.grant.attempt)

    def events(self, kind: str | None = None) -> list[HostEvent]:
        found = [
            parse_event(self.rig.store.get(key) or b"", job_id=JOB, attempt=self.grant.attempt)
            for key in self.rig.store.keys(self.prefix + "events/")
        ]
        return [event for event in found if kind is None or event.kind == kind]

    def event(self, kind: str, patience_s: float = PATIENCE_S) -> HostEvent:
        """The first event of this kind, waited for."""
        found: list[HostEvent] = until(lambda: self.events(kind), f"event {kind}", patience_s)
        return found[0]

    def log(self) -> str:
        parts = [self.rig.store.get(key) or b"" for key in self.rig.store.keys(self.prefix + "log/")]
        return b"".join(parts).decode()

    def manifests(self) -> list[dict[str, Any]]:
        keys = self.rig.store.keys(self.prefix + "checkpoints/")
        return [json.loads(self.rig.store.get(key) or b"") for key in keys]


def _with_environment(start: str) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(start.encode()) for variable in variables):
            found.append(int(environ.parent.name))
    return found


def _session_members(session: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_bytes()
        except OSError:
            continue
        if int(text[text.rfind(b")") + 2 :].split()[3]) == session:
            members.append(int(stat.parent.name))
    return members

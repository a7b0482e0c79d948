"""The values of a job's secrets: one private file per job in the state folder, and nowhere else but in grants."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from spotd.core.domain.ids import JobId
from spotd.daemon.crash import CrashPoint, CrashPoints
from spotd.daemon.database import Database
from spotd.daemon.log import Redactor


class SecretsMissing(Exception):
    """Values that a job needs are not there; the message names them, never shows them."""


class SecretFiles:
    """The files of secrets. The redactor knows every value before any other part sees it."""

    def __init__(self, folder: Path, redactor: Redactor, crash: CrashPoints) -> None:
        self._folder = folder
        self._redactor = redactor
        self._crash = crash

    def write(self, job: JobId, values: Mapping[str, str]) -> None:
        """Write the values durably, readable by this user only. Nothing is written for a job without secrets."""
        self._redactor.register(values.values())
        if not values:
            return
        self._crash(CrashPoint.BEFORE_WRITE_SECRETS)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        path = self._path(job)
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dict(values), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._crash(CrashPoint.AFTER_WRITE_SECRETS)

    def write_all(self, jobs: Sequence[JobId], values: Mapping[str, str]) -> None:
        """Write the same values for each of these jobs, on the disk only once where it can link files."""
        self.write(jobs[0], values)
        if not values:
            return
        for job in jobs[1:]:
            path = self._path(job)
            path.unlink(missing_ok=True)
            try:
                path.hardlink_to(self._path(jobs[0]))
            except OSError:
                self.write(job, values)

    def read(self, job: JobId, names: Collection[str]) -> dict[str, str]:
        """Return the values of these names.

        Raises:
            SecretsMissing: the file, or one of the names, is not there.
        """
        if not names:
            return {}
        try:
            stored = json.loads(self._path(job).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise SecretsMissing(f"the secrets of job {job} cannot be read; submit it again") from exc
        missing = sorted(name for name in names if not isinstance(stored.get(name), str))
        if missing:
            raise SecretsMissing(f"job {job} has no value for {', '.join(missing)}; submit it again")
        values = {name: stored[name] for name in sorted(names)}
        self._redactor.register(values.values())
        return values

    def jobs(self) -> frozenset[JobId]:
        """Return the jobs whose values, or drafts of them, lie here, whether or not such a job exists."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return frozenset(JobId(path.stem) for path in found if path.suffix in {".json", ".draft"})

    def remove(self, job: JobId) -> None:
        """Remove the job's values; fine if there were none."""
        for path in (self._path(job), self._path(job).with_suffix(".draft")):
            path.unlink(missing_ok=True)

    async def remove_of_no_job(self, database: Database) -> None:
        """Remove the values of jobs that are not in the state. A job whose row cannot be understood keeps its own.

        Raises:
            StoreError: the state cannot be read now.
        """
        lying = self.jobs()
        known = await database.read(lambda reads: reads.names_of(lying))
        for job in lying - known.keys():
            self.remove(job)

    def _path(self, job: JobId) -> Path:
        return self._folder / f"{job}.json"

"""The checks of `spotctl doctor`."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

import anyio

from spotd.api.handlers.context import DaemonAnswers, HandlerContext
from spotd.api.responses import NotFound
from spotd.api.schemas.answers import ChannelTestResponse, CheckResponse, DoctorResponse
from spotd.core.host_reports import late_words
from spotd.daemon.grants.secret_rows import GIVE_KEY
from spotd.daemon.install import other_account_words
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.pollers import ProviderEntry
from spotd.history import History, HistoryUnavailable
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_providers.contract.errors import ProviderError

# What `spotctl doctor` finds around the daemon: its SQLite, and who else can touch its files.
#
# A finding with `ok` and a hint is a warning: it can stay so, and there is a way to be rid of it.


NETWORK_FILESYSTEMS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2"}
    | {"glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs"}
)
MOUNTS: Final = Path("/proc/self/mounts")


def row_of(area: str, name: str, detail: str, *, ok: bool, hint: str = "") -> CheckResponse:
    return CheckResponse(area=area, name=name, ok=ok, detail=detail, hint=hint)


_WAYS_OUT: Final[Mapping[str, str]] = {
    "daemon": "the daemon's log says more: journalctl -u spotd, or where spotd run writes it",
    "store": "see [store] in the config",
    "notify": "see [notify] in the config",
}
"""By area: the way out of a finding that names none of its own."""


STATE_HINT: Final = "free space on its disk, or check who may write there; what is to end is ended meanwhile"


def with_way_out(row: CheckResponse) -> CheckResponse:
    """Return the finding with something that its reader can do: one of a provider may state only what is wrong."""
    if row["ok"] or row["hint"]:
        return row
    area = row["area"]
    return {**row, "hint": _WAYS_OUT.get(area) or f"see [providers.{area}] in the config, and the provider's console"}


def config_row(path: Path) -> CheckResponse:
    """Check that the config, which may name where keys are and whom to notify, is its owner's alone."""
    row = mode_row("config", path)
    if row["ok"] and stat.S_IMODE(path.stat().st_mode) & 0o004:
        return row_of("daemon", "config", f"{path} can be read by everybody", ok=True, hint=f"chmod o-r {path}")
    return row


def mode_row(name: str, path: Path) -> CheckResponse:
    """Whether others can change this file or folder."""
    if stat.S_IMODE(path.stat().st_mode) & 0o022:
        return row_of("daemon", name, f"{path} can be changed by others", ok=False, hint=f"chmod go-w {path}")
    return row_of("daemon", name, str(path), ok=True)


def server_row(settings: Mapping[str, str]) -> CheckResponse:
    """Whether a server of PostgreSQL keeps what it has committed when it crashes, and when a standby is promoted."""
    version = settings.get("server_version", "of an unknown version")
    off = [name for name in ("fsync", "full_page_writes") if settings.get(name) == "off"]
    if off:
        detail = f"PostgreSQL {version} runs with {' and '.join(off)} off: a crash of its computer can lose the state"
        return row_of("daemon", "postgresql", detail, ok=False, hint=f"set {off[0]} = on in its postgresql.conf")
    standbys = settings.get("synchronous_standby_names")
    waits = f"for the standbys {standbys}" if standbys else "for no standby"
    hint = "" if standbys else "set synchronous_standby_names to lose no commit when a standby is promoted"
    return row_of("daemon", "postgresql", f"{version}; commits wait for its disk and {waits}", ok=True, hint=hint)


def filesystem_row(folder: Path, mounts: str) -> CheckResponse:
    """Whether the state lies on a disk of this computer: locks and shared memory do not hold across a network."""
    kind = filesystem_of(folder.resolve(), mounts)
    if kind not in NETWORK_FILESYSTEMS:
        return row_of("daemon", "filesystem", f"the state is on {kind or 'an unknown filesystem'}", ok=True)
    detail = f"the state is on {kind}, a network filesystem, where SQLite's locks do not hold"
    return row_of(
        "daemon", "filesystem", detail, ok=False, hint="set STATE_DIRECTORY to a folder on a disk of this computer"
    )


def filesystem_of(folder: Path, mounts: str) -> str:
    """Return the kind of filesystem of the folder, from the text of /proc/mounts; empty where unknown."""
    found, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = Path(fields[1].replace("\\040", " "))
        # Of two at the same place the later one covers the earlier.
        if folder.is_relative_to(place) and len(place.parts) >= depth:
            found, depth = fields[2], len(place.parts)
    return found


def mounts_text() -> str:
    """Return what is mounted where, on a system that shows it."""
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


# The channels of notifications: a test of each, and how they are doing.


class NotificationHandlers(DaemonAnswers):
    async def test(self, channel: str | None) -> list[ChannelTestResponse]:
        """Send a message by this channel, or by each of them.

        Raises:
            NotFound: there is no such channel, or none at all.
        """
        notifier = self._context.notifier
        known = [] if notifier is None else sorted(notifier.channels)
        if notifier is None or (channel is not None and channel not in known):
            what = "no channel is configured" if notifier is None else f"there is no channel {channel!r}"
            hint = "write [notify.phone] into the config and restart spotd; docs/how-to/notifications.md"
            raise NotFound(what, hint=hint if notifier is None else f"known here: {', '.join(known)}")
        found = await notifier.test(channel)
        return [ChannelTestResponse(channel=name, ok=not error, error=error) for name, error in found.items()]


def channel_rows(context: HandlerContext) -> list[CheckResponse]:
    notifier = context.notifier
    if notifier is None:
        return []
    rows = []
    if notifier.last_error:
        hint = "nothing that is owed is lost, and everything else goes on; see the daemon's log"
        rows.append(row_of("notify", "daemon", notifier.last_error, ok=False, hint=hint))
    for name, status in sorted(notifier.status.items()):
        waiting = notifier.waiting[name]
        waits = f"; {waiting} wait" if waiting else ""
        detail = f"{status.error}{waits}" if status.error else f"works{waits}"
        hint = f"spotctl notify test {name} tries it now; see [notify.{name}]" if status.error else ""
        rows.append(row_of("notify", name, detail, ok=not status.error, hint=hint))
    return rows


CHECK_DEADLINE_S: Final = 30.0
GRANT_TRIED: Final = timedelta(minutes=1)


class DoctorHandlers(DaemonAnswers):
    async def report(self) -> DoctorResponse:
        """Run all checks at the same time, each with its own time limit; a finding is a row, never an exception."""
        rows: dict[int, list[CheckResponse]] = {}
        checks: list[tuple[str, Callable[[], Awaitable[list[CheckResponse]]]]] = [
            ("daemon", self._daemon_checks),
            ("store", self._store_checks),
            *(
                (name, lambda entry=entry: self._provider_checks(entry))
                for name, entry in sorted(self._context.providers.items())
            ),
        ]

        async def one(index: int, area: str, check: Callable[[], Awaitable[list[CheckResponse]]]) -> None:
            rows[index] = [row_of(area, "answers", f"no answer within {CHECK_DEADLINE_S:.0f} s", ok=False)]
            with anyio.move_on_after(CHECK_DEADLINE_S):
                rows[index] = await check()

        async with anyio.create_task_group() as group:
            for index, (area, check) in enumerate(checks):
                group.start_soon(one, index, area, check, name=f"check-{area}")
        found = [with_way_out(row) for index in sorted(rows) for row in rows[index]]
        return DoctorResponse(ok=all(row["ok"] for row in found), checks=found)

    async def _daemon_checks(self) -> list[CheckResponse]:
        context = self._context
        state_error = context.database.last_error
        rows = [
            row_of(
                "daemon", "state", state_error or "answers", ok=not state_error, hint=STATE_HINT if state_error else ""
            ),
            row_of("daemon", "sqlite", sqlite3.sqlite_version, ok=True),
        ]
        config = context.facts.get("config")
        if isinstance(config, Path) and config.exists():
            rows.append(config_row(config))
        folder = context.facts.get("state_dir")
        if isinstance(folder, Path):
            rows.extend((mode_row("state folder", folder), filesystem_row(folder, mounts_text())))
        if context.database.is_shared:
            rows.append(server_row(await context.database.read(lambda reads: reads.server_settings())))
            state, locked = context.control_loop.state, context.policy.locked()
            waiting = [why for job, why in locked.items() if state is not None and job in state.world.jobs]
            if waiting:
                words = f"{len(waiting)} {'job waits' if len(waiting) == 1 else 'jobs wait'}: {waiting[0]}"
                rows.append(row_of("daemon", "secrets", words, ok=False, hint=GIVE_KEY))
        rows.extend(await self._containment_rows())
        rows.append(await self._history_row())
        rows.extend(row for finding in context.findings for row in finding())
        rows.extend(channel_rows(context))
        paused = context.policy.why_paused
        if paused:
            rows.append(row_of("daemon", "launches", paused, ok=False))
        return rows

    async def _containment_rows(self) -> list[CheckResponse]:
        """Return what the daemon could not go on with, and what it leaves out at the moment."""
        context = self._context
        jobs = await context.database.read(lambda reads: reads.quarantined_jobs())
        rows = [
            row_of("daemon", f"job {job.name}", job.reason, ok=False, hint=f"spotctl retry {job.name}") for job in jobs
        ]
        rows.extend(self._late_rows())
        rows.extend(
            row_of("daemon", one.subject, one.error, ok=False, hint="everything else goes on; report this with the log")
            for one in sorted(context.control_loop.contained, key=lambda one: one.subject)
        )
        rows.extend(
            row_of("daemon", "silent hosts", why, ok=False, hint="check this computer's connection and the store")
            for why in context.control_loop.shared_silence
        )
        if context.control_loop.held:
            rows.append(row_of("daemon", "decisions", f"none are made: {context.control_loop.held}", ok=False))
        return rows

    def _late_rows(self) -> list[CheckResponse]:
        """Return the jobs whose checkpoints have fallen behind."""
        state, now = self._context.control_loop.state, self._context.clock.now()
        if state is None:
            return []
        rows = []
        for item in state.world.attempts.values():
            job = state.world.jobs.get(item.id.job)
            newest = job.checkpoints[0].name if job is not None and job.checkpoints else ""
            words = late_words(item.freshness, newest, now) if item.state.counts else ""
            if words and job is not None:
                hint = f"spotctl logs {job.name} may show why; a preemption would repeat all of it"
                rows.append(row_of("daemon", f"job {job.name}", words, ok=True, hint=hint))
        return rows

    async def _history_row(self) -> CheckResponse:
        price_recorder = self._context.price_recorder
        hint = "jobs go on without it; free some space on its disk, or check who may write there"
        if price_recorder.last_error:
            return row_of("daemon", "price history", price_recorder.last_error, ok=False, hint=hint)
        try:
            used = await price_recorder.ask(History.bytes_used)
        except HistoryUnavailable as exc:
            return row_of("daemon", "price history", str(exc), ok=False, hint=hint)
        return row_of(
            "daemon", "price history", f"{used / 1e6:.1f} of {price_recorder.bytes_max / 1e6:.0f} MB", ok=True
        )

    async def _store_checks(self) -> list[CheckResponse]:
        objects = self._context.objects
        key = "doctor/probe"

        def probe() -> None:
            objects.put(key, b"spotd")
            if objects.get(key, bytes_max=64) != b"spotd":
                raise ObjectsError("what was written is not what is read")
            objects.delete([key])

        try:
            await self._context.stored(probe)
        except Exception as exc:  # noqa: BLE001 - a finding is a row, whatever it is
            return [row_of("store", "write and read", str(exc), ok=False, hint="see [store] in the config")]
        where = "hosts that see this computer's files" if objects.shared_with_hosts_by == "filesystem" else "any host"
        rows = [row_of("store", "write and read", "works", ok=True)]
        expires = self._context.wall.now() + GRANT_TRIED
        try:
            await self._context.stored(lambda: objects.grant_upload("doctor/", expires=expires, size_max=1024))
        except Exception as exc:  # noqa: BLE001 - as above
            hint = "nothing can be launched with this store: docs/stores.md says which ones can be used"
            return [*rows, row_of("store", "grants", str(exc), ok=False, hint=hint)]
        rows.append(row_of("store", "grants", f"serve {where}", ok=True))
        try:
            found = await self._context.stored(objects.advice)
        except Exception as exc:  # noqa: BLE001 - as above
            return [*rows, row_of("store", "settings", str(exc), ok=False)]
        return [*rows, *(row_of("store", one.name, one.detail, ok=one.ok, hint=one.hint) for one in found)]

    async def _provider_checks(self, entry: ProviderEntry) -> list[CheckResponse]:
        if not entry.enabled:
            return []
        if entry.provider is None:
            return [row_of(entry.name, "opens", entry.last_error, ok=False, hint=f"see [providers.{entry.name}]")]
        rules = self._context.policy.current.providers.get(entry.name)
        rows = []
        if rules is not None and rules.unusable:
            is_meant = entry.traits is not None and rules.unusable == entry.traits.no_launches
            rows.append(row_of(entry.name, "usable", rules.unusable, ok=is_meant))
        if rules is not None and entry.traits is not None and rules.runs_images:
            takes = entry.traits.private_images
            rows.extend(
                row_of(entry.name, f"[registries.{one.name}]", one.error or takes.reason, ok=not one.error)
                for one in self._context.policy.current.registries.values()
            )
        strange = other_account_words(self._context.world(), self._context.policy.current, entry.name)
        if strange:
            rows.append(row_of(entry.name, "account", strange, ok=False))
        try:
            lines = await guarded(entry.provider, clock=self._context.clock, log=self._context.log).check()
        except ProviderError as exc:
            return [*rows, row_of(entry.name, "answers", str(exc) or type(exc).__name__, ok=False)]
        return [*rows, *(row_of(entry.name, one.name, one.detail, ok=one.ok, hint=one.hint) for one in lines)]

"""What hosts are allowed and ordered: spec.json once, grant.json before a launch and again and again after it.

Theory. A grant is a function of the attempt, its job, the store and the wall clock; nothing in it is remembered, so a
restarted daemon simply writes all of them again. Hosts know only the seconds of the wall: every span is converted
here. A renewal comes early enough that two may fail; an order goes out at once. An attempt that no longer counts gets a
last grant that orders every reader to stop, and when its machine is gone the grant, which holds the job's
secrets, is deleted.

A rented machine is measured before its job starts (`canary_rules`). What a host measures can only end its own attempt:
it buys nothing and stops no other machine, and a host that lies ends as one that was lost. The least is generous, so
that a card which its owner runs cooler passes, and a figure that is wrong here must not keep a job from running: after
a few machines of a job were refused its measurements are only shown. Own machines, gangs, slices of a card and machines
that are taken over are not measured.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.billing import HEARTBEATS_APART
from spotd.core.canary import may_refuse, measuring_time
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import FailedRestore, Job
from spotd.core.domain.policy import Policy, key_parts
from spotd.core.gangs import SHRINKS_WITHIN
from spotd.core.handover import words_against_reuse
from spotd.core.plan_builder import watch_every
from spotd.daemon import object_keys
from spotd.daemon.commits import CrashPoint, CrashPoints
from spotd.daemon.grants.inputs import DataGrants, JobSecrets, RestorePoints, SecretsMissing
from spotd.daemon.recovery_survey import NumberUsed, name_next, require_newest, require_same, use_number
from spotd.daemon.remote_data import RemoteData
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError
from spotd_jobs.spec.codec import spec_to_json
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.wire import grant
from spotd_jobs.wire.client.sinks import is_printable
from spotd_jobs.wire.grant import CanaryRules
from spotd_providers.contract.gpus import gpu_info
from spotd_providers.contract.provider import Clock, ProviderTraits
from spotd_providers.contract.values import ProviderName

LIFE: Final = timedelta(hours=6)
"""How long URLs are good; renewals are far more frequent."""
WRITE_LIFE: Final = timedelta(hours=1)
"""How long a host can still write after its last grant: nothing but patience takes a signed form back."""
LAST_LIFE: Final = timedelta(minutes=2)
OBJECT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest object a runner writes is one chunk."""
GRANT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The runner reads no larger one."""
HEARTBEAT: Final = HEARTBEATS_APART
REFRESH: Final = timedelta(seconds=15)
PACE_MIN_S: Final = 0.2
"""No host is asked to do anything more often."""
SHARED_PACE_S: Final = 1.0
"""On a folder of this computer a heartbeat costs nothing, and a quick one makes local jobs feel alive."""
LINE_MAX: Final = 500
WAITS_BEYOND_S: Final = 60.0
"""How much longer a host asks for its next attempt than the daemon lets it wait: what it reports is read late."""
GANG_WAIT: Final = timedelta(minutes=20)
"""How long several machines wait for each other, where their provider is not in the config any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerBundle:
    """The program that every host runs: one file, named by its hash."""

    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class GrantBuilder:
    """Builds and writes grants. Synchronous: called from worker threads, and inline in tests."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        clock: Clock,
        wall: Clock,
        secrets: JobSecrets,
        bundle: RunnerBundle,
        traits: Mapping[ProviderName, ProviderTraits],
        crash: CrashPoints,
        issued: Callable[[], datetime] | None = None,
        on_host: Callable[[timedelta], float] = timedelta.total_seconds,
        remote: RemoteData | None = None,
        require_job_record: Callable[[Job], None] = lambda _: None,
    ) -> None:
        """Make the builder.

        Args:
            require_job_record: sees to it that the store has the job's file before a machine may exist.
            on_host: how many seconds a host is given for a span of its job.
        """
        self._objects = objects
        self._clock = clock
        self._wall = wall
        self._issued = issued or wall.now
        self._on_host = on_host
        self._issued_last = datetime.min.replace(tzinfo=UTC)
        self._secrets = secrets
        self._bundle = bundle
        self._runner_sha256 = bundle.sha256
        self._traits = traits
        self._crash = crash
        self._require_job_record = require_job_record
        self._there: set[str] = set()
        self._there_lock = threading.Lock()
        self._passed_over: dict[AttemptId, tuple[FailedRestore, ...]] = {}
        self._datasets = DataGrants(objects, remote)
        self._newest: set[AttemptId] = set()
        """Which were the newest of their jobs when the store was asked: later ones are made by this process only."""

    def prepare(self, attempt: Attempt, job: Job, policy: Policy) -> str:
        """Runner, spec and grant are in the store; returns the URL of the grant, the one thing a host starts with.

        Raises:
            StoreError: something could not be written, so nothing may be launched.
            SecretsMissing: nothing may be launched either.
        """
        self._put_once(
            object_keys.runner_key(self._runner_sha256),
            self._bundle.data,
            (CrashPoint.BEFORE_PUT_RUNNER, CrashPoint.AFTER_PUT_RUNNER),
        )
        self._put_once(
            object_keys.spec_key(job.id),
            json.dumps(spec_to_json(job.spec), indent=1).encode(),
            (CrashPoint.BEFORE_PUT_SPEC, CrashPoint.AFTER_PUT_SPEC),
        )
        self._require_job_record(job)
        use_number(self._objects, attempt)
        self._newest.add(attempt.id)
        self._write(attempt, job, policy, (CrashPoint.BEFORE_PUT_GRANT, CrashPoint.AFTER_PUT_GRANT))
        return self._grant_url(attempt.id, self._wall.now() + LIFE)

    def hand_over(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        """Write the grant of an attempt that took over a machine, then where that machine finds it.

        The second is written once for each former attempt, whatever another run or another daemon believes: so a state
        that does not know of a handover cannot give the machine to one more job.

        Raises:
            StoreError: something could not be written, or another run used the number or handed over the machine.
            SecretsMissing, InputsMissing: the machine gets nothing to do.
        """
        former = None if attempt.former_key is None else key_parts(policy.install, attempt.former_key)
        if former is None:
            raise StoreError(f"the machine was that of {attempt.former_key}, which is no key of this install")
        try:
            url = self.prepare(attempt, job, policy)
        except NumberUsed:
            require_same(self._objects, attempt)  # written by this daemon's former process
            self.renew(attempt, job, policy)
            url = self._grant_url(attempt.id, self._wall.now() + LIFE)
        self._crash(CrashPoint.BEFORE_PUT_NEXT)
        name_next(self._objects, AttemptId(job=former.job, number=former.number), attempt, url)
        self._crash(CrashPoint.AFTER_PUT_NEXT)

    def passed_over(self, attempt: AttemptId) -> tuple[FailedRestore, ...]:
        """Return what should have been offered to this attempt and could not be, once."""
        return self._passed_over.pop(attempt, ())

    def renew(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        """Write a grant with today's orders, a new lease and new URLs.

        A state that was restored may hold an attempt after which another was launched. Only an order to stop may reach
        its machine, which the provider may start again.

        Raises:
            StoreError: it cannot be written, or is not known to be the newest attempt of its job.
        """
        if attempt.stop is None and attempt.id not in self._newest:
            require_newest(self._objects, attempt.id)
            self._newest.add(attempt.id)
        self._write(attempt, job, policy, (CrashPoint.BEFORE_RENEW_GRANT, CrashPoint.AFTER_RENEW_GRANT))

    def supersede(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        """Order all readers of this attempt's grant to stop at once, and give them no secret any more."""
        points = (CrashPoint.BEFORE_SUPERSEDE_GRANT, CrashPoint.AFTER_SUPERSEDE_GRANT)
        self._write(attempt, job, policy, points, superseded=True)

    def remove(self, attempt: AttemptId) -> None:
        """Remove the grant and the secrets in it, and the permission to write, where the store can revoke it."""
        self._passed_over.pop(attempt, None)
        self._newest.discard(attempt)
        urls = self._datasets.forget(attempt)
        self._objects.delete([object_keys.grant_key(attempt), object_keys.liveness_key(attempt), *urls])
        self._objects.revoke_upload(object_keys.prefix_of(attempt))

    def _write(
        self,
        attempt: Attempt,
        job: Job,
        policy: Policy,
        points: tuple[CrashPoint, CrashPoint],
        *,
        superseded: bool = False,
    ) -> None:
        grant = self.build(attempt, job, policy, superseded=superseded)
        self._crash(points[0])
        self._objects.put(object_keys.grant_key(attempt.id), grant.to_bytes())
        self._crash(points[1])

    def build(self, attempt: Attempt, job: Job, policy: Policy, *, superseded: bool = False) -> grant.Grant:
        """Return the grant as it is to be now."""
        now = self._wall.now()
        expires = now + (LAST_LIFE if superseded else LIFE)
        upload = self._objects.grant_upload(
            object_keys.prefix_of(attempt.id),
            expires=min(expires, now + WRITE_LIFE),
            size_max=OBJECT_BYTES_MAX,
            marker_key=object_keys.liveness_key(attempt.id),
        )
        traits = self._traits.get(attempt.provider)
        # A machine that replaces another one, and those that wait for it, go on from what is offered now.
        begins_again = attempt.bidding.held_since is not None or attempt.is_kept
        fixed = superseded or (attempt.running_at is not None and not begins_again)
        return grant.Grant(
            job=grant.JobRef(id=job.id, name=_line(job.name)),
            attempt=attempt.id.number,
            issued_at=self._issue(),
            expires=expires,
            lease_s=self._clock.real_seconds(policy.lease),
            heartbeat_s=self._pace(HEARTBEAT),
            refresh_s=self._pace(REFRESH),
            grant_url=self._grant_url(attempt.id, expires),
            runner=self._blob(
                object_keys.runner_key(self._runner_sha256), self._runner_sha256, len(self._bundle.data), expires
            ),
            code=None
            if job.code_sha256 is None
            else self._blob(object_keys.code_key(job.code_sha256), job.code_sha256, job.code_bytes, expires),
            upload=grant.Upload(
                method=grant.UploadMethod(upload.method),
                prefix=upload.prefix,
                expires=upload.expires,
                size_max=upload.size_max,
                fields=dict(upload.fields),
            ),
            liveness_marker=None
            if upload.liveness_marker is None or superseded
            else grant.LivenessMarker(
                method=grant.UploadMethod(upload.method),
                name=grant.liveness_marker_name(job.id, attempt.id.number),
                fields=dict(upload.liveness_marker),
            ),
            restore=[] if fixed else self._restores(attempt, job, expires),
            inputs=[] if fixed or attempt.stop is not None else RestorePoints(self._objects, expires).inputs(job),
            data=[] if fixed or attempt.stop is not None else self._datasets.grants(attempt.id, job, now, expires),
            array=None if job.array is None else grant.ArrayPlace(index=job.array.index, count=job.array.count),
            gang=self._gang(attempt, job, traits, expires),
            spec=self._run_spec(job.spec, attempt.save_every),
            secrets={} if superseded else self._secrets_of(attempt, job),
            notice=grant.NoticeSources(imds=(traits.notice_imds or None) if traits is not None else None, file=True),
            orders=_orders(attempt, superseded=superseded),
            self_terminate=_self_terminate(traits),
            # Nothing is offered to restore any more, so a machine that is started again on a wiped disk must not begin.
            seen_running=attempt.running_at is not None and not attempt.is_kept,
            reuse=None if superseded else self._reuse(attempt, job, policy, expires),
            canary=None if superseded else canary_rules(attempt, job, policy, self._on_host),
        )

    def _secrets_of(self, attempt: Attempt, job: Job) -> dict[str, str]:
        try:
            return self._secrets.read(job.id, job.spec.secrets)
        except SecretsMissing as exc:
            if job.state.is_final:
                raise
            # The machine has them: it goes on with what its former grant holds, wherever the key or the values are.
            try:
                former = grant.Grant.model_validate_json(
                    self._objects.get(object_keys.grant_key(attempt.id), bytes_max=GRANT_BYTES_MAX)
                )
                values = {name: former.secrets[name] for name in job.spec.secrets}
            except (ObjectMissing, ValueError, KeyError):
                raise exc from None
            self._secrets.register(values.values())
            return values

    def _reuse(self, attempt: Attempt, job: Job, policy: Policy, expires: datetime) -> grant.ReuseRules | None:
        if words_against_reuse(policy, policy.providers.get(attempt.provider), job.spec):
            return None
        key = object_keys.next_key(attempt.id)
        traits = self._traits.get(attempt.provider)
        return grant.ReuseRules(
            url=self._objects.presign_get(key, expires=expires),
            # Longer than the daemon hands it over, which learns late that the job is done.
            wait_s=self._clock.real_seconds(policy.reuse_wait) + WAITS_BEYOND_S,
            alone=traits is not None and traits.runs_images,
        )

    def _gang(
        self, attempt: Attempt, job: Job, traits: ProviderTraits | None, expires: datetime
    ) -> grant.GangGrant | None:
        nodes, members, wait = attempt.quote.offer.nodes, attempt.members, job.spec.replace_within
        if nodes == 1 and members is None:
            return None
        keep_s = self._clock.real_seconds(wait + SHRINKS_WITHIN) + WAITS_BEYOND_S if wait else 0.0
        wait_s = self._on_host(GANG_WAIT if traits is None else traits.provision_timeout)
        replaces_first = bool(wait) and traits is not None and traits.replaces_first
        return grant.GangGrant(
            nodes=nodes,
            first_url=self._objects.presign_get(object_keys.gang_key(attempt.id), expires=expires),
            # While one is replaced it comes so much later.
            wait_s=wait_s + (keep_s if members is not None and members.lost else 0.0),
            # Longer than the daemon takes to replace it, to go on with fewer, or to end all.
            keep_s=keep_s,
            round=0 if members is None else members.round,
            since=[] if members is None else list(members.since),
            next_url=self._objects.presign_get(object_keys.next_key(attempt.id), expires=expires)
            if replaces_first
            else None,
        )

    def url_of(self, attempt: AttemptId) -> str:
        """Return where the grant is, for a machine that starts now."""
        return self._grant_url(attempt, self._wall.now() + LIFE)

    def _issue(self) -> datetime:
        """Return an instant later than every one before: by an earlier one no host renews its lease."""
        with self._there_lock:
            self._issued_last = max(self._issued(), self._issued_last + timedelta(microseconds=1))
            return self._issued_last

    def _run_spec(self, spec: JobSpec, advised: timedelta | None) -> grant.RunSpec:
        rules, watched = spec.checkpoint, watch_every(spec.watchdog)
        every = advised if rules.every is None else rules.every
        return grant.RunSpec(
            run=list(spec.run),
            setup=spec.setup,
            env=dict(spec.env),
            outputs=list(spec.outputs),
            checkpoint=grant.CheckpointSaving(
                path=rules.path,
                every_s=None if every is None else self._clock.real_seconds(every),
                keep=rules.keep,
                settle_s=self._on_host(rules.settle),
                stop_signal=rules.stop_signal,
                stop_grace_s=self._on_host(rules.stop_grace),
                saved_by=None if rules.saved_by is None else rules.saved_by.value,
            ),
            watch_s=None if watched is None else max(PACE_MIN_S, self._clock.real_seconds(watched)),
        )

    def _pace(self, duration: timedelta) -> float:
        real = max(PACE_MIN_S, self._clock.real_seconds(duration))
        return min(real, SHARED_PACE_S) if self._objects.shared_with_hosts_by == "filesystem" else real

    def _restores(self, attempt: Attempt, job: Job, expires: datetime) -> list[grant.Restore]:
        offers = RestorePoints(self._objects, expires)
        choices = offers.restores(job)
        if offers.passed_over:
            self._passed_over[attempt.id] = offers.passed_over
        return choices

    def _grant_url(self, attempt: AttemptId, expires: datetime) -> str:
        return self._objects.presign_get(object_keys.grant_key(attempt), expires=expires)

    def _blob(self, key: str, sha256: str, size: int, expires: datetime) -> grant.Blob:
        return grant.Blob(url=self._objects.presign_get(key, expires=expires), sha256=sha256, size=size)

    def _put_once(self, key: str, data: bytes, points: tuple[CrashPoint, CrashPoint]) -> None:
        """Store the object unless it is there; the store is asked at most once in this process."""
        with self._there_lock:
            if key in self._there:
                return
        if self._objects.head(key) is None:
            self._crash(points[0])
            self._objects.put(key, data)
            self._crash(points[1])
        with self._there_lock:
            self._there.add(key)


def _orders(attempt: Attempt, *, superseded: bool) -> grant.Orders:
    if superseded:
        return grant.Orders(stop=grant.GrantStopOrder(reason="this attempt no longer counts", grace_s=0.0, flush=False))
    stop = None
    if attempt.stop is not None:
        words = attempt.stop.reason.sentence(attempt.stop.detail)
        # One that must upload nothing more has nothing to wait for either.
        flush = attempt.stop.flush
        stop = grant.GrantStopOrder(reason=_line(words), grace_s=None if flush else 0.0, flush=flush)
    # A notice that only the provider's API gave is passed on: the host may have no way to learn of it.
    notices = attempt.lapsed.count + (1 if attempt.notice_at is not None else 0)
    return grant.Orders(checkpoint=notices, stop=stop)


def order_of(attempt: Attempt) -> tuple[bool, bool, bool, bool, bool, int]:
    """Return what of an attempt changes what its machine is to do: while this stays the same, a renewal can wait."""
    held = attempt.bidding.held_since is not None
    orders = attempt.stop is not None, attempt.notice_at is not None, attempt.running_at is not None
    return *orders, held, attempt.is_kept, 0 if attempt.members is None else attempt.members.round


def _self_terminate(traits: ProviderTraits | None) -> grant.SelfTerminate | None:
    if traits is None or not traits.ends_itself_by:
        return None
    return grant.SelfTerminate(method=grant.EndMethod(traits.ends_itself_by), base_url=traits.ends_itself_at or None)


def _line(text: str) -> str:
    """Return the text as one printable line."""
    kept = "".join(c if is_printable(c) else " " for c in text)
    return kept[:LINE_MAX]


_MEMORY_SHARE: Final = 0.85
"""Of what is stated: error correction takes up to 7 percent, and units differ by as much."""
_SPEED_SHARE: Final = 0.25
"""Of the data sheet's figure: a plain multiply reaches half to three quarters, on cards of little power less."""
_WHOLE_CARD: Final = 0.9
"""A machine with less memory than this share of its card's has a part of one, whose speed is not known."""
_GB: Final = 1000**3 / 1024**2


def canary_rules(
    attempt: Attempt, job: Job, policy: Policy, on_host: Callable[[timedelta], float]
) -> CanaryRules | None:
    """Return how the machine of this attempt is to be measured; `None` where it is not, or not any more.

    Args:
        on_host: how many seconds a host is given for a span.
    """
    offer, time = attempt.quote.offer, measuring_time(attempt, policy)
    is_first = attempt.running_at is None and attempt.stop is None
    if not (time and is_first):
        return None
    known = gpu_info(offer.gpu)
    nominal = None if known is None else min(known.vram_gb) * _GB
    memory = offer.gpu_vram_mb if offer.gpu_vram_mb is not None else nominal
    is_whole = memory is None or nominal is None or memory >= _WHOLE_CARD * nominal
    speed = known.tflops if known is not None and is_whole else None
    return CanaryRules(
        time_s=on_host(time),
        may_refuse=may_refuse(job),
        gpus=offer.gpu_count,
        gpu_memory_mb_min=None if memory is None else int(_MEMORY_SHARE * memory),
        tflops=speed,
        tflops_min=None if speed is None else _SPEED_SHARE * speed,
        download_mbps=offer.download_mbps,
    )

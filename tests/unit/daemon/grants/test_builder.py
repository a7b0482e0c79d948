"""A grant says exactly what one attempt may do, in real seconds, and never more."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import gang_of
from spotd.core.domain.members import Members
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.commits import never
from spotd.daemon.grants.builder import LAST_LIFE, WRITE_LIFE, GrantBuilder, RunnerBundle
from spotd.daemon.grants.inputs import SecretFiles, SecretsMissing
from spotd.daemon.grants.writer import GrantWriter
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.log import Redactor
from spotd.daemon.recovery_survey import NumberUsed, use_number
from spotd.service.accelerated import PROCESS_SCALE_MAX, seconds_on_host
from spotd_jobs.objects.api import ObjectMissing, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.spec.codec import spec_from_json
from spotd_jobs.spec.model import CheckpointPolicy
from spotd_jobs.wire.grant import Grant, NextAttempt
from spotd_providers.contract.provider import ProviderTraits
from spotd_providers.contract.values import AttemptKey
from tests.unit.core.builders import NOW, SHOP, shop_policy, world_with
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Log
from tests.unit.daemon.test_ids import Still

pytestmark = pytest.mark.anyio


async def test_a_host_can_write_for_an_hour_at_most_after_its_last_grant(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    grant = desk.grants.build(desk.attempt, desk.job, desk.policy)
    assert grant.upload.expires - NOW <= WRITE_LIFE == timedelta(hours=1)
    assert grant.expires > grant.upload.expires, "what can only be read may be read for longer"
    last = desk.grants.build(desk.attempt, desk.job, desk.policy, superseded=True)
    assert last.upload.expires - NOW <= LAST_LIFE


@pytest.mark.parametrize("lease", [timedelta(minutes=5), timedelta(hours=1), timedelta(hours=24)])
async def test_leave_to_write_is_renewed_three_times_before_it_runs_out(lease: timedelta, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.policy = replace(desk.policy, lease=lease)
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    written: list[datetime] = []
    for _ in range(300):
        await grant_writer.controller.run_once()
        data = desk.objects.get(object_keys.grant_key(desk.identity), bytes_max=1 << 20)
        expires = Grant.model_validate_json(data).upload.expires
        assert expires - desk.wall.now() > WRITE_LIFE / 2, "a renewal that fails once or twice is no lapse"
        written = [*written, expires] if expires not in written else written
        desk.wall.at += timedelta(minutes=1)
    assert len(written) >= 4 * 5


class Fast(Still):
    """Virtual time at six hundred times the wall's."""

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / 600


class Desk:
    """Everything that writes grants, for one attempt."""

    def __init__(self, folder: Path, *, clock: Still | None = None, state: AttemptState = AttemptState.RUNNING) -> None:
        self.world: World = world_with(state)
        ((self.identity, self.attempt),) = self.world.attempts.items()
        self.job: Job = self.world.jobs[self.identity.job]
        self.policy: Policy = shop_policy()
        self.objects = FolderStore(folder / "objects")
        self.secrets = SecretFiles(folder / "secrets", Redactor(), never)
        self.wall = Still()
        self.clock = clock or self.wall
        self.log = Log()
        self.grants = GrantBuilder(
            self.objects,
            clock=self.clock,
            wall=self.wall,
            secrets=self.secrets,
            bundle=RunnerBundle(data=b"a runner"),
            traits={
                SHOP: ProviderTraits(
                    start_script_bytes_max=4096,
                    ends_itself_by="vast",
                    ends_itself_at="http://api",
                    notice_imds="http://m",
                )
            },
            crash=never,
            on_host=seconds_on_host(self.clock),
        )

    def grant_writer(self) -> GrantWriter:
        return GrantWriter(
            self.grants,
            policy=lambda: self.policy,
            start_script=lambda _provider, url: url,
            clock=self.clock,
            wall=self.wall,
            log=self.log,
            inline=True,
        )

    def read(self) -> Grant:
        return Grant.model_validate_json(self.objects.get(object_keys.grant_key(self.identity), bytes_max=1_000_000))

    def build(self, attempt: Attempt | None = None, job: Job | None = None) -> Grant:
        return self.grants.build(attempt or self.attempt, job or self.job, self.policy)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_runner_spec_and_grant_are_there_before_the_script_is(desk: Desk) -> None:
    script = await desk.grant_writer().prepare(desk.attempt, desk.job)
    assert script == desk.objects.presign_get(object_keys.grant_key(desk.identity), expires=NOW)
    grant = desk.read()
    assert desk.objects.get(object_keys.runner_key(grant.runner.sha256), bytes_max=100) == b"a runner"

    spec = json.loads(desk.objects.get(object_keys.spec_key(desk.job.id), bytes_max=100_000))
    assert spec_from_json(spec) == desk.job.spec


def test_an_attempt_after_which_another_run_launched_one_is_not_renewed_unless_it_is_to_stop(desk: Desk) -> None:
    later = replace(desk.attempt, id=AttemptId(job=desk.identity.job, number=2))
    use_number(desk.objects, later)
    with pytest.raises(NumberUsed):
        desk.grants.renew(desk.attempt, desk.job, desk.policy)
    with pytest.raises(ObjectMissing):
        desk.read()
    stop = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW + timedelta(minutes=3))
    desk.grants.renew(replace(desk.attempt, stop=stop), desk.job, desk.policy)
    assert desk.read().orders.stop is not None


def heir_of(desk: Desk, job: str, former: str) -> tuple[Attempt, Job]:
    """An attempt that took over the machine of another one."""
    owner = replace(desk.job, id=JobId(job))
    key = AttemptKey(f"spotd-lab-{former}-1")
    identity = AttemptId(job=owner.id, number=1)
    return replace(
        desk.attempt, id=identity, key=AttemptKey(f"spotd-lab-{job}-1"), machine_key=key, former_key=key
    ), owner


def next_of(desk: Desk, former: str) -> NextAttempt:
    key = object_keys.next_key(AttemptId(job=JobId(former), number=1))
    return NextAttempt.model_validate_json(desk.objects.get(key, bytes_max=100_000))


def test_a_machine_is_named_its_next_attempt_where_no_host_can_write_and_with_a_grant_that_is_there(desk: Desk) -> None:
    heir, owner = heir_of(desk, "j2", "j1")
    desk.grants.hand_over(heir, owner, desk.policy)
    found = next_of(desk, "j1")
    assert (found.job, found.attempt) == ("j2", 1)
    assert found.grant_url == desk.objects.presign_get(object_keys.grant_key(heir.id), expires=NOW)
    assert desk.objects.head(object_keys.grant_key(heir.id)) is not None
    assert not object_keys.next_key(AttemptId(job=JobId("j1"), number=1)).startswith("jobs/j1/attempts/")


def test_a_handover_is_announced_again_by_the_next_process_and_to_nobody_else(desk: Desk) -> None:
    heir, owner = heir_of(desk, "j2", "j1")
    for _ in range(2):
        desk.grants.hand_over(heir, owner, desk.policy)
    assert next_of(desk, "j1").job == "j2"


def test_a_handover_is_announced_again_after_the_clock_was_set_and_not_that_of_another_run(desk: Desk) -> None:
    heir, owner = heir_of(desk, "j2", "j1")
    desk.grants.hand_over(heir, owner, desk.policy)
    redated = replace(heir, intended_at=heir.intended_at + timedelta(hours=1))
    desk.grants.hand_over(redated, owner, desk.policy)
    other = replace(heir, quote=replace(heir.quote, at=heir.quote.at + timedelta(seconds=1)))
    with pytest.raises(NumberUsed):
        desk.grants.hand_over(other, owner, desk.policy)


def test_a_state_that_does_not_know_of_a_handover_cannot_make_another_one(desk: Desk) -> None:
    desk.grants.hand_over(*heir_of(desk, "j2", "j1"), desk.policy)
    with pytest.raises(NumberUsed):
        desk.grants.hand_over(*heir_of(desk, "j3", "j1"), desk.policy)
    assert next_of(desk, "j1").job == "j2"
    desk.grants.hand_over(*heir_of(desk, "j3", "j2"), desk.policy)
    assert next_of(desk, "j2").job == "j3"


@pytest.mark.parametrize("there", [b"", b"{}", b"[" * 1000], ids=["nothing", "no names", "no document"])
def test_what_names_a_next_attempt_and_cannot_be_read_is_not_written_over(desk: Desk, there: bytes) -> None:
    key = object_keys.next_key(AttemptId(job=JobId("j1"), number=1))
    desk.objects.put(key, there)
    with pytest.raises(NumberUsed):
        desk.grants.hand_over(*heir_of(desk, "j2", "j1"), desk.policy)
    assert desk.objects.get(key, bytes_max=10_000) == there


def test_a_grant_permits_writing_below_its_own_attempt_only(desk: Desk) -> None:
    upload = desk.build().upload
    assert upload.prefix == f"jobs/{desk.job.id}/attempts/1/"
    assert upload.fields["directory"].endswith(f"/objects/jobs/{desk.job.id}/attempts/1")


def test_a_grant_permits_one_beat_beside_the_prefix_until_the_attempt_counts_no_more(desk: Desk) -> None:
    beat = desk.build().liveness_marker
    assert beat is not None
    assert (beat.method, beat.name) == (desk.build().upload.method, f"{desk.job.id}.1")
    assert beat.fields["directory"].endswith("/objects/jobs/_liveness")
    assert desk.grants.build(desk.attempt, desk.job, desk.policy, superseded=True).liveness_marker is None


def test_the_beat_goes_with_the_grant(desk: Desk) -> None:
    others = object_keys.liveness_key(replace(desk.identity, number=2))
    for key in (object_keys.liveness_key(desk.identity), others):
        desk.objects.put(key, b"+")
    desk.grants.remove(desk.identity)
    assert [info.key for info in desk.objects.list("jobs/_liveness/")] == [others]


def test_what_a_provider_says_of_its_machines_is_passed_on(desk: Desk) -> None:
    grant = desk.build()
    assert grant.self_terminate is not None
    assert (grant.self_terminate.method.value, grant.self_terminate.base_url) == ("vast", "http://api")
    assert grant.notice.imds == "http://m"


def test_durations_are_seconds_of_the_wall(tmp_path: Path) -> None:
    desk = Desk(tmp_path, clock=Fast())
    rules = CheckpointPolicy(
        every=timedelta(minutes=15), settle=timedelta(seconds=10), stop_grace=timedelta(seconds=90)
    )
    job = replace(desk.job, spec=replace(desk.job.spec, checkpoint=rules))
    grant = desk.build(job=job)
    assert grant.heartbeat_s == pytest.approx(0.2)
    assert grant.lease_s == pytest.approx(3.0)
    assert grant.spec.checkpoint.every_s == pytest.approx(1.5)
    assert grant.spec.checkpoint.settle_s == pytest.approx(10.0 / PROCESS_SCALE_MAX)
    assert grant.spec.checkpoint.stop_grace_s == pytest.approx(90.0 / PROCESS_SCALE_MAX)


def test_a_short_span_stays_short(desk: Desk) -> None:
    rules = CheckpointPolicy(settle=timedelta(0), stop_grace=timedelta(seconds=2))
    grant = desk.build(job=replace(desk.job, spec=replace(desk.job.spec, checkpoint=rules)))
    assert (grant.spec.checkpoint.settle_s, grant.spec.checkpoint.stop_grace_s) == (0.0, 2.0)


async def test_the_newest_accepted_checkpoint_is_offered_first_and_a_changed_one_never(desk: Desk) -> None:
    host = Host(desk.objects, desk.identity)
    for name in ("u1", "u2", "u3"):
        host.checkpoint(name, name.encode())
    host_monitor = HostMonitor(desk.objects, clock=desk.wall, wall=desk.wall, log=Log(), inline=True, ticks=lambda: 0.0)
    report = (await host_monitor.read_hosts(desk.world))[desk.identity]
    job = replace(desk.job, checkpoints=tuple(reversed(report.checkpoints)))
    fresh = replace(desk.attempt, running_at=None, state=AttemptState.STARTING)
    assert [r.name for r in desk.build(fresh, job).restore] == ["u3", "u2", "u1"]
    host.raw("checkpoints/u3.json", b"{}")
    grant = desk.build(fresh, job)
    assert [r.name for r in grant.restore] == ["u2", "u1"]
    assert grant.restore[0].chunks_base is not None
    assert not desk.build(fresh, job).seen_running
    begun = desk.build(desk.attempt, job)
    assert begun.restore == [], "nothing is restored any more once the command runs"
    assert begun.seen_running, "so a machine that is started again on a wiped disk must not begin"


def test_a_stop_is_ordered_in_words(desk: Desk) -> None:
    order = StopOrder(
        reason=EndReason.OVER_BUDGET, detail="day's $5 \x1b[31mare spent", ordered_at=NOW, deadline=NOW + timedelta(1)
    )
    stop = desk.build(replace(desk.attempt, stop=order)).orders.stop
    assert stop is not None
    assert "day's $5" in stop.reason
    assert "\x1b" not in stop.reason
    assert (stop.grace_s, stop.flush) == (None, True)


def test_a_machine_that_must_upload_nothing_more_is_stopped_at_once(desk: Desk) -> None:
    order = StopOrder(reason=EndReason.OVER_BUDGET, detail="", ordered_at=NOW, deadline=NOW + timedelta(1), flush=False)
    stop = desk.build(replace(desk.attempt, stop=order)).orders.stop
    assert stop is not None
    assert (stop.grace_s, stop.flush) == (0.0, False)


def test_a_notice_of_the_provider_becomes_an_order_to_save(desk: Desk) -> None:
    assert desk.build().orders.checkpoint == 0
    assert desk.build(replace(desk.attempt, notice_at=NOW)).orders.checkpoint == 1


def test_secrets_travel_in_the_grant_and_a_missing_one_stops_the_launch(desk: Desk) -> None:
    job = replace(desk.job, spec=replace(desk.job.spec, secrets=("TOKEN",)))
    with pytest.raises(SecretsMissing):
        desk.build(job=job)
    desk.secrets.write(job.id, {"TOKEN": "canary-value"})
    grant = desk.build(job=job)
    assert grant.secrets == {"TOKEN": "canary-value"}
    assert "canary-value" not in repr(grant)


async def test_a_grant_is_renewed_before_a_third_of_its_lease_has_passed(desk: Desk) -> None:
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.controller.run_once()
    issued = desk.read().issued_at
    desk.wall.at += timedelta(seconds=desk.read().lease_s / 5)
    await grant_writer.controller.run_once()
    assert desk.read().issued_at == issued
    desk.wall.at += timedelta(seconds=desk.read().lease_s / 3 - desk.read().lease_s / 5)
    await grant_writer.controller.run_once()
    assert desk.read().issued_at > issued


async def test_an_order_goes_out_at_once(desk: Desk) -> None:
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.controller.run_once()
    order = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW + timedelta(minutes=3))
    stopping = replace(desk.attempt, stop=order, state=AttemptState.STOPPING)
    grant_writer.update(replace(desk.world, attempts={desk.identity: stopping}))
    await grant_writer.controller.run_once()
    assert desk.read().orders.stop is not None


async def test_an_attempt_that_no_longer_counts_reads_that_it_must_stop_and_no_secret(tmp_path: Path) -> None:
    desk = Desk(tmp_path, state=AttemptState.ENDING)
    job = replace(desk.job, spec=replace(desk.job.spec, secrets=("TOKEN",)))
    desk.secrets.write(job.id, {"TOKEN": "canary-value"})
    grant_writer = desk.grant_writer()
    grant_writer.update(replace(desk.world, jobs={job.id: job}))
    await grant_writer.controller.run_once()
    grant = desk.read()
    assert grant.orders.stop is not None
    assert (grant.orders.stop.grace_s, grant.orders.stop.flush, grant.secrets) == (0.0, False, {})


async def test_when_the_machine_is_gone_its_grant_is_deleted(desk: Desk) -> None:
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.controller.run_once()
    grant_writer.update(replace(desk.world, attempts={}))
    await grant_writer.controller.run_once()
    with pytest.raises(ObjectMissing):
        desk.read()


async def test_a_grant_prepared_during_a_round_is_not_taken_for_an_ended_one(desk: Desk) -> None:
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.prepare(desk.attempt, desk.job)
    await grant_writer.controller.run_once()
    assert desk.read().attempt == 1


async def test_a_store_that_is_away_is_told_once_and_tried_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(key: str, data: bytes) -> None:
        raise StoreUnavailable("no answer")

    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    with monkeypatch.context() as patched:
        patched.setattr(desk.objects, "put", down)
        for _ in range(3):
            assert (await grant_writer.controller.run_once()).seconds <= 5
    await grant_writer.controller.run_once()
    assert desk.read().attempt == 1
    assert desk.log.events() == ["grants.not_renewed", "grants.renewed_again"]


async def test_leases_go_on_while_the_wall_clock_is_set_back(desk: Desk) -> None:
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.controller.run_once()
    first = desk.read().issued_at
    desk.wall.at -= timedelta(hours=2)
    await grant_writer.controller.run_once()
    assert desk.read().issued_at > first, "no host takes a grant for new that was issued earlier"


async def test_a_launch_without_an_answer_is_renewed_only_once_its_host_is_heard(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    unanswered = replace(desk.attempt, state=AttemptState.INTENDED, outcome_unknown=True, heartbeat_seen_at=None)
    grant_writer = desk.grant_writer()
    grant_writer.update(replace(desk.world, attempts={desk.identity: unanswered}))
    await grant_writer.controller.run_once()
    assert desk.objects.head(object_keys.grant_key(desk.identity)) is None
    heard = replace(unanswered, heartbeat_seen_at=NOW)
    grant_writer.update(replace(desk.world, attempts={desk.identity: heard}))
    await grant_writer.controller.run_once()
    assert desk.objects.head(object_keys.grant_key(desk.identity)) is not None


def test_several_machines_learn_where_their_next_attempt_is_only_where_the_first_one_can_be_replaced(
    desk: Desk,
) -> None:
    attempt = replace(desk.attempt, quote=replace(desk.attempt.quote, offer=gang_of(desk.attempt.quote.offer, 3)))
    job = replace(desk.job, spec=replace(desk.job.spec, replace_within=timedelta(minutes=10)))
    found = []
    for owner, replaces_first in ((job, False), (desk.job, True), (job, True)):
        traits = ProviderTraits(start_script_bytes_max=4096, replaces_first=replaces_first)
        desk.grants._traits = {SHOP: traits}
        gang = desk.build(attempt, owner).gang
        assert gang is not None
        found.append(gang)
    where = desk.objects.presign_get(object_keys.next_key(desk.identity), expires=NOW)
    assert [gang.next_url for gang in found] == [None, None, where]
    # A replaced first one comes later than those that wait for it.
    members = Members(since=(0, 0, 0), lost=(0,), kept_since=NOW)
    waiting = desk.build(replace(attempt, members=members), job).gang
    assert waiting is not None
    assert waiting.wait_s == found[2].wait_s + found[2].keep_s

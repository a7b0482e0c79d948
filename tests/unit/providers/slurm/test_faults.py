"""What goes wrong on clusters: cut launches, keys used twice, hanging commands, floods of rows, names that imitate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from pydantic import ValidationError

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey, InstanceId, InstanceState, Loss, Market, Offer, OfferQuery
from spotd_providers.slurm.answers import NodeRoom, answer_of, gpus_in, span_of
from spotd_providers.slurm.plugin import PLUGIN, SlurmProvider, refusal_of
from spotd_providers.slurm.settings import SlurmSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import INSTALL, RecordingLog
from spotd_providers.testkit.serve import Call
from tests.cases import every
from tests.fakes.slurm import FakeNode, FakePartition, LoginNode
from tests.unit.providers.slurm.harness import SlurmHarness, play, small_cluster

FAILED = "sbatch: error: Batch job submission failed: "


async def offer_of(provider: SlurmProvider, name: str) -> Offer:
    page = await provider.offers(OfferQuery())
    return next(one for one in page.offers if one.offer_id == name)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for processes of this computer, which no virtual time moves."""
    until = time.monotonic() + 20
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the condition never came true")
        time.sleep(0.02)


async def story_machine(
    h: SlurmHarness, provider: SlurmProvider, key: AttemptKey
) -> tuple[InstanceState, Loss | None, str]:
    listing = await provider.instances()
    one = next(one for one in listing.instances if one.key == key)
    return one.state, one.loss, one.detail


def test_the_same_key_twice_is_one_job(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        made = (await provider.launch(request)).instance
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert [one.ref for one in await provider.find(request.key)] == [made.ref]
        await provider.terminate(made.ref)
        with pytest.raises(OutcomeUnknown):  # not after its end either
            await provider.launch(request)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_two_jobs_of_one_name_are_both_found(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key = h.key()
        h.add_machines([key, key])
        found = await provider.find(key)
        assert len({one.ref for one in found}) == 2
        for one in found:
            await provider.terminate(one.ref)
        assert not h.live(key)

    play(tmp_path, story)


def test_a_login_that_prints_and_sets_variables_changes_nothing(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.login.profile = (
            "echo 'Last login'; echo noise >&2; export SBATCH_REQUEUE=1 SQUEUE_FORMAT=%i SINFO_FORMAT=%n"
            " SBATCH_PARTITION=prod SLURM_TIME_FORMAT=relative; printf 'host\\tx\\t1\\t1\\tme\\t/\\n'"
        )
        request = h.request(
            await offer_of(provider, "spot:H100:1"), start_script="#!/bin/sh\nenv >env\nexec sleep 600\n"
        )
        made = (await provider.launch(request)).instance
        await provider.find(request.key)
        environment = h.login.shared / request.key / "job" / "env"
        wait_for(lambda: environment.exists() and "PATH" in environment.read_text())
        assert "SBATCH" not in environment.read_text()
        assert "LOGIN_SHELL_SECRET" not in environment.read_text()
        assert h.job(made.ref.instance_id).partition == "spot"

    play(tmp_path, story)


def test_a_connection_cut_behind_sbatch_is_settled_by_a_search(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        h.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        h.faults.clear()
        (found,) = await provider.find(request.key)
        assert found.price == 400_000
        assert len(h.live(request.key)) == 1

    play(tmp_path, story)


def test_an_sbatch_that_is_under_way_is_not_absent(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key = h.key()
        folder = h.login.shared / key
        folder.mkdir(parents=True)
        with pytest.raises(Unavailable):
            await provider.find(key)
        long_ago = time.time() - 300
        os.utime(folder, (long_ago, long_ago))
        assert await provider.find(key) == ()

    play(tmp_path, story)


def test_an_sbatch_that_times_out_is_unknown_and_then_found(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        h.refuse_but_leave_machine()
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (found,) = await provider.find(request.key)
        assert found.key == request.key
        await provider.terminate(found.ref)
        assert not h.live(request.key)

    play(tmp_path, story)


def test_accounting_that_knows_a_living_job_keeps_a_search_open(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.quirks.has_accounting = True
        request = h.request(await offer_of(provider, "spot:H100:1"))
        made = (await provider.launch(request)).instance
        job = h.job(made.ref.instance_id)
        h.slurm.past.append(job)
        h.slurm.restart_controller(forget=[job.id])
        with pytest.raises(Unavailable):
            await provider.find(request.key)
        job.state = "COMPLETED"
        assert await provider.find(request.key) == ()

    play(tmp_path, story)


def test_a_full_disk_takes_no_job(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        h.login.program("mkdir", "#!/bin/sh\necho 'No space left on device' >&2; exit 1\n")
        with pytest.raises(NoCapacity, match="disk full"):
            await provider.launch(request)
        (h.login.bin / "mkdir").unlink()
        assert not h.live(request.key)
        await provider.launch(request)
        assert len(h.live(request.key)) == 1

    play(tmp_path, story)


@pytest.mark.parametrize("command", ["sinfo", "squeue", "scontrol", "sbatch"])
def test_a_command_that_hangs_is_given_up(tmp_path: Path, command: str) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        # In the place of the real span, which no virtual time shortens.
        real = "/usr/bin/timeout"
        h.login.program("timeout", f'#!/bin/sh\nshift 3\nexec {real} -k 1 1 "$@"\n')
        h.slurm.quirks.hanging.add(command)
        outcomes: list[object] = []
        for call in (lambda: provider.offers(OfferQuery()), provider.instances, lambda: provider.launch(request)):
            try:
                outcomes.append(await call())
            except ProviderError as exc:
                outcomes.append(type(exc))
        offers, listing, launched = outcomes
        if command in ("sinfo", "scontrol"):
            assert offers is Unavailable
        elif command == "squeue":
            assert listing is Unavailable
            assert len(h.live(request.key)) == 1
        else:
            assert launched is OutcomeUnknown
            assert not h.live(request.key)

    play(tmp_path, story)


def test_a_queue_of_a_hundred_thousand_rows_of_others_is_read(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key = h.key()
        h.add_machines([key])
        layout = "nightly job of somebody, with a comma " * 3
        h.slurm.quirks.raw_rows = [f"{number} {layout}\n" for number in range(100_000)]
        listing = await provider.instances()
        assert listing.complete
        assert [one.key for one in listing.instances] == [key]

    play(tmp_path, story)


def test_more_rows_of_ours_than_are_judged_make_the_list_incomplete(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.quirks.raw_rows = [f"{number} spotd-lab-j1-1 garbage NaN\n" for number in range(100_000)]
        key = h.key()
        h.add_machines([key])
        listing = await provider.instances()
        assert not listing.complete
        assert len(listing.instances) == 1

    play(tmp_path, story)


def test_names_with_commas_marks_and_line_breaks_imitate_nothing(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key = h.key()
        for name in (
            "a,b",
            f"x\t{key}\t{key}\troot\tRUNNING",
            f"{key},{key}",
            "@0000000000000000@ 0",
            "ran\tjob\t0\t0\t",
        ):
            h.slurm.add_job(name, "", partition="spot")
        listing = await provider.instances()
        assert listing.instances == ()
        assert listing.complete
        assert await provider.find(key) == ()

    play(tmp_path, story)


def test_a_job_whose_comment_was_changed_is_neither_ended_nor_taken_for_absent(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key = h.key()
        job = h.slurm.add_job(key, "project 7", partition="spot")
        assert not (await provider.instances()).complete
        with pytest.raises(Unavailable):
            await provider.find(key)
        ref = (await provider.launch(h.request(await offer_of(provider, "spot:H100:1")))).instance.ref
        with pytest.raises(RequestRejected):
            await provider.terminate(replace(ref, instance_id=InstanceId(f"{job.id}:{key}")))
        assert job.state == "RUNNING"

    play(tmp_path, story)


def test_a_site_that_rewrites_comments_is_named(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.quirks.rewrites_comment = "cost centre 7"
        with pytest.raises(OutcomeUnknown, match="changed name or comment"):
            await provider.launch(h.request(await offer_of(provider, "spot:H100:1")))

    play(tmp_path, story)


def test_a_job_of_another_user_or_of_an_array_is_not_ours(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        key, other = h.key(), h.key()
        foreign = h.slurm.add_job(key, key, user="alice", partition="spot")
        array = h.slurm.add_job(other, other, partition="spot")
        array.array = f"{array.id}_[1-5]"
        listing = await provider.instances()
        assert listing.instances == ()
        assert not listing.complete  # the array's row is none that spotd makes
        ref = (await provider.launch(h.request(await offer_of(provider, "spot:H100:1")))).instance.ref
        await provider.terminate(replace(ref, instance_id=InstanceId(f"{foreign.id}:{key}")))
        assert foreign.state == "RUNNING"

    play(tmp_path, story)


def test_a_number_that_was_given_to_another_job_ends_nothing(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        made = (await provider.launch(h.request(await offer_of(provider, "spot:H100:1")))).instance
        job = h.job(made.ref.instance_id)
        job.name = job.comment = "somebody else's"
        await provider.terminate(made.ref)
        assert job.state == "RUNNING"

    play(tmp_path, story)


def test_a_victim_that_was_queued_again_is_not_our_attempt_and_does_not_start(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        made = (await provider.launch(request)).instance
        job = h.job(made.ref.instance_id)
        assert not job.may_requeue
        wait_for(lambda: (h.login.shared / request.key / "started" / "id").exists())
        h.slurm.requeue(job)
        assert (await story_machine(h, provider, request.key))[:2] == (InstanceState.PAUSED, Loss.PREEMPTED)
        await h.advance(timedelta(minutes=3))
        assert h.live(request.key)  # Slurm has started it again
        wait_for(lambda: not h.live(request.key) or not h.live(request.key)[0].exists)
        assert "started before" in (h.login.shared / request.key / "log").read_text()

    play(tmp_path, story)


def test_a_job_that_waits_too_long_is_given_up_and_never_starts(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        for node in h.slurm.nodes.values():
            node.state = "resv"
        request = h.request(await _queued_offer(h, provider))
        made = (await provider.launch(request)).instance
        assert made.state is InstanceState.PENDING
        await h.advance(timedelta(minutes=9))
        assert (await story_machine(h, provider, request.key))[0] is InstanceState.PENDING
        await h.advance(timedelta(minutes=2))
        state, loss, detail = await story_machine(h, provider, request.key)
        assert (state, loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        assert "for more than 10 min" in detail
        await provider.terminate(made.ref)
        for node in h.slurm.nodes.values():
            node.state = ""
        await h.advance(timedelta(minutes=1))
        assert not h.live(request.key)

    play(tmp_path, story, queue_wait="10m")


async def _queued_offer(h: SlurmHarness, provider: SlurmProvider) -> Offer:
    for node in h.slurm.nodes.values():
        node.state = ""
    offer = await offer_of(provider, "spot:H100:1")
    for node in h.slurm.nodes.values():
        node.state = "resv"
    return offer


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_full_partition_is_offered_where_a_job_may_queue(tmp_path: Path, is_queued: bool) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        for count in (4, 2):
            offer = await offer_of(provider, "spot:H100:2")
            assert len((await provider.offers(OfferQuery())).offers) == 2, count
            await provider.launch(h.request(offer))
        page = await provider.offers(OfferQuery())
        if is_queued:
            assert {one.offer_id for one in page.offers} == {"spot:H100:1", "spot:H100:2"}
        else:
            assert page.offers == ()
            assert {one.reason for one in page.rejected} == {"0 of 4 are free, and no node has room for a job"}

    play(tmp_path, story, partitions=[{"name": "spot", "price": 1, "queue": is_queued}])


def test_the_time_limit_is_a_notice_and_then_an_end(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.partitions["spot"].max_time = "01:00:00"
        request = h.request(await offer_of(provider, "spot:H100:1"))
        assert request.offer.duration_max == timedelta(hours=1)
        await provider.launch(request)
        await h.advance(timedelta(minutes=54))
        listing = await provider.instances()
        assert listing.instances[0].notice_at is None
        await h.advance(timedelta(minutes=2))
        (near,) = (await provider.instances()).instances
        assert near.notice_at is not None
        assert timedelta(minutes=3) < near.notice_at - h.clock.now() < timedelta(minutes=5)
        await h.advance(timedelta(minutes=5))
        assert (await story_machine(h, provider, request.key))[:2] == (InstanceState.GONE, Loss.EXPIRED)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("state", "loss"),
    [
        ("TIMEOUT", Loss.EXPIRED), ("NODE_FAIL", Loss.HOST_LOST), ("BOOT_FAIL", Loss.HOST_LOST),
        ("PREEMPTED", Loss.PREEMPTED), ("CANCELLED", Loss.PREEMPTED), ("COMPLETED", Loss.SELF), ("FAILED", Loss.SELF),
    ],
)  # fmt: skip
def test_each_end_has_its_reason(tmp_path: Path, state: str, loss: Loss) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        made = (await provider.launch(request)).instance
        h.slurm.finish(h.job(made.ref.instance_id), state, h.clock.now())
        seen = await story_machine(h, provider, request.key)
        assert seen[:2] == (InstanceState.GONE, loss)
        if state == "CANCELLED":
            assert "not by spotd" in seen[2]

    play(tmp_path, story)


def test_a_wrong_clock_of_the_cluster_moves_no_instant(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        made = (await provider.launch(request)).instance
        bought_at, offset = h.clock.now(), timedelta(hours=5)
        job = h.job(made.ref.instance_id)
        job.submitted += offset
        h.login.program("date", f'#!/bin/sh\necho $(($(cat "{h.login.clock}") + {int(offset.total_seconds())}))\n')
        (one,) = (await provider.instances()).instances
        assert one.created_at is not None
        assert abs(one.created_at - bought_at) < timedelta(seconds=2)

    play(tmp_path, story)


def test_two_daemons_on_one_cluster_know_each_their_own(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        mine = (await provider.launch(request)).instance
        services = Services(
            install=AttemptKey("other"), clock=h.clock, rng=Random(2), log=RecordingLog(),  # type: ignore[arg-type] # any text
            state_dir=tmp_path / "state",
        )  # fmt: skip
        async with PLUGIN.open(h.settings(), services) as second:
            assert (await second.instances()).instances == ()
            with pytest.raises(RequestRejected):
                await second.terminate(mine.ref)
        assert h.live(request.key)

    play(tmp_path, story)


def test_untyped_gpus_are_named_by_the_config_and_prices_by_gpu_count_there(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.nodes["n1"].kind = h.slurm.nodes["n2"].kind = ""
        page = await provider.offers(OfferQuery(markets=(Market.SPOT,)))
        assert {one.gpu for one in page.offers} == {"RTX_4090"}
        assert {one.gpu_price for one in page.offers} == {500_000, 1_000_000}

    more = {"partitions": [{"name": "spot", "gpu": "rtx4090"}], "gpu_prices": {"RTX 4090": 0.5}}
    play(tmp_path, story, **more)


def test_a_partition_without_a_price_or_that_is_down_says_so(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.partitions["prod"].state = "DOWN"
        page = await provider.offers(OfferQuery())
        assert page.offers == ()
        assert {(one.offer_id, one.reason) for one in page.rejected} == {
            ("spot:h100", "no price is stated for H100 there: set price or gpu_prices"),
            ("prod", "the partition is DOWN"),
            ("nope", "there is no such partition"),
        }

    play(tmp_path, story, partitions=[{"name": "spot"}, {"name": "prod", "price": 1}, {"name": "nope", "price": 0}])


def test_a_refused_job_leaves_no_folder_with_its_address(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        request = h.request(await offer_of(provider, "spot:H100:1"))
        h.exhaust_quota()
        with pytest.raises(QuotaExceeded):
            await provider.launch(request)
        assert not (h.login.shared / request.key).exists()

    play(tmp_path, story)


def test_a_cluster_on_this_computer_needs_no_ssh(tmp_path: Path) -> None:
    clock = FakeClock()
    slurm = small_cluster(tmp_path / "cluster", clock)
    login = LoginNode(tmp_path / "login", slurm)
    settings = SlurmSettings(path=login.path, folder=str(tmp_path / "jobs"), partitions=[{"name": "spot", "price": 0}])
    services = Services(install=INSTALL, clock=clock, rng=Random(1), log=RecordingLog(), state_dir=tmp_path)

    async def main() -> None:
        async with PLUGIN.open(settings, services) as provider:
            page = await provider.offers(OfferQuery())
            assert {one.offer_id for one in page.offers} == {"spot:H100:1", "spot:H100:2"}
            assert {one.gpu_price for one in page.offers} == {0}
            assert (await provider.instances()).complete

    try:
        asyncio.run(main())
    finally:
        login.stop()
        slurm.shut_down()


@every(
    ("words", "kind"),
    (
        (FAILED + "Invalid partition name specified", OfferGone),
        (FAILED + "Requested node configuration is not available", NoCapacity),
        (FAILED + "Job violates accounting/QOS policy (job submit limit)", QuotaExceeded),
        (FAILED + "Invalid account or account/partition combination", RequestRejected),
        (FAILED + "Requested time limit is invalid (missing or exceeds)", RequestRejected),
        (FAILED + "Protocol authentication error", AuthFailed),
        (FAILED + "Socket timed out on send/recv operation", OutcomeUnknown),
        (FAILED + "Unable to contact slurm controller (connect failure)", OutcomeUnknown),
        (FAILED + "Unexpected message received", OutcomeUnknown),
        ("NaN", OutcomeUnknown),
        ("", OutcomeUnknown),
    ),
)  # fmt: skip
def test_refusals_mean_what_they_say_and_all_else_is_unknown(words: str, kind: type[ProviderError]) -> None:
    assert type(refusal_of(words, AttemptKey("spotd-lab-j1-1"))) is kind


@every(
    ("text", "found"),
    (
        ("gpu:h100:2", {"h100": 2}), ("gpu:h100:2(S:0-1)", {"h100": 2}), ("gpu:2", {"": 2}),
        ("gpu:a100:4(IDX:0,2),gpu:a100_1g.5gb:7(IDX:N/A),nvme:1", {"a100": 4, "a100_1g.5gb": 7}),
        ("(null)", {}), ("", {}), ("gpu:NaN", {}), ("gpu:h100:-1", {}), ("gpu:h100:1e308", {}), ("xgpu:h100:4", {}),
    ),
)  # fmt: skip
def test_gres_is_read_by_its_types(text: str, found: dict[str, int]) -> None:
    assert gpus_in(text) == found


@every(
    ("text", "span"),
    (
        ("UNLIMITED", None), ("60", timedelta(hours=1)), ("01:00:00", timedelta(hours=1)), ("NaN", None), ("-1", None),
        ("10:30", timedelta(minutes=10, seconds=30)), ("2-00:00:00", timedelta(days=2)), ("", None),
        ("1-12", timedelta(days=1, hours=12)),
        ("9999999999-00:00:00", None),
    ),
)  # fmt: skip
def test_durations_are_read_as_slurm_writes_them(text: str, span: timedelta | None) -> None:
    assert span_of(text) == span


@every("row", (["host", "b", "NaN", "1", "me", "/d"], ["host", "b", "1", "9" * 40, "me", "/d"], ["host"], ["node"]))
def test_an_answer_that_does_not_say_who_answers_is_none(row: list[str]) -> None:
    assert answer_of([row]) is None


def test_odd_nodes_cost_their_rows_and_are_named(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.nodes["n1"].gpus = 10**6 - 1
        h.slurm.nodes["n2"].memory_mb = 10**12
        page = await provider.offers(OfferQuery())
        assert {one.region for one in page.offers} == {"prod"}
        assert "2 rows of nodes cannot be read" in {one.reason for one in page.rejected}

    play(tmp_path, story)


def test_a_room_fits_only_what_is_free_of_everything() -> None:
    room = NodeRoom(node="n", gpus=4, free=2, cpus=16, cpus_free=8, memory_mb=100, memory_free_mb=50)
    assert room.fits(2, 8, 50)
    assert not room.fits(3, 1, 1)
    assert not room.fits(1, 9, 1)
    assert not room.fits(1, 1, 51)


@every(
    "bad",
    (
        {"partitions": [{"name": "a"}, {"name": "a"}]}, {"partitions": [{"name": "--wrap"}]}, {"folder": "a b"},
        {"partitions": [{"name": "a", "price": float("nan")}]}, {"partitions": [{"name": "a", "price": -1}]},
        {"partitions": [{"name": "a", "time_limit": "0s"}]}, {"queue_wait": "0s"}, {"gpu_prices": {"h100": 1e308}},
        {"partitions": [{"name": "a", "constraint": "x; rm -rf /"}]}, {"host": "-oProxyCommand=x"}, {"path": "$(id)"},
    ),
)  # fmt: skip
def test_settings_that_would_become_words_of_a_shell_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SlurmSettings.model_validate(bad)


def test_a_partition_that_nothing_outranks_is_on_demand(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.partitions["prod"].tier = 1
        page = await provider.offers(OfferQuery())
        assert {one.market for one in page.offers} == {Market.ON_DEMAND}

    play(tmp_path, story)


def test_nodes_without_gpus_are_offered_whole(tmp_path: Path) -> None:
    async def story(h: SlurmHarness, provider: SlurmProvider) -> None:
        h.slurm.nodes["c1"] = FakeNode(name="c1", kind="", gpus=0, cpus=32)
        h.slurm.partitions["cpu"] = FakePartition(name="cpu", nodes=("c1",), tier=10)
        (offer,) = (await provider.offers(OfferQuery())).offers
        assert (offer.gpu, offer.gpu_count, offer.gpu_price, offer.cpus) == ("CPU", 0, 50_000, 32.0)
        await provider.launch(h.request(offer))
        assert (await provider.offers(OfferQuery())).offers == ()

    play(tmp_path, story, partitions=[{"name": "cpu", "price": 0.05}])

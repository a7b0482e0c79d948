"""What the API answers, over a running daemon in virtual time."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.api.handlers.logs import parse_cursor
from spotd.api.requests import EventQuery, JobDraft, JobQuery, LogQuery, PriceQuery, Submission, utc_text
from spotd.api.responses import ApiUnavailable, Invalid, NotFound, OverBudget, StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.market import gang_of
from spotd.core.domain.states import JobState
from spotd.store import StateUnavailable as StateUnavailable
from spotd_providers.contract.errors import Unavailable as ProviderDown
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


def draft(**changes: Any) -> JobDraft:
    data: dict[str, Any] = {
        "name": "train",
        "run": "python train.py",
        "image": "scratch",
        "resources": {"gpu": "RTX_4090:1"},
        "price": {"max_price": 1.0},
    }
    return JobDraft(data={**data, **changes}, source="train.toml")


async def submitted(rig: Rig, **changes: Any) -> JobId:
    detail = await rig.handlers().submissions.submit(Submission(draft=draft(**changes)))
    return JobId(detail["job"]["id"])


async def test_a_plan_tells_candidates_and_verdict_and_changes_nothing(rig: Rig) -> None:
    async with rig.ready():
        plan = await rig.handlers().submissions.plan(draft())
        assert [c["offer"] for c in plan["candidates"]] == ["o1", "o2"]
        assert (plan["verdict_kind"], plan["fits"], plan["run"]) == ("placed", True, "python train.py")
        assert plan["ceilings"] == {"RTX_4090": 1.0}
        assert rig.store.read(lambda reads: reads.jobs()) == ()


async def test_a_plan_below_the_market_says_so(rig: Rig) -> None:
    async with rig.ready():
        plan = await rig.handlers().submissions.plan(draft(price={"max_price": 0.01}))
        assert (plan["fits"], plan["verdict_kind"]) == (False, "above_ceiling")
        assert plan["candidates"][0]["verdict"] == "above the ceiling"
        assert "a tenth" in plan["warnings"][0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"resources": {"gpu": "H1000:1"}}, "resources.gpu[0]"),
        ({"resources": {"gpu": "RTX_4090:1", "providers": ["nobody"]}}, "resources.providers"),
        ({"imagee": "x"}, "imagee"),
        ({"secrets": ["TOKEN"]}, "secrets"),
        ({"workdir": "."}, "workdir"),
    ],
    ids=["gpu", "provider", "typo", "secret", "code"],
)
async def test_what_cannot_be_submitted_is_refused_with_its_key(rig: Rig, changes: dict[str, Any], key: str) -> None:
    async with rig.ready():
        with pytest.raises(Invalid) as caught:
            await rig.handlers().submissions.submit(Submission(draft=draft(**changes)))
        assert [p.key for p in caught.value.problems] == [key]


async def test_a_job_that_its_own_budget_forbids_is_refused(rig: Rig) -> None:
    async with rig.ready():
        with pytest.raises(OverBudget):
            await rig.handlers().submissions.submit(Submission(draft=draft(budget={"job": 0.001})))


async def test_two_unfinished_jobs_cannot_share_a_name(rig: Rig) -> None:
    async with rig.ready():
        await submitted(rig)
        with pytest.raises(StateConflict, match="already"):
            await submitted(rig)


async def test_a_job_is_found_by_id_name_and_prefix(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        for ref in (job, "train", job[:7]):
            assert (await rig.handlers().jobs.detail(ref))["job"]["id"] == job
        with pytest.raises(NotFound):
            await rig.handlers().jobs.detail("nobody")


async def test_why_has_an_answer_in_every_state(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig, price={"max_price": 0.01})
        await rig.until_state(job, JobState.WAITING_PRICE)
        why = await rig.handlers().jobs.why(job)
        assert (why["kind"], why["state"]) == ("above_ceiling", "WAITING_PRICE")
        assert "above the ceiling" in why["sentence"]
        assert why["best"] is not None
        await rig.handlers().jobs.cancel(job)
        why = await rig.handlers().jobs.why(job)
        assert (why["kind"], why["sentence"]) == (None, "cancelled by its owner")


async def test_a_job_is_listed_cancelled_twice_and_retried_once(rig: Rig) -> None:
    async with rig.ready():
        handlers = rig.handlers()
        job = await submitted(rig, price={"max_price": 0.01})
        assert [j["id"] for j in (await handlers.jobs.page(JobQuery(active=True)))["jobs"]] == [job]
        for _ in range(2):
            assert (await handlers.jobs.cancel(job))["state"] == "CANCELLED"
        assert (await handlers.jobs.page(JobQuery(active=True)))["jobs"] == []
        assert len((await handlers.jobs.page(JobQuery()))["jobs"]) == 1
        assert (await handlers.jobs.retry(job))["state"] == "QUEUED"
        with pytest.raises(StateConflict):
            await handlers.jobs.retry(job)


async def _logs(rig: Rig, job: str, query: LogQuery) -> list[tuple[str, str]]:
    return [(r["kind"], r["text"]) async for r in rig.handlers().logs.stream(job, query)]


async def test_a_log_runs_on_over_attempts_and_outlives_the_machines(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        first = await rig.until_running(job, 1)
        half = "gr\u00fcn".encode()
        first.log(b"one\n" + half[:3])
        first.log(half[3:] + b"\n")
        rig.shop.set_state(AttemptKey(f"spotd-lab-{job}-1"), InstanceState.PAUSED, Loss.OUTBID)
        second = await rig.until_running(job, 2)
        second.log("two\nthree\n")
        second.exit("succeeded")
        await rig.until_state(job, JobState.SUCCEEDED)
        await rig.until(lambda: not rig.shop.not_gone())
        records = [r async for r in rig.handlers().logs.stream(job, LogQuery(follow=True))]
        assert "".join(r["text"] for r in records if r["kind"] == "log") == "one\ngr\u00fcn\ntwo\nthree\n"
        assert [r["kind"] for r in records] == ["attempt", "log", "log", "attempt", "log", "end"]
        assert (records[-1]["state"], records[-1]["exit_code"]) == ("SUCCEEDED", 0)
        assert await _logs(rig, job, LogQuery(after=records[2]["cursor"])) == [
            ("attempt", records[3]["text"]),
            ("log", "two\nthree\n"),
            ("end", ""),
        ]
        tail = await _logs(rig, job, LogQuery(tail=1))
        assert [text for kind, text in tail if kind == "log"] == ["three\n"]
        only = await _logs(rig, job, LogQuery(attempt=1))
        assert "".join(text for kind, text in only if kind == "log") == "one\ngr\u00fcn\n"
        with pytest.raises(NotFound):
            await _logs(rig, job, LogQuery(attempt=9))


async def test_a_followed_log_ends_when_the_job_does(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        host = await rig.until_running(job, 1)
        host.log("a\n")
        seen: list[str] = []
        async for record in rig.handlers().logs.stream(job, LogQuery(follow=True)):
            seen.append(record["kind"])
            if record["kind"] == "log" and len(seen) == 2:
                host.log("b\n")
                host.exit("succeeded")
        assert seen == ["attempt", "log", "log", "end"]


@pytest.mark.parametrize("text", ["x", "1/a/b", "-1/", "99999999999/1"])
def test_a_cursor_that_no_record_gave_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_cursor(text)


async def test_outputs_and_checkpoints_can_be_pulled_and_damage_is_noticed(rig: Rig) -> None:
    async with rig.ready():
        handlers = rig.handlers()
        job = await submitted(rig)
        host = await rig.until_running(job, 1)
        with pytest.raises(NotFound):
            await handlers.files.entries(job, None)
        host.checkpoint("u1", b"weights one")
        host.outputs("out/result", b"the result")
        await rig.until(lambda: bool(rig.job(job).checkpoints))
        with pytest.raises(NotFound, match="no outputs"):
            await handlers.files.entries(job, None)
        host.exit("succeeded")
        await rig.until_state(job, JobState.SUCCEEDED)
        assert [f["path"] for f in (await handlers.files.entries(job, None))["files"]] == ["out/result"]
        assert [c["name"] for c in await handlers.checkpoints.entries(job)] == ["u1"]
        read = [piece async for piece in handlers.files.content(job, "newest", "u1/weights")]
        assert b"".join(read) == b"weights one"
        key = next(i.key for i in rig.objects.list(f"jobs/{job}/attempts/1/data/") if i.size == len(b"weights one"))
        rig.objects.put(key, b"weights 0ne")
        with pytest.raises(ApiUnavailable, match="damaged"):
            [piece async for piece in handlers.files.content(job, "u1", "u1/weights")]
        with pytest.raises(NotFound):
            [piece async for piece in handlers.files.content(job, "u1", "u1/nothing")]


async def test_many_files_come_one_behind_the_other_and_each_chunk_is_read_once(rig: Rig) -> None:
    async with rig.ready():
        handlers = rig.handlers()
        job = await submitted(rig)
        host = await rig.until_running(job, 1)
        host.many_outputs({f"out/{number:03d}": b"%03d" % number for number in range(300)})
        host.exit("succeeded")
        await rig.until_state(job, JobState.SUCCEEDED)
        listed = await handlers.files.entries(job, None)
        sha256 = listed["manifest_sha256"]
        asked = []
        real = rig.objects.get

        def counted(key: str, **given: Any) -> bytes:
            asked.append(key)
            return real(key, **given)

        rig.objects.get = counted  # type: ignore[method-assign]  # the same answer, counted
        read = [piece async for piece in handlers.files.contents(job, None, sha256, ((0, 1), (7, 7), (10, 299)))]
        rig.objects.get = real  # type: ignore[method-assign]  # as it was
        assert b"".join(read) == b"".join(b"%03d" % number for number in (0, 1, 7, *range(10, 300)))
        assert len([key for key in asked if "/data/" in key]) == 1
        with pytest.raises(StateConflict):
            [piece async for piece in handlers.files.contents(job, None, "0" * 64, ((0, 0),))]
        with pytest.raises(NotFound):
            [piece async for piece in handlers.files.contents(job, None, sha256, ((0, 300),))]


async def test_events_are_told_from_where_the_reader_was(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig, price={"max_price": 0.01})
        await rig.until_state(job, JobState.WAITING_PRICE)
        events = [e async for e in rig.handlers().events.stream(EventQuery(job="train"))]
        assert [e["kind"] for e in events] == ["job.submitted", "job.waiting_price"]
        assert {e["job_name"] for e in events} == {"train"}
        later = [e async for e in rig.handlers().events.stream(EventQuery(after=events[0]["id"]))]
        assert [e["id"] for e in later] == [events[1]["id"]]
        followed = rig.handlers().events.stream(EventQuery(follow=True, after=events[-1]["id"]))
        await rig.handlers().jobs.cancel(job)
        async with aclosing(followed) as stream:
            assert (await anext(stream))["kind"] == "job.cancelled"


async def test_a_job_has_the_use_of_its_gpus_from_the_newest_heartbeat_and_when_that_was_read(rig: Rig) -> None:
    figures: dict[str, Any] = {
        "index": 0, "name": "H100", "util_pct": 97.0, "mem_used_mb": 61_000.0, "mem_total_mb": 81_559.0,
        "power_w": 650.0, "temp_c": None,
    }  # fmt: skip
    async with rig.ready():
        job = await submitted(rig)
        assert (await rig.handlers().jobs.detail(job))["job"]["gpus"] == []
        host = await rig.until_running(job, 1)
        host.beat("run", gpus=[figures])
        await rig.until(lambda: bool(getattr(rig.host_monitor.heartbeat(host.attempt), "gpus", None)))
        (shown,) = (await rig.handlers().jobs.detail(job))["job"]["gpus"]
        read_at = rig.host_monitor.heartbeat_at(host.attempt)
        assert read_at is not None
        assert shown == {**figures, "at": utc_text(read_at)}
        (row,) = (await rig.handlers().jobs.page(JobQuery()))["jobs"]
        assert row["gpus"] == [shown]


@pytest.mark.long
async def test_a_receipt_adds_up_to_what_the_machines_cost(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        host = await rig.until_running(job, 1)
        for _ in range(20):
            await rig.clock.sleep(timedelta(seconds=30))
            host.beat("run")
        host.exit("succeeded")
        await rig.until_state(job, JobState.SUCCEEDED)
        await rig.until(lambda: not rig.shop.not_gone())
        await rig.clock.sleep(timedelta(minutes=2))
        cost = await rig.handlers().receipts.cost(None)
    (receipt,) = cost["receipts"]
    born, died = (next(iter(x.values())) for x in (rig.shop.born_at, rig.shop.ended_at))
    billed_h = (died - born) / timedelta(hours=1)
    assert receipt["attempts"][0]["seconds"] == pytest.approx((died - born).total_seconds(), abs=5)
    assert receipt["spent_usd"] == pytest.approx(receipt["attempts"][0]["effective_usd_h"] * billed_h, rel=0.02)
    assert receipt["on_demand_usd"] == pytest.approx(1.0 * billed_h, rel=0.02)
    assert cost["spent_usd"] == receipt["spent_usd"]
    assert [b["name"] for b in cost["budgets"]] == ["day", "month", "machines"]


async def test_prices_are_shown_by_the_names_people_use(rig: Rig) -> None:
    async with rig.ready():
        handlers = rig.handlers()
        page = await handlers.prices.quotes(PriceQuery(gpu="rtx 4090", limit=1))
        assert ([q["offer"] for q in page["quotes"]], page["more"]) == (["o1"], True)
        assert (await handlers.prices.quotes(PriceQuery(gpu="h100")))["quotes"] == []
        for wrong in (PriceQuery(gpu="nonsense9"), PriceQuery(provider="nobody")):
            with pytest.raises(Invalid):
                await handlers.prices.quotes(wrong)


async def test_a_provider_that_is_away_is_named_by_providers_doctor_and_why(rig: Rig) -> None:
    rig.shop.always["offers"] = ProviderDown("connection refused")
    async with rig.running():
        await rig.until(lambda: bool(rig.offer_cache.snapshot().by_provider[rig.shop.name].error))
        handlers = rig.handlers()
        (shop,) = await handlers.health.providers()
        assert (shop["ok"], shop["detail"]) == (False, "connection refused")
        job = await submitted(rig)
        await rig.clock.sleep(timedelta(seconds=5))
        assert "connection refused" in (await handlers.jobs.why(job))["sentence"]
        report = await handlers.doctor.report()
        assert {row["area"] for row in report["checks"]} == {"daemon", "store", "shop"}


async def test_reconcile_lists_every_provider_and_tells_what_follows(rig: Rig) -> None:
    async with rig.ready():
        rig.shop.put_machine(AttemptKey("spotd-lab-forgotten-1"))
        answer = await rig.handlers().health.reconcile()
        assert answer["listings"][0]["machines"] == 1
        assert "no open attempt owns this machine" in answer["actions"]


async def test_each_of_several_machines_of_one_job_is_counted_by_providers_and_reconcile(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        await rig.until_running(job, 1)
        state = rig.control_loop.state
        assert state is not None
        (item,) = state.world.attempts.values()
        gang = replace(item, quote=replace(item.quote, offer=gang_of(item.quote.offer, 4)))
        rig.control_loop.state = replace(state, world=replace(state.world, attempts={gang.id: gang}))
        rig.shop.put_machine(AttemptKey("spotd-lab-forgotten-1"))
        await rig.pollers[rig.shop.name].poll_machines()
        health = rig.handlers().health
        (shop,) = await health.providers()
        assert (shop["machines"], health._listing(rig.shop.name)["machines"]) == (5, 5)


async def test_a_state_that_cannot_be_read_is_unavailable_with_a_way_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.ready():

        def full(_work: object) -> None:
            raise StateUnavailable("the disk is full", hint="free some space")

        monkeypatch.setattr(rig.store, "read", full)
        with pytest.raises(ApiUnavailable) as caught:
            await rig.handlers().jobs.page(JobQuery())
        assert caught.value.hint == "free some space"
        assert rig.handlers().context.database.last_error == "the disk is full"
        monkeypatch.undo()


async def test_status_counts_jobs_machines_and_money(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig)
        await rig.until_running(job, 1)
        status = await rig.handlers().health.status()
        assert (status["machines"], status["jobs"]["RUNNING"], status["clock_scale"]) == (1, 1, 1.0)

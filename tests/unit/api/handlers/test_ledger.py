"""What everything cost by job, day, provider, GPU and host: the same sum whatever it is divided by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from starlette.requests import Request

from spotd.api.handlers import receipts
from spotd.api.requests import CostQuery, JobQuery, read_query
from spotd.api.responses import Invalid
from spotd.core.domain.attempts import ReadBill
from spotd.core.domain.intents import Charge, ChargePart, CostSums, JobId, Meter, sums_of
from spotd.core.domain.jobs import ArrayTask
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.metering import unsettled_sums
from spotd.store import CostGrouping, Store
from spotd_providers.contract.values import HostId, MicroUsd, MicroUsdPerHour, ProviderName
from tests.unit.core.builders import SHOP
from tests.unit.daemon.rig import Rig
from tests.unit.store import values as v

pytestmark = pytest.mark.anyio

AWS = ProviderName("aws")
PARTS = ("gpu", "disk", "traffic", "fee", "free", "booked", "corrected", "spent", "uncompared", "on_demand", "saved")


def micro(row: Mapping[str, Any]) -> dict[str, int]:
    """The sums of a group in micro-dollars, which its dollars are to the last one."""
    return {part: round(row[f"{part}_usd"] * 1_000_000) for part in PARTS}


def machine(name: str, number: int, *, provider: ProviderName, host: str | None, gpu: str, runs: bool = False) -> Any:
    """An attempt on this host; one that runs has ten minutes on its meter that are not booked."""
    base = v.attempt(name, number, AttemptState.RUNNING if runs else AttemptState.ENDED)
    offer = replace(base.quote.offer, provider=provider, host_id=None if host is None else HostId(host), gpu=gpu)
    since = v.NOW - timedelta(minutes=10)
    meter = Meter(rate=MicroUsdPerHour(1_234_567), on_demand_rate=MicroUsdPerHour(2_000_001), since=since)
    ref = None if base.ref is None else replace(base.ref, provider=provider)
    return replace(base, quote=replace(base.quote, offer=offer), ref=ref, meter=meter if runs else Meter())


amounts = st.integers(min_value=0, max_value=50_000_000)


@st.composite
def charges(draw: st.DrawFn, name: str, number: int, provider: ProviderName) -> list[Charge]:
    """What may be booked of one attempt: time, disk, traffic, and what is taken back or billed besides."""
    made = []
    for n in range(draw(st.integers(0, 5))):
        part = draw(st.sampled_from(ChargePart))
        at = v.NOW + timedelta(days=draw(st.integers(0, 2)), minutes=10 * n)
        amount = draw(amounts)
        plain = v.charge(name, number, at=at, amount=amount, on_demand=draw(st.none() | amounts), provider=provider)
        if part in {ChargePart.MACHINE, ChargePart.DISK}:
            made.append(replace(plain, part=part, fee=MicroUsd(draw(st.integers(0, amount)))))
        elif part is ChargePart.TRAFFIC:
            made.append(replace(plain, part=part, end=plain.start))
        else:
            sign = -1 if part is ChargePart.CREDIT else draw(st.sampled_from([-1, 1]))
            made.append(
                replace(plain, part=part, end=plain.start, amount=MicroUsd(sign * amount), on_demand=MicroUsd(0))
            )
    return made


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Any], list[Charge]]:
    rows: list[Any] = []
    booked: list[Charge] = []
    for job in range(draw(st.integers(1, 3))):
        name, runs = f"j{job}", draw(st.booleans())
        count = draw(st.integers(1, 3))
        rows.append(v.job(name, JobState.RUNNING if runs else JobState.SUCCEEDED, attempts_made=count))
        for number in range(1, count + 1):
            provider = draw(st.sampled_from([v.VAST, AWS]))
            host, gpu = draw(st.sampled_from([None, "h1", "h2"])), draw(st.sampled_from(["H100", "A100"]))
            rows.append(machine(name, number, provider=provider, host=host, gpu=gpu, runs=runs and number == count))
            booked += draw(charges(name, number, provider))
    return rows, booked


def sums_by(store: Store, by: CostGrouping, now: datetime) -> CostSums:
    """All of it, by this grouping: what the answer adds up."""
    booked, running = store.read(lambda r: (r.cost_groups(by), r.open_attempts()))
    found = {group.key: group for group in booked}
    for item, name, state in running:
        receipts._add_running(found, by, item, name, state, now)
    return sum((group.sums for group in found.values()), start=CostSums())


@pytest.mark.long
@given(histories())
def test_any_grouping_adds_up_to_the_charges_to_the_micro_dollar(history: tuple[list[Any], list[Charge]]) -> None:
    rows, booked = history
    running = [row for row in rows if getattr(row, "state", None) is AttemptState.RUNNING]
    whole = sum(map(sums_of, booked), start=CostSums())
    whole = sum((s for item in running for s in unsettled_sums(item, v.NOW).values()), start=whole)
    with Store.open(":memory:") as store:
        store.tx(lambda tx: tx.commit(v.plan(*rows)))
        store.tx(lambda tx: tx.commit(Plan(charges=tuple(booked))))
        for by in CostGrouping:
            found = sums_by(store, by, v.NOW)
            assert replace(found, billed=whole.billed) == whole, by
            assert abs(found.billed - whole.billed) < timedelta(milliseconds=1)
    assert whole.amount == whole.gpu + whole.disk + whole.traffic + whole.fee - whole.free + whole.corrected


def test_the_sums_of_charges_are_added_field_by_field() -> None:
    amounts_of_one: dict[str, Any] = {f.name: timedelta(1) if f.name == "billed" else 1 for f in fields(CostSums)}
    one = CostSums(**amounts_of_one)
    assert one + CostSums() == one
    assert (one + one).amount == 2


async def answer(folder: Path, jobs: int, by: CostGrouping) -> tuple[Any, int]:
    """The answer for a state of so many jobs, and how many statements it took."""
    store = Store.open(folder / f"{jobs}-{by}.sqlite")
    rows: list[Any] = []
    booked: list[Charge] = []
    for n in range(jobs):
        name = f"j{n:05d}"
        rows.append(v.job(name, JobState.RUNNING, name=f"train-{n}", attempts_made=2))
        rows.append(machine(name, 1, provider=v.VAST, host=f"h{n % 7}", gpu="H100"))
        rows.append(machine(name, 2, provider=AWS, host=None, gpu="A100", runs=True))
        booked += [v.charge(name, 1, amount=10, on_demand=30), v.charge(name, 2, amount=7, provider=AWS)]
    store.tx(lambda tx: tx.commit(v.plan(*rows)))
    store.tx(lambda tx: tx.commit(Plan(charges=tuple(booked))))
    rig = Rig(folder / f"{jobs}-{by}", store=store)
    for name in (v.VAST, AWS):
        rig.pollers[name] = rig.pollers[rig.shop.name]
    await rig.control_loop.adopt()
    asked: list[str] = []
    event.listen(store._reader, "before_cursor_execute", lambda *args: asked.append(args[2]))
    found = await rig.handlers().ledger.groups(by)
    store.close()
    return found, len([one for one in asked if one.startswith("SELECT")])


@pytest.mark.parametrize("by", CostGrouping)
async def test_an_answer_takes_two_statements_however_many_jobs_there_are(tmp_path: Path, by: CostGrouping) -> None:
    few, asked_few = await answer(tmp_path, 1, by)
    many, asked_many = await answer(tmp_path, 40, by)
    assert (asked_few, asked_many) == (2, 2)
    groups = [micro(group) for group in many["groups"]]
    assert {part: sum(group[part] for group in groups) for part in PARTS} == micro(many["total"])
    assert micro(many["total"])["booked"] == 40 * micro(few["total"])["booked"]
    expected = {"job": 40, "day": 1, "provider": 2, "gpu": 2, "host": 8}
    assert len(many["groups"]) == expected[by.value]
    if by is CostGrouping.JOB:
        assert {group["name"] for group in many["groups"]} == {f"train-{n}" for n in range(40)}
        assert {group["machines"] for group in many["groups"]} == {2}


async def test_very_many_groups_end_with_one_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = await answer(tmp_path, 1, CostGrouping.JOB)
    monkeypatch.setattr(receipts, "GROUPS_MAX", 5)
    some, _ = await answer(tmp_path, 12, CostGrouping.JOB)
    assert (len(some["groups"]), some["groups"][-1]["key"]) == (5, "(others)")
    assert micro(some["total"])["booked"] == 12 * micro(one["total"])["booked"]
    assert sum(micro(group)["spent"] for group in some["groups"]) == micro(some["total"])["spent"]


async def test_groups_are_added_up_where_they_are_read_and_not_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = [False]
    added: list[bool] = []
    read, in_order = Store.read, receipts._in_order

    def noted_read(*args: Any) -> Any:
        reading[0] = True
        try:
            return read(*args)
        finally:
            reading[0] = False

    def noted(*args: Any) -> Any:
        added.append(reading[0])
        return in_order(*args)

    monkeypatch.setattr(Store, "read", noted_read)
    monkeypatch.setattr(receipts, "_in_order", noted)
    await answer(tmp_path, 1, CostGrouping.JOB)
    assert added == [True]


def failures(store: Store, now: datetime) -> None:
    """Three jobs that ended: one succeeded and saved $0.02, two failed, the machine of one of them still bills."""
    states = {"bad": JobState.FAILED, "ends": JobState.FAILED, "good": JobState.SUCCEEDED}
    booked = [
        v.charge("good", amount=10_000, on_demand=30_000),
        v.charge("bad", amount=5_000, on_demand=900_000),
        replace(v.charge("bad", amount=-1_000, on_demand=0), end=v.NOW, part=ChargePart.CREDIT),
        v.charge("bad", at=v.NOW + timedelta(days=1), amount=2_000, on_demand=None),
    ]
    task = ArrayTask(id=JobId("all"), name="all", index=0, count=9)
    for name, state in states.items():
        own = [c for c in booked if c.attempt.job == name]
        sums = {
            "spent": MicroUsd(sum(c.amount for c in own)),
            "on_demand": MicroUsd(sum(c.amount if c.on_demand is None else c.on_demand for c in own)),
        }
        job = v.job(name, state, name=name, attempts_made=1, array=replace(task, index=len(name)), **sums)
        job = replace(job, totals=replace(job.totals, uncompared=MicroUsd(2_000 if name == "bad" else 0)))
        runs = machine(name, 1, provider=v.VAST, host="h", gpu="H100", runs=True)
        ended = machine(name, 1, provider=v.VAST, host="h", gpu="H100")
        ended = replace(ended, meter=Meter(settled=sums["spent"]), on_demand_settled=sums["on_demand"])
        runs = replace(runs, meter=replace(runs.meter, since=now - timedelta(minutes=10)))
        item = replace(runs, state=AttemptState.ENDING) if name == "ends" else ended
        store.tx(lambda tx, rows=(job, item): tx.commit(v.plan(*rows)))  # type: ignore[misc]  # a lambda's default
    store.tx(lambda tx: tx.commit(Plan(charges=tuple(booked))))


async def test_a_job_that_failed_saves_nothing_in_any_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "state.sqlite")
    rig = Rig(tmp_path, store=store)
    failures(store, rig.clock.now())
    rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
    await rig.control_loop.adopt()
    handlers = rig.handlers()
    lines = {job["name"]: job for job in (await handlers.jobs.page(JobQuery()))["jobs"]}
    whole = await handlers.receipts.cost(None)
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", 1)
    cut = await handlers.receipts.cost(None)
    assert {r["name"] for r in whole["receipts"]} == {"good", "bad", "ends"}
    sums: dict[str, Mapping[str, Any]] = {
        "total": whole,
        "total of many": cut,
        "array": await handlers.receipts.cost("all"),
        **{by.value: (await handlers.ledger.groups(by))["total"] for by in CostGrouping},
        "cut": (await handlers.jobs.page(JobQuery(limit=2)))["arrays"][0],
    }
    spent = sum(job["spent_usd"] for job in lines.values())
    assert spent > 0.1, "a meter runs"
    for name, found in sums.items():
        assert round(found["saved_usd"], 6) == 0.02, name
        assert found["on_demand_usd"] - found["spent_usd"] == pytest.approx(0.02), name
        assert found["spent_usd"] == pytest.approx(spent), name
        assert found["uncompared_usd"] == pytest.approx(spent - 0.01), name
    for row in (*lines.values(), *whole["receipts"]):
        assert round(row["saved_usd"], 6) == (0.02 if row["name"] == "good" else 0), row["name"]
        assert round(row["uncompared_usd"], 6) == (0 if row["name"] == "good" else round(row["spent_usd"], 6))
    by_provider = store.read(lambda reads: reads.costs_of_providers())
    assert sum(one.on_demand - one.amount for one in by_provider.values()) == 20_000
    store.close()


def test_what_nothing_is_added_up_by_is_refused() -> None:
    request = Request({"type": "http", "query_string": b"by=colour"})
    with pytest.raises(Invalid, match="colour"):
        read_query(request, CostQuery)


async def calibrated(folder: Path, machines: int) -> tuple[Any, list[str]]:
    """What the bills of so many machines say, which were booked at x1.20 and billed at x1.10, and the statements."""
    store = Store.open(folder / f"{machines}.sqlite")
    rows: list[Any] = []
    booked: list[Charge] = []
    for n in range(machines):
        name, bare = f"j{n:05d}", 1_000_000 + 1_000 * n
        rows.append(v.job(name, JobState.SUCCEEDED, attempts_made=1))
        bill = MicroUsd(bare * 11 // 10 + 500)
        rows.append(
            replace(machine(name, 1, provider=SHOP, host="h", gpu="H100"), bill=ReadBill(believed=bill, tries=-1))
        )
        booked.append(replace(v.charge(name, provider=SHOP, amount=bare * 12 // 10), fee=MicroUsd(bare * 2 // 10)))
        moved = replace(
            v.charge(name, provider=SHOP, at=v.NOW + timedelta(hours=1), amount=500), part=ChargePart.TRAFFIC
        )
        booked.append(replace(moved, end=moved.start))
    store.tx(lambda tx: tx.commit(v.plan(*rows)))
    store.tx(lambda tx: tx.commit(Plan(charges=tuple(booked))))
    rig = Rig(folder / f"{machines}", store=store)
    await rig.control_loop.adopt()
    asked: list[str] = []
    event.listen(store._reader, "before_cursor_execute", lambda *args: asked.append(args[2]))
    found = {row["provider"]: row for row in await rig.handlers().ledger.calibrations()}
    store.close()
    return found, [one for one in asked if one.startswith("SELECT")]


async def test_the_fee_is_measured_from_the_bills_of_machines(tmp_path: Path) -> None:
    few, asked = await calibrated(tmp_path, 3)
    many, asked_many = await calibrated(tmp_path, 30)
    assert len(asked) == len(asked_many) == 1
    assert few[SHOP]["sentence"].startswith("too little to say: 3 machines with a bill")
    assert (few[SHOP]["measured"], few[SHOP]["suggested"]) == (None, None)
    row = many[SHOP]
    assert (row["machines"], row["measured"], row["suggested"]) == (30, pytest.approx(1.1), pytest.approx(1.1))
    assert row["booked_usd"] / row["billed_usd"] == pytest.approx(1.2 / 1.1, rel=1e-3)

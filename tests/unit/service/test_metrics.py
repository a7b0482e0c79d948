"""The figures for Prometheus: what they say, that their labels are bounded, and that nothing loads them unasked."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spotd.core.domain.intents import AttemptId, CostSums
from spotd.core.domain.market import gang_of
from spotd.core.domain.states import EndReason
from spotd.service.metrics import JOBS_MAX, MetricsReader, Reading, text_of, text_while_waiting
from spotd_providers.contract.values import InstanceState, Loss, MicroUsd
from tests.unit.api import worlds
from tests.unit.core.builders import SHOP, offer
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def reader_of(rig: Rig) -> MetricsReader:
    return MetricsReader(rig.context(), [rig.control_loop.controller, rig.grant_writer.controller])


def series_of(reading: Reading) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text_of(reading).decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def named(series: Series, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {labels: value for (found, labels), value in series.items() if found == name}


async def test_a_running_job_shows_its_price_its_cost_and_the_use_of_its_gpus(rig: Rig) -> None:
    async with rig.ready():
        job_id = await rig.submit()
        host = await rig.until_running(job_id, 1)
        gpu = {"index": 0, "name": 'evil"} 1 {', "util_pct": 50.0, "mem_used_mb": 30.0, "mem_total_mb": 40.0}
        second = {**gpu, "index": 1, "power_w": 1.0, "temp_c": None}
        host.beat("run", gpus=[{**gpu, "power_w": None, "temp_c": 40.0}, second])
        await rig.until(lambda: bool(getattr(rig.host_monitor.heartbeat(host.attempt), "gpus", None)))
        await rig.clock.sleep(timedelta(minutes=4))
        series = series_of(await reader_of(rig).read())
        own = (("job", job_id), ("name", rig.job(job_id).name))
        assert series["spotd_job_gpu_use_ratio", own] == 0.5
        assert series["spotd_job_gpu_memory_ratio", own] == 0.75
        assert series["spotd_job_checkpoint_age_seconds", own] == pytest.approx(240, abs=60)
        assert series["spotd_jobs", (("state", "RUNNING"),)] == 1
        shop = (("provider", SHOP),)
        assert series["spotd_machines", shop] == 1
        assert series["spotd_provider_up", shop] == 1
        assert series["spotd_provider_poll_age_seconds", shop] <= 60
        assert series["spotd_spend_rate_usd", shop] > 0
        assert series["spotd_spent_usd", shop] == pytest.approx(series["spotd_spend_rate_usd", shop] / 15, rel=0.1)
        assert series["spotd_spent_usd", shop] == series["spotd_budget_spent_usd", (("period", "day"),)]
        assert series["spotd_booked_usd_total", shop] == 0
        price = named(series, "spotd_effective_price_usd")
        assert price[("gpu", "RTX_4090"), ("market", "spot"), ("provider", SHOP)] > 0
        runs = series["spotd_controller_run_seconds_count", (("controller", "control-loop"),)]
        assert runs == rig.control_loop.controller.metrics.runs > 0
        assert "evil" not in text_of(await reader_of(rig).read()).decode()


async def test_several_machines_of_one_job_are_counted_one_by_one(tmp_path: Path) -> None:
    rig, plan = worlds.still_rig(tmp_path), worlds.running()
    attempts = {
        known: replace(item, quote=replace(item.quote, offer=gang_of(item.quote.offer, 4)))
        for known, item in plan.attempts.items()
    }
    rig.store.tx(lambda tx: tx.commit(replace(plan, attempts=attempts)))
    await rig.control_loop.adopt()
    series = series_of(await reader_of(rig).read())
    assert series["spotd_machines", (("provider", worlds.LOCAL),)] == 4
    assert (await rig.handlers().health.status())["machines"] == 4


async def test_a_daemon_that_waits_shows_that_it_runs_and_does_not_lead(rig: Rig) -> None:
    waiting = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text_while_waiting("1").decode())
        for sample in family.samples
    }
    assert (waiting["spotd_leads"], waiting["spotd_info"]) == (0, 1)
    assert "spotd_jobs" not in waiting
    async with rig.ready():
        assert series_of(await reader_of(rig).read())["spotd_leads", ()] == 1


async def test_what_states_money_and_losses_survives_a_restart(rig: Rig) -> None:
    async with rig.ready():
        job_id = await rig.submit()
        await rig.until_running(job_id, 1)
        await rig.clock.sleep(timedelta(minutes=2))
        reader = reader_of(rig)
        assert series_of(await reader.read())["spotd_preemptions_total", (("provider", SHOP),)] == 0
        rig.shop.set_state(rig.attempts(job_id)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: rig.job(job_id).recoveries == 1)
        await rig.until(lambda: rig.attempts(job_id)[0].state.value == "ended")
        before = series_of(await reader.read())
    again = rig.reborn()
    async with again.ready():
        after = series_of(await reader_of(again).read())
    shop = (("provider", SHOP),)
    assert before["spotd_booked_usd_total", shop] > 0
    assert before["spotd_preemptions_total", shop] == 1
    assert before["spotd_attempts_ended_total", (("provider", SHOP), ("reason", "preempted"))] == 1
    for name in ("spotd_booked_usd_total", "spotd_preemptions_total"):
        assert after[name, shop] >= before[name, shop]
    assert after["spotd_saved_usd", shop] == pytest.approx(before["spotd_saved_usd", shop], rel=0.2)


async def test_what_is_taken_back_lowers_what_was_spent_and_never_the_counter(rig: Rig) -> None:
    async with rig.ready():
        reading = await reader_of(rig).read()

    def with_sums(amount: int, *, free: int = 0, corrected: int = 0) -> Series:
        sums = CostSums(amount=MicroUsd(amount), free=MicroUsd(free), corrected=MicroUsd(corrected))
        return series_of(replace(reading, sums=replace(reading.sums, costs={SHOP: sums})))

    shop = (("provider", SHOP),)
    first, credited = with_sums(3_000_000), with_sums(2_000_000, free=1_000_000)
    corrected = with_sums(1_500_000, free=1_000_000, corrected=-500_000)
    assert [s["spotd_spent_usd", shop] for s in (first, credited, corrected)] == [3, 2, 1.5]
    assert [s["spotd_booked_usd_total", shop] for s in (first, credited, corrected)] == [3, 3, 3]


async def test_labels_are_bounded_whatever_is_sold_and_however_many_jobs_run(rig: Rig) -> None:
    rig.shop.offer_index = [offer("o1"), offer("o0"), *(offer(f"o{n}", gpu=f"HOST_{n}") for n in range(2, 50))]
    async with rig.ready():
        await rig.until_running(await rig.submit(), 1)
        state = rig.control_loop.state
        assert state is not None
        (one,) = state.world.attempts.values()
        ids = [AttemptId(job=one.id.job, number=number) for number in range(1, JOBS_MAX + 51)]
        rows = {i: replace(one, id=i) for i in ids}
        jobs = {one.id.job: replace(state.world.jobs[one.id.job], name="x" * 500)}
        rig.control_loop.state = replace(state, world=replace(state.world, jobs=jobs, attempts=rows))
        reading = await reader_of(rig).read()
    gone = replace(reading, now=reading.now + timedelta(hours=2))
    assert named(series_of(gone), "spotd_effective_price_usd") == {}
    series = series_of(reading)
    assert {dict(labels)["gpu"] for labels in named(series, "spotd_effective_price_usd")} == {"RTX_4090", "other"}
    assert len(reading.running) == JOBS_MAX
    assert series["spotd_running_jobs_not_shown", ()] == 50
    assert max(len(value) for _, labels in series for _, value in labels) <= 64


async def test_no_figure_is_infinite_or_no_number(rig: Rig) -> None:
    async with rig.ready():
        reading = await reader_of(rig).read()
    odd = replace(reading.sums, ends={(SHOP, reason): 10**18 for reason in EndReason})
    values = series_of(replace(reading, sums=odd, world=None, decided_at=None)).values()
    assert all(math.isfinite(value) for value in values)


@pytest.mark.system
async def test_promtool_has_nothing_to_say_about_the_names(rig: Rig) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    async with rig.ready():
        await rig.until_running(await rig.submit(), 1)
        text = text_of(await reader_of(rig).read())
    done = await anyio.run_process(["promtool", "check", "metrics"], input=text, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")

"""What a machine does before its job's command runs, as `ls`, `why` and the API show it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spotd.api.handlers.render import DETAIL_CHARS_MAX
from spotd.api.requests import JobQuery, utc_text
from spotd.api.schemas.jobs import StageResponse
from spotd.words import stage_text, stage_word
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
MB = 1_000_000


async def _stage(rig: Rig, name: str) -> StageResponse | None:
    jobs = rig.handlers().jobs
    listed = (await jobs.page(JobQuery()))["jobs"][0]["stage"]
    assert (await jobs.why(name))["stage"] == listed
    return listed


async def test_each_stage_of_a_machine_is_named_with_its_time_and_bytes(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        await rig.until(lambda: any(item.launched_at for item in rig.attempts(name)))
        key = rig.attempts(name)[-1].key
        machine = rig.shop.machine_of(key)
        rig.shop.machines[machine.ref.instance_id] = replace(machine, detail="pulling layer 3 of 12 " + "x" * 1000)
        await rig.clock.sleep(timedelta(minutes=2))
        image = await _stage(rig, name)
        assert image is not None
        assert stage_word(image, utc_text(rig.clock.now())) == "image 2m"
        assert "says: pulling layer 3 of 12" in image["text"]
        assert len(image["text"]) < DETAIL_CHARS_MAX + 120
        host = rig.host(name, 1)
        seen: list[tuple[str, int | None, int | None]] = []
        stage: StageResponse | None = None
        for phase, restore in (
            ("canary", None),
            ("code", None),
            ("setup", {"name": "c1", "bytes_done": 20 * MB, "bytes_total": 100 * MB}),
            ("restore", {"name": "c1", "bytes_done": 80 * MB, "bytes_total": 100 * MB}),
        ):
            host.beat(phase, restore=restore)
            await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
            stage = await _stage(rig, name)
            assert stage is not None
            assert stage["since"] is not None
            seen.append((stage["name"], stage["bytes_done"], stage["bytes_total"]))
        assert seen == [
            ("canary", None, None),
            ("fetch", None, None),
            ("set-up", 20 * MB, 100 * MB),
            ("restore", 80 * MB, 100 * MB),
        ]
        await rig.clock.sleep(timedelta(seconds=90))
        now = utc_text(rig.clock.now())
        assert stage is not None
        assert stage_word(stage, now) == "restore 80% 1m"
        assert stage_text(stage, now).startswith("restores the checkpoint, 80.0 MB of 100 MB (80 %), for 1 min 3")
        host.beat("run")
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        assert await _stage(rig, name) is None

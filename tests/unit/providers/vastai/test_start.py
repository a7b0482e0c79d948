"""The real start script and runner in vast.ai's containers: any Python, no curl, no wget, started again at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_jobs.start import start_script
from spotd_jobs.wire.grant import EndMethod, SelfTerminate
from spotd_providers.local.hosts import Machines
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.vastai.offers import SCRIPT_CHARS_MAX
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import Phase
from tests.integration.runner.images import image_with, pythons
from tests.integration.runner.rig import Rig
from tests.unit.providers.local.waiting import until
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import cheapest, play

pytestmark = pytest.mark.e2e
SAY = ["/bin/sh", "-c", "echo ran; command -v curl wget; exit 0"]


def fit(h: VastHarness, rig: Rig, python: str, run: list[str] = SAY) -> str:
    """The start script of an attempt whose machines have this Python, neither curl nor wget, and end themselves."""
    path = image_with(h.folder / "image", python)
    h.cloud.machines = Machines(h.folder / "machines", clock=h.fake_clock, path=path)
    grant = rig.grant(run)
    rig.renew(grant, self_terminate=SelfTerminate(method=EndMethod.VAST, base_url=h.base_url))
    return start_script(grant.grant_url, limit_bytes=SCRIPT_CHARS_MAX)


def said(rig: Rig) -> str:
    """Everything that the job printed, on whatever boot."""
    keys = [key for key in rig.store.keys("") if "/log/" in key]
    return b"".join(rig.store.get(key) or b"" for key in keys).decode()


@pytest.mark.parametrize("python", pythons("3.8"))
def test_a_job_runs_once_and_the_machine_ends_itself_under_this_python(python: str, tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, python)
            launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
            await h.settle()
            h.cloud.advance()
            contract = h.cloud.contracts[int(launched.instance.ref.instance_id)]
            until(lambda: contract.phase is Phase.GONE, what="the machine's own end")
            until(lambda: not h.cloud.machines.alive(contract.machine), what="the end of its processes")
            assert said(rig) == "ran\n"
            assert await provider.find(launched.instance.key) == ()

    play(tmp_path, story)


def test_a_machine_that_wakes_up_after_its_job_is_done_runs_nothing_and_ends_itself(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, "3.8")
            offer = await cheapest(h, provider)
            launched = await provider.launch(h.request(offer, start_script=script))
            await h.settle()
            h.faults.answer(Call.TERMINATE, Canned(status=503), times=1000)
            h.cloud.advance()
            contract = h.cloud.contracts[int(launched.instance.ref.instance_id)]
            until(lambda: h.requests(Call.TERMINATE), what="an end that vast.ai does not accept")
            h.cloud.outbid(contract.contract_id)
            assert not h.cloud.machines.alive(contract.machine)
            h.faults.clear()
            h.cloud.set_min_bid(int(offer.extra["ask"]), 0.001)
            await h.settle()
            h.cloud.advance()
            until(lambda: contract.phase is Phase.GONE, what="the machine's own end")
            assert h.cloud.machines.status(contract.machine).boots == 2
            assert said(rig) == "ran\n"

    play(tmp_path, story)


def test_a_machine_that_is_stopped_in_the_middle_has_one_job_process_after_it_woke_up(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        with Rig(tmp_path / "rig") as rig:
            script = fit(h, rig, "3.13", ["/bin/sh", "-c", "echo ran; sleep 600"])
            offer = await cheapest(h, provider)
            launched = await provider.launch(h.request(offer, start_script=script))
            await h.settle()
            h.cloud.advance()
            contract = h.cloud.contracts[int(launched.instance.ref.instance_id)]
            until(lambda: said(rig) == "ran\n", what="the job's first words")
            h.cloud.outbid(contract.contract_id)
            h.cloud.set_min_bid(int(offer.extra["ask"]), 0.001)
            await h.settle()
            h.cloud.advance()
            until(lambda: said(rig) == "ran\nran\n", what="the job's second start")
            assert h.cloud.machines.status(contract.machine).boots == 2
            await provider.terminate(launched.instance.ref)
            assert not h.cloud.machines.alive(contract.machine)

    play(tmp_path, story)

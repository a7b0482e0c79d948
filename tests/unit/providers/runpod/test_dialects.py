"""Answers of RunPod in other words and shapes than its fake's: what the documents leave open must not matter."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.start import start_script
from spotd_providers.contract.errors import RateLimited
from spotd_providers.contract.values import InstanceState, Loss
from spotd_providers.kit.text import NO_PYTHON
from spotd_providers.runpod.offers import offers_of
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.runpod.wire import RunpodSettings, gpu_rows
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.serve import AsgiApp, Call, Canned, Receive, Scope, Send, serving
from tests.cases import every
from tests.fakes.runpod import Quirks
from tests.unit.providers.local.waiting import until
from tests.unit.providers.runpod.harness import RunpodHarness, open_harness
from tests.unit.providers.runpod.stories import cheapest, play

# The pod that the API description prints, field for field.
POD = {
    "id": "7h9k2m4n6p", "name": "spotd-lab-7f3a-1", "image": "runpod/pytorch:1.0.2-...", "args": "...", "disk": 50,
    "ports": ["22/tcp"], "env": {"SPOTD_JOB": "7f3a"}, "registry": None, "status": "RUNNING",
    "actions": ["stop", "restart", "terminate"],
    "mounts": {"network": [{"volumeId": "agv6w2qcg7", "path": "/workspace"}]},
    "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1}, "cloud": "SECURE", "dataCenterId": "US-KS-2",
    "cudaVersion": "12.8",
    "ssh": {"proxy": {"host": "ssh.runpod.io", "port": 22, "username": "7h9k2m4n6p-64411eb2", "command": "ssh ..."},
            "direct": {"host": "195.26.233.3", "port": 34446, "username": "root", "command": "ssh root@..."}},
    "template": None, "cost": 0.44, "locked": False, "globalNetworking": None,
    "runtime": {"uptime": 3600, "gpus": [{"util": 94, "memoryUtil": 78}], "cpu": {"util": 45}, "memory": {"util": 62},
                "ports": [{"private": 22, "public": 34446, "type": "tcp", "ip": "195.26.233.3"}]},
    "createdAt": "2026-03-13T20:00:00Z", "startedAt": "2026-03-13T20:00:05Z",
}  # fmt: skip
GPU = {
    "id": "NVIDIA GeForce RTX 4090", "name": "RTX 4090", "manufacturer": "NVIDIA", "memory": 24, "pool": None,
    "secure": True, "community": True, "price": {"secure": 0.69, "community": 0.34, "serverless": None},
    "maxCount": {"secure": 8, "community": 8}, "availability": "HIGH",
    "dataCenters": [{"id": "EU-RO-1", "name": "EU-RO-1", "availability": "LOW"}],
    "cudaVersions": [{"version": "12.8", "available": True}],
}  # fmt: skip
NOWHERE = re.sub(r"(?m)^for p in [^;]*;", "for p in no-such-python;", start_script("file:///grant.json"))
"""The real start script, that finds no Python in any of the places it looks."""


def page(**fields: Any) -> Canned:
    """One page of the listing."""
    return Canned(status=200, body=json.dumps(fields).encode())


@every("told", ["HIGH", "High", "low"])
@every("left_out", ["", "dataCenters cudaVersions pool maxCount secure community manufacturer name"])
def test_the_documented_gpu_is_priced_with_all_its_fields_and_with_the_fewest(told: str, left_out: str) -> None:
    row = {name: value for name, value in GPU.items() if name not in left_out.split()} | {"availability": told}
    understood = gpu_rows({"gpus": [row]})
    for cloud, price in (("SECURE", 690_000), ("COMMUNITY", 340_000)):
        (offer,), rejected = offers_of(understood.rows, cloud, 2, RunpodSettings())
        assert not rejected
        assert (offer.gpu, offer.gpu_count, offer.gpu_price) == ("RTX_4090", 2, 2 * price)


@pytest.mark.parametrize(
    "pagination",
    [
        pytest.param({}, id="unsaid"),
        pytest.param({"pagination": None}, id="null"),
        pytest.param({"pagination": {}}, id="empty"),
        pytest.param({"pagination": {"hasNextPage": None, "nextCursor": None}}, id="of nulls"),
        pytest.param({"pagination": {"hasNextPage": False, "nextCursor": ""}}, id="with an empty cursor"),
        pytest.param({"pagination": {"hasNextPage": False}}, id="without a cursor"),
    ],
)
def test_the_documented_pod_is_understood_whatever_is_said_of_pages(tmp_path: Path, pagination: dict[str, Any]) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.faults.answer(Call.LIST, page(pods=[POD], **pagination))
        listing = await provider.instances()
        assert listing.complete
        assert [(i.key, i.state, i.price) for i in listing.instances] == [
            ("spotd-lab-7f3a-1", InstanceState.RUNNING, 440_000)
        ]

    play(tmp_path, story)


def test_a_cursor_alone_says_that_there_is_more(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.faults.answer(Call.LIST, page(pods=[POD], pagination={"nextCursor": "two"}))
        h.faults.answer(Call.LIST, page(pods=[{**POD, "id": "other", "name": "spotd-lab-8a4b-1"}]))
        listing = await provider.instances()
        assert (listing.complete, len(listing.instances)) == (True, 2)
        first = "limit=1000&includeClusterPods=true"
        assert [request.query for request in h.requests(Call.LIST)] == [first, f"{first}&cursor=two", ""]

    play(tmp_path, story)


def below(prefix: str, app: AsgiApp) -> AsgiApp:
    """The app as a proxy serves it: below a folder."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(prefix + "/"), scope["path"]
        await app({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    return served


@pytest.mark.parametrize("end", ["", "/", "/v2", "/v2/"])
def test_the_api_may_live_below_a_path(tmp_path: Path, end: str) -> None:
    with open_harness(tmp_path) as h, serving(below("/behind/a/proxy", h.faults)) as proxy:

        async def main() -> None:
            h.base_url = proxy.url + "/behind/a/proxy" + end
            async with h.opened() as provider:
                assert isinstance(provider, RunpodProvider)
                launched = await provider.launch(h.request(await cheapest(h, provider)))
                assert (await provider.instances()).complete
                await provider.terminate(launched.instance.ref)
                assert not h.live(launched.instance.key)

        run_virtually(main)


def test_a_429_without_any_advice_is_waited_out(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, Canned(status=429, body=b"slow down", headers={"content-type": "text/plain"}))
        with pytest.raises(RateLimited) as limited:
            await provider.launch(h.request(offer))
        assert timedelta(seconds=10) < limited.value.retry_after < timedelta(seconds=20)

    play(tmp_path, story)


@pytest.mark.parametrize("restarts", [True, False], ids=["started again for ever", "left exited"])
def test_an_image_without_python_is_named_as_such(tmp_path: Path, restarts: bool) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider), start_script=NOWHERE))
        key, pod = launched.instance.key, launched.instance.ref.instance_id

        def has_spoken() -> bool:
            h.fake_clock.advance(timedelta(seconds=20))
            h.cloud.advance()
            return NO_PYTHON in h.cloud.machines.console(pod, lines=50)

        until(has_spoken, what="the script's complaint")
        until(lambda: not h.cloud.machines.alive(pod), what="the end of the script")
        await h.settle()
        for _ in range(2):
            (seen,) = await provider.find(key)
            assert (seen.state, seen.loss, seen.detail) == (InstanceState.PAUSED, Loss.IMAGE_ERROR, NO_PYTHON)
        assert len([request for request in h.requests() if request.path.endswith("/logs")]) == 1

    play(tmp_path, story, Quirks(requests_a_minute=5000, restarts=restarts))


def test_a_pod_that_speaks_of_other_things_is_looked_at_once_and_left_alone(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        script = f"echo '{NO_PYTHON}'; echo it goes on; sleep 600"
        launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
        await h.settle()
        h.cloud.advance()
        await h.settle()
        until(lambda: len(h.cloud.machines.console(launched.instance.ref.instance_id, lines=9)) == 2)
        for _ in range(3):
            (seen,) = await provider.find(launched.instance.key)
            assert (seen.state, seen.loss) == (InstanceState.RUNNING, None)
        assert len([request for request in h.requests() if request.path.endswith("/logs")]) == 1

    play(tmp_path, story, Quirks(requests_a_minute=5000))

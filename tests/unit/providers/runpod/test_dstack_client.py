"""dstack's own RunPod client, which rents real pods, judges the fake: v2 with newer fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.official_clients import DSTACK, told_by
from tests.fakes.runpod import Phase
from tests.unit.providers.runpod.market import busy_market

NO_CAPACITY = "There are no longer any instances available"


@pytest.mark.e2e
@pytest.mark.slow  # dstack and what it needs are a quarter of a gigabyte, installed at the first run
@pytest.mark.timeout(900)
def test_dstack_rents_reaches_and_ends_pods(tmp_path: Path) -> None:
    with busy_market(tmp_path) as (cloud, url):
        story = Path(__file__).with_name("dstack_story.py")
        told = told_by(DSTACK, story, url, cloud.api_key, home=tmp_path / "home")
        pod = cloud.pods[told["made"]["id"]]
        said = cloud.machines.console(pod.pod_id, lines=9)
    assert (told["key"], told["bad key"]) == (True, False)
    assert told["volume"]["dataCenter"] == "EU-RO-1"
    assert (told["made"]["status"], told["one"]["status"]) == ("PROVISIONING", "RUNNING")
    assert told["one"]["cost"] == pytest.approx(2 * 0.74)
    assert told["reached"] == {"host": "203.0.113.5", "port": 30010}
    assert (pod.count, pod.cloud) == (2, "SECURE")
    assert said == [f"hello from {pod.pod_id} as dstack"]
    assert [row["name"] for row in told["credentials"]] == ["mine"]
    assert "in use" in told["credentials in use"]
    assert "400: Bad Request: Registry auth not found" in told["credentials again"]
    assert pod.phase is Phase.TERMINATED
    assert (told["again"], told["after"], told["volume gone"]) == (False, None, [True, False])
    for name in ("nowhere", "too large"):
        assert told[name].startswith(f"RunpodV2ClientError 400: Bad Request: {NO_CAPACITY}")
    assert not any(pod.exists for pod in cloud.pods.values())

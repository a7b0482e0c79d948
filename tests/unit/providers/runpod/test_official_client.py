"""The official `runpod` SDK judges the fake, as far as it still applies: it speaks GraphQL only, and knows no v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.official_clients import RUNPOD, told_by
from tests.fakes.runpod import Phase
from tests.unit.providers.runpod.market import busy_market

pytestmark = pytest.mark.e2e


def test_the_official_client_rents_lists_stops_and_ends_a_pod(tmp_path: Path) -> None:
    story = Path(__file__).with_name("sdk_story.py")
    with busy_market(tmp_path) as (cloud, url):
        told = told_by(RUNPOD, story, url, cloud.api_key, home=tmp_path / "home", RUNPOD_API_BASE_URL=url)
    assert told["user"]["id"] == "user_1"
    assert {gpu["id"] for gpu in told["gpus"]} == set(cloud.gpus)
    assert told["gpu"]["lowestPrice"]["uninterruptablePrice"] == pytest.approx(2 * told["gpu"]["communityPrice"])
    assert "No GPU found" in told["unknown gpu"]
    assert [row["name"] for row in told["registry"]] == ["mine", "mine"]
    pod = told["made"]["id"]
    assert [(row["id"], row["desiredStatus"], row["costPerHr"]) for row in told["listed"]] == [(pod, "RUNNING", 0.68)]
    assert (told["one"]["imageName"], told["one"]["env"]) == ("python:3.12", ["WHO=sdk"])
    assert (told["one"]["ports"], told["one"]["containerDiskInGb"]) == ("22/tcp,8888/http", 40)
    assert cloud.pods[pod].data_center == "EU-RO-1"
    assert (told["stopped"]["desiredStatus"], told["resumed"]["desiredStatus"]) == ("EXITED", "RUNNING")
    assert told["left"] == []
    assert told["after"] is None
    assert told["registry gone"] is None
    assert cloud.belongings.registries == {}
    assert told["again"] == "QueryError: pod not found to terminate"
    assert "no longer any instances available" in told["nothing"]
    assert "no longer any instances available" in told["no such place"]
    assert "Registry auth not found" in told["no such registry"]
    assert told["refused"].startswith("AuthenticationError: Unauthorized")
    assert cloud.pods[pod].phase is Phase.TERMINATED

"""The documented policy allows every call that is made, and none that is not."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.values import Power
from spotd_providers.testkit.behaviours.gangs import gang_of
from spotd_providers.testkit.serve import Faults
from tests.fakes.aws import Ec2Api
from tests.fakes.aws.catalog import ZONES
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play

ROOT = Path(__file__).parents[4]
BESIDE_THE_CALLS = {"ec2:CreateTags", "iam:CreateServiceLinkedRole"}
"""What RunInstances needs of others: tags given with the launch, and the account's role for its first spot machine."""
SERVICES = {"service-quotas": "servicequotas"}


def policy() -> Any:
    text = (ROOT / "docs" / "reference" / "providers.md").read_text()
    found = re.search(r"^## The least policy at AWS\n.*?^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


def actions() -> set[str]:
    named = [statement["Action"] for statement in policy()["Statement"]]
    return {action for one in named for action in ([one] if isinstance(one, str) else one)}


def operations_in_the_code() -> set[str]:
    """Every operation that the adapter's source names, as IAM spells it."""
    from botocore.session import Session

    session = Session()
    by_python_name = {}
    for service in ("ec2", "sts", "ssm", "service-quotas", "pricing"):
        for operation in session.get_service_model(service).operation_names:
            python = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower()
            by_python_name[python] = f"{SERVICES.get(service, service)}:{operation}"
    source = "\n".join(file.read_text() for file in (ROOT / "providers/spotd_providers/aws").glob("*.py"))
    words = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', source))
    return {by_python_name[word] for word in words if word in by_python_name}


def test_every_operation_the_code_names_is_in_the_policy_and_no_other() -> None:
    assert operations_in_the_code() == actions() - BESIDE_THE_CALLS


def test_a_whole_life_under_that_policy_is_allowed(tmp_path: Path) -> None:
    made: list[str] = []

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        asked = _api(h).asked
        h.cloud.quirks.allowed = lambda action: _iam(action) in actions()
        assert all(line.ok for line in await provider.check())
        offer = await cheapest(h, provider)
        assert provider.capabilities[Power.CAPACITY_SCORES].available
        launched = await provider.launch(h.request(offer))
        await provider.launch(h.request(gang_of(offer, 2)))
        await h.settle()
        assert await provider.find(launched.instance.key)
        old = h.clock.now() - timedelta(days=1)
        stray = {"spotd:install": "lab", "spotd:key": h.key()}
        h.cloud.volumes.add(ZONES[0], 8, stray, old, goes_along=False)
        assert (await provider.instances()).complete
        await provider.logs(launched.instance.ref, lines=5)
        await provider.terminate(launched.instance.ref)
        made.extend(asked)

    play(tmp_path, story)
    assert {_iam(action) for action in made} == actions() - BESIDE_THE_CALLS


def test_machines_may_be_launched_with_our_tag_only_and_ours_alone_ended() -> None:
    by_sid = {statement["Sid"]: statement for statement in policy()["Statement"]}
    made = by_sid["LaunchOnlyWithOurTag"]
    assert any(fnmatchcase("arn:aws:ec2:us-east-1:1:instance/*", resource) for resource in made["Resource"])
    assert made["Condition"] == {"StringLike": {"aws:RequestTag/spotd:install": "*"}}
    assert not any("instance/" in resource for resource in by_sid["LaunchFromThese"]["Resource"])
    placed = by_sid["PlaceSeveralNearEachOther"]
    assert placed["Condition"] == made["Condition"]
    ended = by_sid["EndAndReadOnlyOurs"]
    assert "ec2:TerminateInstances" in ended["Action"]
    assert "ec2:DeleteVolume" in ended["Action"]
    assert ended["Condition"] == {"StringLike": {"aws:ResourceTag/spotd:install": "*"}}


def _iam(action: str) -> str:
    service, _, name = action.partition(":")
    return f"{SERVICES.get(service, service)}:{name}"


def _api(h: AwsHarness) -> Ec2Api:
    faults = h.faults
    assert isinstance(faults, Faults)
    api = faults._app
    assert isinstance(api, Ec2Api)
    return api

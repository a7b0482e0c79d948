"""What the adapter sends is what Google's own client knows, and both see the same machines of one fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import Market
from spotd_providers.googlecloud.plugin import GoogleProvider
from spotd_providers.testkit.harness import CANARY
from spotd_providers.testkit.serve import Call
from tests.unit.providers.googlecloud.harness import GoogleHarness, play

compute = pytest.importorskip(
    "google.cloud.compute_v1", reason="google-cloud-compute is not installed (pip install google-cloud-compute)"
)


def _clients(h: GoogleHarness) -> tuple[Any, Any]:
    from google.cloud.compute_v1.services.instances import transports
    from google.oauth2.credentials import Credentials

    host = h.served.url.removeprefix("http://")
    login: Any = Credentials
    transport = transports.InstancesRestTransport(host=host, url_scheme="http", credentials=login(token=CANARY))
    return compute.InstancesClient(transport=transport), h.cloud.project


def test_every_field_that_is_sent_is_one_of_the_official_messages(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        page = await provider.offers(h.query())
        for market in Market:
            await provider.launch(h.request(next(one for one in page.offers if one.market is market)))
        await provider.price_history(h.clock.now(), after="")
        sent = [one for one in h.requests() if one.method == "POST" and one.body]
        messages = {
            "instances": compute.Instance,
            "capacity": compute.CapacityAdviceRequest,
            "capacityHistory": compute.CapacityHistoryRequest,
        }
        seen = set()
        for one in sent:
            kind = one.path.rpartition("/")[2]
            messages[kind].from_json(one.body, ignore_unknown_fields=False)
            seen.add(kind)
        assert seen == set(messages)

    play(tmp_path, story, max_run="3d")


def test_the_official_client_lists_and_ends_what_the_adapter_launched(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        page = await provider.offers(h.query())
        request = h.request(page.offers[0])
        launched = await provider.launch(request)
        await h.settle()
        client, project = _clients(h)
        wanted = compute.AggregatedListInstancesRequest(project=project, filter=f"labels.spotd-install={h.install}")
        listed = [one for _, scope in client.aggregated_list(request=wanted) for one in scope.instances]
        (own,) = listed
        assert (own.name, own.labels["spotd-key"]) == (launched.instance.ref.instance_id, request.key)
        assert own.scheduling.provisioning_model == "SPOT"
        theirs = h.requests(Call.LIST)[-1]
        assert theirs.path.endswith("/aggregated/instances")
        client.delete(project=project, zone=launched.instance.ref.scope, instance=own.name)
        await h.settle()
        assert not h.live(request.key)
        assert await provider.find(request.key) == ()

    play(tmp_path, story)

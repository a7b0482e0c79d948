"""Lambda Cloud does what every provider must do, against its own fake, and what is special of it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    InstanceState,
    Market,
    Offer,
    OfferQuery,
    ShellAddress,
)
from spotd_providers.kit.shapes import decode, row_or_none
from spotd_providers.kit.vm_market import label_in
from spotd_providers.lambdacloud.plugin import (
    LambdaInstanceRow,
    LambdaProvider,
    LambdaSettings,
    as_instance,
    offers_of,
    sales_of,
)
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.testkit.suite import Behaviour, run
from tests.fakes.lambdacloud import EDGE_ERROR, JUPYTER_TOKEN, Quirks, some_kinds
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.lambdacloud.harness import LambdaHarness, open_harness, play


@pytest.mark.parametrize("behaviour", stories())
def test_lambda_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _cheapest(h: LambdaHarness, provider: LambdaProvider) -> Offer:
    page = await provider.offers(h.query())
    return min((one for one in page.offers if one.gpu_count), key=lambda one: one.gpu_price)


# What a refusal of a launch means, by its code alone.

REFUSALS = {
    "instance-operations/launch/insufficient-capacity": NoCapacity,
    "instance-operations/launch/file-system-in-wrong-region": RequestRejected,
    "global/invalid-parameters": RequestRejected,
    "global/duplicate": RequestRejected,
    "global/invalid-address": RequestRejected,
    "global/quota-exceeded": QuotaExceeded,
    "global/invalid-api-key": AuthFailed,
    "global/account-inactive": AuthFailed,
    "global/forbidden": AuthFailed,
    "global/object-does-not-exist": RequestRejected,
    "global/not-found": RequestRejected,
    "global/conflict": OutcomeUnknown,
    "global/internal-error": OutcomeUnknown,
    "provider/out-of-hosts": OutcomeUnknown,
    "a-word-of-next-year": RequestRejected,
}


@pytest.mark.parametrize("status", [400, 403, 404, 409])
@pytest.mark.parametrize(("code", "leaf"), REFUSALS.items())
def test_the_code_of_a_refused_launch_decides_under_any_status(
    code: str, leaf: type[ProviderError], status: int, tmp_path: Path
) -> None:
    if code == "a-word-of-next-year":
        leaf = AuthFailed if status == 403 else leaf

    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.cloud.quirks.refusals[Call.LAUNCH] = code
        h.cloud.quirks.statuses[code] = status
        with pytest.raises(leaf):
            await provider.launch(request)
        assert not h.live()
        assert h.launch_calls() == 1

    play(tmp_path, story)


def test_an_edge_in_front_of_lambda_says_nothing_of_the_key(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.faults.answer(Call.LAUNCH, EDGE_ERROR)
        with pytest.raises(Unavailable):
            await provider.launch(request)
        h.faults.answer(Call.LIST, EDGE_ERROR, times=3)
        with pytest.raises(Unavailable):
            await provider.instances()

    play(tmp_path, story)


def test_requests_and_launches_keep_lambdas_limits(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        for _ in range(3):
            await provider.launch(h.request(await _cheapest(h, provider)))
            await provider.instances()
            assert (await provider.check())[0].ok
        assert 429 not in {request.status for request in h.requests()}
        assert len(h.live()) == 3

    play(tmp_path, story, Quirks(rate_limits=True))


@pytest.mark.parametrize("code", ["global/too-many-requests", None])
def test_a_launch_too_many_is_put_off(code: str | None, tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.faults.answer(Call.LAUNCH, Canned(status=429, body=b"<html/>" if code is None else b'{"error":{"code":"x"}}'))
        with pytest.raises(RateLimited) as refused:
            await provider.launch(request)
        assert timedelta(seconds=12) <= refused.value.retry_after < timedelta(seconds=13)

    play(tmp_path, story)


def test_the_ssh_key_that_a_launch_must_name_is_registered_once(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        for _ in range(2):
            await provider.launch(h.request(await _cheapest(h, provider)))
        assert [row["name"] for row in h.cloud.ssh_keys.values()] == ["spotd-lab"]
        h.cloud.ssh_keys.clear()  # a person deleted it: one launch fails, and the next registers it again
        with pytest.raises(RequestRejected):
            await provider.launch(h.request(await _cheapest(h, provider)))
        await provider.launch(h.request(await _cheapest(h, provider)))
        assert len(h.live()) == 3

    play(tmp_path, story)


def test_a_key_of_the_users_own_is_never_made_and_opens_a_shell(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        with pytest.raises(RequestRejected):
            await provider.launch(request)
        assert not h.cloud.ssh_keys
        assert [line.name for line in await provider.check() if not line.ok] == ["ssh key"]
        h.cloud.ssh_keys["7"] = {"id": "7", "name": "mine", "public_key": "ssh-ed25519 AAAA"}
        made = await provider.launch(request)
        with pytest.raises(Unavailable):
            await provider.shell(made.instance.ref)
        await h.settle()
        assert await provider.shell(made.instance.ref) == ShellAddress(host="203.0.113.7", port=22, user="ubuntu")
        assert all(line.ok for line in await provider.check())

    play(tmp_path, story, ssh_key="mine")


def test_a_renamed_machine_is_found_by_its_tag(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        made = await provider.launch(request)
        h.cloud.instances[made.instance.ref.instance_id].name = "my notebook"
        assert [one.ref for one in await provider.find(request.key)] == [made.instance.ref]

    play(tmp_path, story)


@pytest.mark.parametrize("conflicts", [False, True])
def test_an_end_is_repeated_until_lambda_shows_it(conflicts: bool, tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        h.cloud.quirks.terminate_again_conflicts = conflicts
        h.cloud.quirks.undead = 1
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        await provider.terminate(made.instance.ref)
        assert len(h.requests(Call.TERMINATE)) == 2
        await provider.terminate(made.instance.ref)  # it is ending already
        assert not h.live()
        h.cloud.quirks.undead = 9
        other = await provider.launch(h.request(await _cheapest(h, provider)))
        with pytest.raises(Unavailable):
            await provider.terminate(other.instance.ref)

    play(tmp_path, story)


def test_a_price_that_rises_at_the_moment_of_the_launch_is_not_paid(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        offer = await _cheapest(h, provider)
        h.cloud.quirks.price_at_next_launch[offer.extra["type"]] = 76
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert not h.live()
        await h.settle()
        assert h.cloud.spent_usd() == 0.0

    play(tmp_path, story)


def test_types_are_offered_where_there_are_some_and_rejected_with_the_reason(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        page = await provider.offers(h.query())
        found = {str(one.offer_id): (one.gpu, one.gpu_count, one.gpu_price) for one in page.offers}
        assert found["gpu_8x_h100_sxm5:us-west-1"] == ("H100_SXM", 8, 35_920_000)
        assert found["cpu_4x_general:us-east-1"] == ("CPU", 0, 80_000)
        assert {one.offer_id: one.reason for one in page.rejected} == {
            "gpu_1x_gh200": "an ARM machine (providers.lambda.arm)",
            "gpu_8x_a100_80gb_sxm4": "sold out everywhere now",
        }
        assert (await provider.offers(OfferQuery(markets=(Market.SPOT,)))).offers == ()

    play(tmp_path, story)


def test_only_the_named_regions_are_offered_and_arm_where_it_is_wanted(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        page = await provider.offers(h.query())
        assert {one.region for one in page.offers} == {"us-east-1"}
        assert "GH200" in {one.gpu for one in page.offers}
        assert "sold out in your regions now (providers.lambda.regions)" in {one.reason for one in page.rejected}

    play(tmp_path, story, regions=("us-east-1",), arm=True)


def test_what_a_machine_shows_of_jupyter_is_not_kept(tmp_path: Path) -> None:
    async def story(h: LambdaHarness, provider: LambdaProvider) -> None:
        await provider.launch(h.request(await _cheapest(h, provider)))
        await h.settle()
        assert JUPYTER_TOKEN not in repr(await provider.instances())

    play(tmp_path, story)


# Damaged payloads: no crash, no price that is not in the row, no machine lost.

ROWS: dict[str, Any] = {
    kind.name: {"instance_type": kind.row(), "regions_with_capacity_available": [{"name": "us-west-1"}]}
    for kind in some_kinds()
}
MACHINE = {
    "id": "0920582c7ff041399e34823a0be62549", "name": "spotd-lab-j0b-1", "status": "active", "ip": "203.0.113.7",
    "tags": [{"key": "spotd-key", "value": "spotd-lab-j0b-1"}],
    "instance_type": some_kinds()[0].row(), "region": {"name": "us-west-1"}, "jupyter_token": "t",
}  # fmt: skip


def judge_types(data: Any) -> None:
    read = decode(json.dumps({"data": data}).encode(), who="Lambda")["data"]
    rows = sales_of(read)
    assert len(rows.rows) + len(rows.rejected) == len(read)
    offers, _ = offers_of(rows.rows, LambdaSettings(arm=True))
    stated = [
        (row["instance_type"]["name"], row["instance_type"].get("price_cents_per_hour"))
        for row in read.values()
        if isinstance(row, dict) and isinstance(row.get("instance_type"), dict) and "name" in row["instance_type"]
    ]
    for offer in offers:
        assert type(offer.gpu_price) is int
        assert offer.gpu_price > 0
        assert any(
            name == offer.extra["type"] and type(cents) is int and offer.gpu_price == cents * 10_000
            for name, cents in stated
        )
    # As texts, since -0.0 and True are equal to 0 and 1.
    whole = {name for name, row in ROWS.items() if json.dumps(read.get(name)) == json.dumps(row)}
    names = [row["instance_type"]["name"] for row in ROWS.values()]
    twins = {name for name in names if sum(name in json.dumps(row) for row in read.values()) > 1}
    assert whole - twins <= {offer.extra["type"] for offer in offers}


def judge_machine(raw: Any) -> None:
    read = decode(json.dumps(raw).encode(), who="Lambda")
    label = label_in(read, InstallId("lab"), names=LambdaProvider.label_fields, tag=LambdaProvider.label_tag)
    row = row_or_none(LambdaInstanceRow, read)
    if isinstance(read.get("id"), str) and read["id"] == MACHINE["id"]:
        assert row is not None
        instance = as_instance(row, AttemptKey("spotd-lab-j0b-1"))
        assert instance.price is None or (type(instance.price) is int and 0 <= instance.price < 10**10)
        assert instance.state is not InstanceState.GONE or read["status"].strip().lower() == "terminated"
        if read.get("name") == MACHINE["name"]:
            assert label == MACHINE["name"]
    if "name" in read and read["name"] is not None and not isinstance(read["name"], str):
        assert label is None


def judge(data: Any, raw: Any) -> None:
    judge_types(data)
    judge_machine(raw)


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, ROWS, MACHINE, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, ROWS, MACHINE, count=ALL)

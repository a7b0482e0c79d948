"""Answers of EC2 that no documentation knows: each costs its row or its reading; none proves that a machine is gone."""

from __future__ import annotations

import gzip
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.errors import OutcomeUnknown, ProviderError
from spotd_providers.testkit.serve import Call, Canned
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play
from tests.unit.providers.odd_answers import absence_proofs, end_after, readings

XML = {"content-type": "text/xml;charset=UTF-8"}
ROWS = '<DescribeInstancesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">%s</DescribeInstancesResponse>'
ODD_BODIES = {
    "an-html-page": b"<html><body><h1>Just a moment...</h1></body></html>",
    "nothing": b"",
    "json": b'{"Reservations": null}',
    "cut-off": b"<DescribeInstancesResponse><reservationSet><item><instan",
    "rows-of-nothing": (
        ROWS % "<reservationSet><item/><item><instancesSet><item/></instancesSet></item></reservationSet>"
    ).encode(),
    "the-same-page-again": (ROWS % "<reservationSet/><nextToken>one</nextToken>").encode(),
    "entities": b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>',
    "not-utf-8": b"<x>\xff\xfe</x>",
    "packed-and-not-said": gzip.compress(b"<x/>"),
}  # fmt: skip


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
def test_a_body_that_is_no_answer_costs_its_reading_and_nothing_else(body: bytes, tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        found = await readings(h, provider, Canned(status=200, body=body, headers=XML))
        assert not absence_proofs(found), "it proves that something is gone"
        listing = await provider.instances()
        assert listing.complete
        assert [machine.ref for machine in listing.instances] == [made.instance.ref]

    play(tmp_path, story)


@pytest.mark.parametrize("body", [ODD_BODIES["an-html-page"], b"", ODD_BODIES["cut-off"], (ROWS % "").encode()])
def test_an_odd_answer_to_a_launch_is_an_unknown_outcome(body: bytes, tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, Canned(status=200, body=body, headers=XML), times=5)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


def test_an_end_that_was_throttled_is_sent_at_the_next_call(tmp_path: Path) -> None:
    busy = b"<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>x</Message></Error></Errors></Response>"

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        made = await provider.launch(h.request(await cheapest(h, provider)))
        throttle = Canned(status=503, body=busy, headers={**XML, "retry-after": "86400"})
        assert await end_after(h, provider, made.instance.ref, throttle, ProviderError) <= timedelta(seconds=30)
        assert not [machine for machine in h.machines() if machine.running]

    play(tmp_path, story)


def test_calls_are_counted(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.instances()
        assert provider.requests_sent >= len([r for r in h.requests(Call.LIST) if r.status == 200]) > 0

    play(tmp_path, story)

"""From which state of a machine a provider bills: what its plugin says, and what is booked beside the fake's ledger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import IntentKind
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import launched, terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import spent
from spotd.core.pricing import Needs, quote
from spotd.daemon.policy import ProviderSettings, Settings, build_policy
from spotd_jobs.objects.folder import FolderStore
from spotd_providers.aws.plugin import PLUGIN as AWS
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.provider import Provider, ProviderPlugin
from spotd_providers.contract.values import MICRO, Offer, cost
from spotd_providers.local.plugin import PLUGIN as LOCAL
from spotd_providers.local.settings import LocalSettings
from spotd_providers.runpod.plugin import PLUGIN as RUNPOD
from spotd_providers.runpod.wire import RunpodSettings
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.harness import Harness
from spotd_providers.vastai.plugin import PLUGIN as VAST
from spotd_providers.vastai.wire import VastSettings
from tests.cases import every
from tests.fakes.aws import Quirks as AwsQuirks
from tests.fakes.runpod import Quirks as RunpodQuirks
from tests.fakes.vastai import Quirks as VastQuirks
from tests.unit.core.builders import world_with
from tests.unit.providers.aws.harness import open_harness as open_aws
from tests.unit.providers.runpod.harness import open_harness as open_runpod
from tests.unit.providers.vastai.harness import open_harness as open_vast

SECOND = timedelta(seconds=1)
LISTED_EVERY = 12 * SECOND
BOOT = 10 * LISTED_EVERY - SECOND
"""The machine begins to run long after it was listed as starting, and a second before it is listed as running."""
WORKS = 6 * LISTED_EVERY
"""Less than it took to start: a start that is booked by mistake is most of the receipt."""
DISK_GB = 20
ROUNDED = 2
"""Micro-dollars: the parts of a price are rounded one by one, here and there."""


@every(
    ("plugin", "settings", "from_running", "from_script"),
    [
        # vast.ai's billing and pricing pages: the GPU is billed per second while the container is up, not while it is
        # `loading`; docs/providers/vastai.md. The container's first process is the start script.
        pytest.param(VAST, VastSettings(), True, True, id="vast"),
        # EC2's page on the states of an instance: nothing is charged while it is `pending`, and what it uses is from
        # `running` to `shutting-down`. A virtual machine runs for a while before its start script does.
        pytest.param(AWS, AwsSettings(), True, False, id="aws"),
        # No page of RunPod says that the pull of an image is free; docs/providers/runpod.md.
        pytest.param(RUNPOD, RunpodSettings(), False, False, id="runpod"),
        # docs/providers/local.md: a machine bills from its launch until it ends.
        pytest.param(LOCAL, LocalSettings(), False, False, id="local"),
    ],
)
def test_a_plugin_says_from_which_state_its_provider_bills(
    plugin: ProviderPlugin, settings: Any, *, from_running: bool, from_script: bool
) -> None:
    traits = plugin.traits(settings)
    assert (traits.bills_from_running, traits.bills_from_script) == (from_running, from_script)


def agreed_world(h: Harness, offer: Offer) -> World:
    """One attempt whose launch at this offer was intended now, by the policy that follows from the plugin's traits."""
    one = ProviderSettings(
        name=offer.provider, title="", enabled=True, fee_ppm=MICRO, poll_every=timedelta(minutes=1), plugin=h.plugin
    )
    settings = Settings(
        install=h.install,
        state_dir=h.folder,
        state_url=":memory:",
        socket=h.folder / "socket",
        store_place="",
        open_objects=lambda: FolderStore(h.folder),
        providers=(one,),
    )
    traits = {offer.provider: h.plugin.traits(h.settings())}
    policy = build_policy(settings, traits, store_shared_by="network")
    needs = Needs(disk_gb=DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
    now = h.clock.now()
    agreed = quote(offer, needs, MICRO, now)
    world = world_with(AttemptState.INTENDED, intended_at=now, quote=agreed, price_max=offer.gpu_price)
    intents = {i: replace(intent, provider=offer.provider, created_at=now) for i, intent in world.intents.items()}
    return replace(world, policy=policy, intents=intents)


def the(world: World) -> Attempt:
    (item,) = world.attempts.values()
    return item


async def look(h: Harness, provider: Provider, world: World, report: HostStatus) -> World:
    listing = await provider.instances()
    now = h.clock.now()
    return applied(world, reconcile(world, {provider.name: listing}, {report.attempt: report}, now))


async def short_attempt(h: Harness, provider: Provider) -> tuple[Attempt, int, int]:
    """A machine comes up, works for less time than that took, and is ended. Returns what is booked and billed."""
    offer = min((await provider.offers(h.query())).offers, key=lambda one: (one.gpu_price, one.offer_id))
    world = agreed_world(h, offer)
    item = the(world)
    made = await provider.launch(h.request(offer, key=item.key, disk_gb=DISK_GB))
    now = h.clock.now()
    began = now + BOOT
    report = HostStatus(attempt=item.id, read_at=now)
    world = applied(world, launched(world, item.id, made.instance, now))
    while now < began + WORKS:
        await h.advance(LISTED_EVERY)
        now = h.clock.now()
        report = HostStatus(attempt=item.id, read_at=now)
        if now >= began:
            assert h.live(item.key)[0].running
            report = replace(
                report, seq=(now - began) // LISTED_EVERY, phase="run", alive_at=now, script_began_at=began
            )
        world = await look(h, provider, world, report)
    assert the(world).state is AttemptState.RUNNING
    finished = replace(report, seq=report.seq + 1, phase="done", exit_reason=EndReason.DONE, exit_code=0, exit_at=now)
    world = await look(h, provider, world, finished)
    (end,) = (intent for intent in world.intents.values() if intent.kind is IntentKind.TERMINATE)
    assert end.ref is not None
    await provider.terminate(end.ref)
    world = applied(world, terminate_accepted(world, end.id, h.clock.now()))
    assert the(world).end_reason is EndReason.DONE
    await h.advance(timedelta(hours=1))
    return the(world), spent(the(world), h.clock.now()), h.billed(str(end.ref.instance_id))


def slow_vast(folder: Path) -> AbstractContextManager[Harness]:
    return open_vast(folder, quirks=VastQuirks(boot=BOOT))


def slow_aws(folder: Path) -> AbstractContextManager[Harness]:
    return open_aws(folder, quirks=AwsQuirks(boot=BOOT))


def slow_runpod(folder: Path) -> AbstractContextManager[Harness]:
    return open_runpod(folder, quirks=RunpodQuirks(provisioning=SECOND, starting=BOOT - SECOND, requests_a_minute=5000))


@pytest.mark.parametrize(
    ("opened", "unsure"),
    [
        pytest.param(slow_vast, 2 * SECOND, id="vast"),  # by its host's word
        pytest.param(slow_aws, LISTED_EVERY, id="aws"),  # by two listings
        pytest.param(slow_runpod, SECOND, id="runpod"),  # from its launch
    ],
)
def test_what_is_booked_for_a_short_attempt_is_what_its_provider_bills(
    opened: Callable[[Path], AbstractContextManager[Harness]], unsure: timedelta, tmp_path: Path
) -> None:
    """Never less than the bill, and more only for as long as nothing shows when the machine began to run."""
    with opened(tmp_path) as h:

        async def story() -> tuple[Attempt, int, int]:
            async with h.opened() as provider:
                return await short_attempt(h, provider)

        item, booked, billed = run_virtually(story)
    rate = item.quote.price.total
    assert billed >= cost(rate, WORKS)
    assert billed - ROUNDED <= booked <= billed + cost(rate, unsure), (
        f"{billed} billed, {booked} booked at {rate} an hour"
    )

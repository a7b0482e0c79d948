"""What is on sale: priced for the whole machine, named canonically, row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from spotd_providers.contract.errors import NotSupported, ProviderError, Unavailable
from spotd_providers.contract.gpus import gpu_info, kept_name
from spotd_providers.contract.provider import (
    Bills,
    ChangesBids,
    GivesShell,
    KnowsBalance,
    KnowsPastPrices,
    OpensPorts,
    PriceHistoryPage,
    ReadsLogs,
    ReplacesMembers,
    StartsGangs,
)
from spotd_providers.contract.values import (
    CAPACITY_SCORE_MAX,
    NO_GPU,
    CheckLine,
    Instance,
    InstanceState,
    Interruption,
    Loss,
    Market,
    OfferQuery,
    Power,
    RegistryLogin,
    Secret,
)
from spotd_providers.testkit.harness import LOGIN, PRIVATE_IMAGE, Harness, NotApplicable
from spotd_providers.testkit.serve import FOR_EVER, NOTHING, STRIKES, Call
from spotd_providers.testkit.suite import (
    BehaviourFailed,
    all_offers,
    an_offer,
    attempt,
    behaviour,
    buy_machine,
    expect,
    require_refusal,
    the_machine,
)

LATE: Final = timedelta(minutes=10)
NOT_JSON_NUMBERS: Final = ("NaN", "Infinity", "-Infinity")
BAD_PRICES: Final = (
    *NOT_JSON_NUMBERS,
    "1e999",
    "1e12",
    "-1",
    "-1e-9",
    "0",
    '"abc"',
    '"NaN"',
    '"0.001"',
    "true",
    "null",
    "[]",
    "{}",
)


@behaviour()
async def offers_are_priced_for_the_whole_machine(h: Harness) -> None:
    """Every offer's price is that of all its GPUs together, as the cloud charges it."""
    offers = await all_offers(h)
    by_id = {offer.offer_id: offer for offer in offers}
    for sold in h.sold():
        if sold.offer_id is None:
            tolerated = range(sold.price, sold.price + sold.gpu_count + 1)
            found = [o for o in offers if (o.gpu, o.gpu_count, o.market) == (sold.gpu, sold.gpu_count, sold.market)]
            expect(any(o.gpu_price in tolerated for o in found), f"{sold!r} is sold, offered is {found!r}")
            continue
        offer = by_id.get(sold.offer_id)  # type: ignore[call-overload] # an OfferId is the text the fake knows
        if offer is None:
            raise AssertionError(f"{sold!r} is sold and not offered")
        expect(offer.gpu_count == sold.gpu_count, f"{offer!r} has {sold.gpu_count} GPUs")
        expect(offer.market is sold.market, f"{offer!r} is sold as {sold.market}")
        # Rounded up at the edge: at most a micro-dollar for each GPU.
        expect(
            sold.price <= offer.gpu_price <= sold.price + sold.gpu_count,
            f"{offer.offer_id} costs {sold.price} micro-dollars per hour, offered at {offer.gpu_price}",
        )
    expect(any(sold.gpu_count > 1 for sold in h.sold()), "the harness sells no machine with several GPUs")


@behaviour()
async def offers_are_sound(h: Harness) -> None:
    """Every offer has a price, GPUs, a pool, this provider's name and an id of its own; none is free unless it is."""
    offers = await all_offers(h)
    free = {sold.offer_id for sold in h.sold() if sold.price == 0}
    for offer in offers:
        expect(offer.provider == h.plugin.name, f"{offer!r} names another provider")
        expect(offer.offer_id and offer.pool, f"{offer!r} lacks an id or a pool")
        expect((offer.gpu_count == 0) == (offer.gpu == NO_GPU), f"{offer!r} says that it has a GPU and none")
        expect(offer.gpu_price > 0 or offer.offer_id in free, f"{offer!r} is free")
        for price in (offer.storage_price, offer.upload_price, offer.download_price, offer.on_demand_price or 0):
            expect(type(price) is int and price >= 0, f"{offer!r} has a price that is no amount of money")
        score = offer.capacity_score
        expect(score is None or 1 <= score <= CAPACITY_SCORE_MAX, f"{offer!r} has a score beyond 1 to 10")
        expect(
            offer.market is not Market.SPOT or offer.interruption is not Interruption.NEVER,
            f"{offer!r} is interruptible and is never interrupted",
        )
    expect(len({offer.offer_id for offer in offers}) == len(offers), "two offers share an id")


@behaviour()
async def gpu_names_are_canonical_or_kept(h: Harness) -> None:
    """Every GPU is named by its canonical id, or by the provider's own spelling as an id."""
    for offer in await all_offers(h):
        expect(
            gpu_info(offer.gpu) is not None or kept_name(offer.gpu) == offer.gpu,
            f"{offer.gpu!r} is neither canonical nor kept; use contract.gpus.canonical()",
        )


@behaviour()
async def the_same_thing_keeps_its_offer_id(h: Harness) -> None:
    """Two polls of an unmoved market show the same offers at the same prices."""
    first = {offer.offer_id: offer.gpu_price for offer in await all_offers(h)}
    await h.advance(timedelta(seconds=30))
    second = {offer.offer_id: offer.gpu_price for offer in await all_offers(h)}
    stable = [offer_id for offer_id in first if offer_id in second]
    expect(2 * len(stable) >= len(first), f"offers change their ids between polls: {set(first) ^ set(second)}")


@behaviour()
async def asking_for_a_gpu_loses_none_of_its_offers(h: Harness) -> None:
    """A query for one GPU finds every offer of it that a query for anything finds."""
    offers = await all_offers(h)
    for gpu in {offer.gpu for offer in offers}:
        page = await h.provider.offers(OfferQuery(gpus=(gpu,), disk_gb=h.query().disk_gb))
        missing = {o.offer_id for o in offers if o.gpu == gpu} - {o.offer_id for o in page.offers}
        expect(not missing, f"asking for {gpu} hides {missing}")


@behaviour(cases=tuple(Market))
async def asking_for_a_market_gives_only_that(h: Harness, case: Market) -> None:
    """A query for one market finds that market's offers and no other's."""
    expected = {o.offer_id for o in await all_offers(h) if o.market is case}
    page = await h.provider.offers(OfferQuery(disk_gb=h.query().disk_gb, markets=(case,)))
    expect(all(offer.market is case for offer in page.offers), f"other markets than {case} are offered")
    expect({o.offer_id for o in page.offers} == expected, f"asking for {case} finds other offers of it")


@behaviour()
async def pages_and_listings_carry_aware_times(h: Harness) -> None:
    """Pages and listings say when they were true, in UTC, by the clock that was lent."""
    page = await h.provider.offers(h.query())
    listing = await h.provider.instances()
    for at in (page.at, listing.at):
        expect(at.utcoffset() == timedelta(0), f"{at!r} is not aware UTC")
        expect(abs(at - h.clock.now()) <= timedelta(minutes=2), f"{at} is not now ({h.clock.now()})")


@behaviour()
async def an_empty_market_is_no_error(h: Harness) -> None:
    """A cloud that sells nothing gives a page without offers."""
    h.sell_nothing()
    page = await h.provider.offers(h.query())
    expect(not page.offers, f"{page.offers!r} is offered and not sold")


@behaviour()
async def an_empty_answer_is_not_an_empty_market(h: Harness) -> None:
    """An answer without any content is a failure, and does not mean that nothing is sold."""
    h.faults.answer(Call.OFFERS, NOTHING, times=100)
    outcome = await attempt(h, lambda: h.provider.offers(h.query()))
    believed = not isinstance(outcome, Exception) and outcome.complete
    expect(not believed, "an empty answer was taken for a whole one")


@behaviour(cases=BAD_PRICES)
async def a_bad_price_never_becomes_an_offer(h: Harness, case: str) -> None:
    """A price that is no amount of money costs its row, and no other row."""
    before = await all_offers(h)
    spoiled = await an_offer(h)
    h.set_raw_price(spoiled.offer_id, case)
    outcome = await attempt(h, lambda: h.provider.offers(h.query()))
    if isinstance(outcome, Exception):
        expect(case in NOT_JSON_NUMBERS, f"one bad price cost the whole page: {outcome!r}")
        expect(isinstance(outcome, Unavailable), f"{outcome!r} instead of Unavailable")
        return
    expect(spoiled.offer_id not in {o.offer_id for o in outcome.offers}, f"the price {case} became an offer")
    others = {o.offer_id for o in before if o.gpu != spoiled.gpu}
    expect(others, "the harness sells only one kind of GPU")
    lost = others - {o.offer_id for o in outcome.offers}
    expect(not lost, f"one bad price cost other rows: {lost}")
    # A null or zero may be this cloud's way to say "not for sale now"; anything else is news for the user.
    if case not in ("null", "0"):
        expect(outcome.rejected or not outcome.complete, "the row vanished without a reason")
        expect(all(row.reason for row in outcome.rejected), "a row was rejected without a reason")


# Optional powers: declared, with the sentence a user reads where they are missing; and the doctor's lines.


PROTOCOLS: Final[dict[Power, type]] = {
    Power.BID_CHANGE: ChangesBids,
    Power.LOGS: ReadsLogs,
    Power.BALANCE: KnowsBalance,
    Power.BILLING: Bills,
    Power.SHELL: GivesShell,
    Power.PORTS: OpensPorts,
    Power.PRICE_HISTORY: KnowsPastPrices,
    Power.REPLACE: ReplacesMembers,
}
SENTENCE_LETTERS_MIN: Final = 12
PAST_PAGES_MAX: Final = 1_000


@behaviour()
async def every_power_is_declared(h: Harness) -> None:
    """Every optional power is declared; each missing one has a sentence, each present one its Protocol."""
    for power in Power:
        capability = h.provider.capabilities.get(power)
        if capability is None:
            raise BehaviourFailed(f"{power} is not declared")
        if not capability.available:
            expect(len(capability.reason.strip()) >= SENTENCE_LETTERS_MIN, f"{power} is missing without a sentence")
        protocol = StartsGangs if power is Power.GANG else PROTOCOLS.get(power)
        if capability.available and protocol is not None:
            expect(isinstance(h.provider, protocol), f"{power} is declared and not implemented")
        shown = getattr(h.plugin, "powers", {power: capability}).get(power)
        if shown is None or (capability.available and not shown.available):
            raise BehaviourFailed(f"{power} is not among the powers of the plugin, which the page of them shows")


@behaviour(cases=tuple(PROTOCOLS))
async def a_missing_power_raises_not_supported(h: Harness, case: Power) -> None:
    """Calling a power that is missing raises NotSupported with the declared sentence."""
    capability = h.provider.capabilities[case]
    if capability.available or not isinstance(h.provider, PROTOCOLS[case]):
        return  # there is nothing that could be called in vain
    offer = await an_offer(h)
    _, instance = await buy_machine(h, offer)
    now = h.clock.now()
    provider = h.provider
    calls: dict[Power, Callable[[], object]] = {}
    if isinstance(provider, ChangesBids):
        calls[Power.BID_CHANGE] = partial(provider.change_bid, instance.ref, offer.gpu_price)
    if isinstance(provider, ReadsLogs):
        calls[Power.LOGS] = partial(provider.logs, instance.ref, lines=10)
    if isinstance(provider, KnowsBalance):
        calls[Power.BALANCE] = provider.balance
    if isinstance(provider, Bills):
        calls[Power.BILLING] = partial(provider.charges, now, now)
    if isinstance(provider, GivesShell):
        calls[Power.SHELL] = partial(provider.shell, instance.ref)
    if isinstance(provider, OpensPorts):
        calls[Power.PORTS] = partial(provider.open_port, instance.ref, 1)
    if isinstance(provider, KnowsPastPrices):
        calls[Power.PRICE_HISTORY] = partial(provider.price_history, now, after="")
    if isinstance(provider, ReplacesMembers):
        calls[Power.REPLACE] = partial(provider.drop_members, instance.ref, [1])
    error = await require_refusal(h, calls[case], NotSupported)  # type: ignore[arg-type] # each returns an awaitable of its own
    expect(capability.reason in str(error), f"{error!r} does not say {capability.reason!r}")


@behaviour()
async def logs_are_lines_of_text(h: Harness) -> None:
    """The provider's log of a machine is at most the lines asked for."""
    if not isinstance(h.provider, ReadsLogs) or not h.provider.capabilities[Power.LOGS].available:
        raise NotApplicable(h.provider.capabilities[Power.LOGS].reason)
    _, instance = await buy_machine(h)
    lines = await h.provider.logs(instance.ref, lines=5)
    expect(len(lines) <= 5, f"{len(lines)} lines instead of at most 5")
    expect(not any("\n" in line for line in lines), "a line is no single line of text")


async def _past_pages(h: Harness, since: datetime) -> list[PriceHistoryPage]:
    provider = h.provider
    if not isinstance(provider, KnowsPastPrices) or not provider.capabilities[Power.PRICE_HISTORY].available:
        raise NotApplicable(provider.capabilities[Power.PRICE_HISTORY].reason)
    pages = [await provider.price_history(since, after="")]
    while pages[-1].next:
        expect(len(pages) < PAST_PAGES_MAX, "the pages of past prices do not end")
        pages.append(await provider.price_history(since, after=pages[-1].next))
    return pages


@behaviour(cases=("an hour", "a month", "ten years"))
async def past_prices_are_of_the_time_asked_for(h: Harness, case: str) -> None:
    """The pages of past prices end, and hold prices of the span, each offer's changes in order of time."""
    now = h.clock.now()
    since = now - {"an hour": timedelta(hours=1), "a month": timedelta(days=30)}.get(case, timedelta(days=3650))
    pages = await _past_pages(h, since)
    offers = [(page, offer) for page in pages for offer in page.offers]
    expect(offers or case == "an hour", "nothing is known of the past")
    for page in pages:
        expect(since <= page.since < page.until <= h.clock.now(), f"a page is of {page.since} until {page.until}")
    for page, offer in offers:
        expect(offer.provider == h.plugin.name, f"{offer.offer_id} names another provider")
        expect(offer.pool and offer.gpu_count > 0, f"{offer.offer_id} lacks a pool or GPUs")
        expect(
            gpu_info(offer.gpu) is not None or kept_name(offer.gpu) == offer.gpu,
            f"{offer.gpu!r} is neither canonical nor kept; use contract.gpus.canonical()",
        )
        instants = [at for at, _ in offer.changes]
        expect(instants == sorted(set(instants)), f"the changes of {offer.offer_id} are not in order of time")
        expect(all(at <= page.until for at in instants), f"{offer.offer_id} has a price after the span")
        expect(sum(at < page.since for at in instants) <= 1, f"{offer.offer_id} has prices of before the span")
        for _, price in offer.changes:
            expect(price is None or (type(price) is int and price > 0), f"{price!r} is no price of {offer.offer_id}")
    expect(len({offer.offer_id for _, offer in offers}) == len(offers), "two offers of the past share an id")


@behaviour()
async def past_prices_that_are_read_twice_are_the_same(h: Harness) -> None:
    """Two readings of one past differ by nothing but what happened between them."""
    now = h.clock.now()
    first, second = [
        {(offer.offer_id, *change) for page in await _past_pages(h, now - timedelta(days=7)) for offer in page.offers
         for change in offer.changes if change[0] <= now}
        for _ in range(2)
    ]  # fmt: skip
    expect(first == second, f"{len(first ^ second)} of {len(first)} past prices changed")


@behaviour(cases=("gateway error", "not JSON", "empty", "connection lost"))
async def past_prices_that_cannot_be_read_are_an_error(h: Harness, case: str) -> None:
    """A failure is no empty past."""
    await _past_pages(h, h.clock.now() - timedelta(days=1))
    for call in Call:
        STRIKES[case](h.faults, call, FOR_EVER)
    outcome = await attempt(h, lambda: _past_pages(h, h.clock.now() - timedelta(days=1)))
    expect(isinstance(outcome, ProviderError), f"{outcome!r} instead of an error")


@behaviour()
async def spot_and_host_identity_are_as_declared(h: Harness) -> None:
    """Spot offers, host ids and scores of capacity exist exactly where their powers are declared."""
    offers = await all_offers(h)
    sells_spot = any(offer.market is Market.SPOT for offer in offers)
    expect(h.provider.capabilities[Power.SPOT].available == sells_spot, f"spot is declared {not sells_spot}")
    shows_hosts = any(offer.host_id is not None for offer in offers)
    declared = h.provider.capabilities[Power.HOST_IDENTITY].available
    expect(declared == shows_hosts, f"host identity is declared {declared}, offers show {shows_hosts}")
    scores = any(offer.capacity_score is not None for offer in offers)
    declared = h.provider.capabilities[Power.CAPACITY_SCORES].available
    expect(declared == scores, f"scores of capacity are declared {declared}, offers show {scores}")


@behaviour()
async def a_healthy_provider_checks_out(h: Harness) -> None:
    """Check of a healthy account is a few lines that are all fine."""
    lines = await h.provider.check()
    expect(lines, "check says nothing")
    for line in lines:
        expect(line.name.strip() and line.detail.strip(), f"{line!r} says nothing")
        expect(line.ok, f"{line!r} for a healthy account")


def _require_finding(outcome: object) -> None:
    if isinstance(outcome, Exception):
        raise BehaviourFailed(f"check raised {outcome!r} for a finding") from outcome
    lines = [line for line in outcome if isinstance(line, CheckLine)] if isinstance(outcome, list | tuple) else []
    bad = [line for line in lines if not line.ok]
    expect(bad, f"check finds nothing wrong: {outcome!r}")
    expect(all(line.detail.strip() for line in bad), f"a finding says nothing: {bad!r}")


@behaviour(cases=("gateway error", "not JSON", "empty", "connection lost", "no answer"))
async def check_finds_failures_and_never_raises(h: Harness, case: str) -> None:
    """When nothing works, check returns lines that say so."""
    for call in Call:
        STRIKES[case](h.faults, call, FOR_EVER)
    _require_finding(await attempt(h, h.provider.check))


@behaviour()
async def check_names_a_refused_key_with_a_way_out(h: Harness) -> None:
    """A key that is not accepted is a line of check with a hint."""
    h.break_auth()
    outcome = await attempt(h, h.provider.check)
    _require_finding(outcome)
    if not isinstance(outcome, Exception):
        expect(any(line.hint.strip() for line in outcome if not line.ok), "no line offers a way out")


@behaviour()
async def check_of_an_unreachable_cloud_says_so(h: Harness) -> None:
    """Check of a cloud that cannot be connected to returns lines that say so."""
    h.served.stop()
    _require_finding(await attempt(h, h.provider.check))


@behaviour(opens=True)
async def closing_leaves_nothing_behind(h: Harness) -> None:
    """A provider can be opened, used, closed and opened again; no task outlives it."""
    before = asyncio.all_tasks()
    for _ in range(2):
        async with h.opened() as provider:
            expect(provider.name == h.plugin.name, f"the provider calls itself {provider.name!r}")
            await provider.offers(h.query())
            await provider.instances()
    left = asyncio.all_tasks() - before
    expect(not left, f"tasks outlive the provider: {left!r}")


@behaviour(opens=True)
async def machines_outlive_the_provider(h: Harness) -> None:
    """Closing ends no machine; a provider that is opened anew finds it by its key."""
    async with h.opened():
        key, instance = await buy_machine(h)
    async with h.opened() as provider:
        found = await provider.find(key)
        expect([i.ref for i in found] == [instance.ref], f"found after reopening: {found!r}")


# Private images: the login goes to the machine that needs it, and is shown nowhere.


def _require_logins(h: Harness) -> None:
    takes = h.plugin.traits(h.settings()).private_images
    if not takes.available:
        raise NotApplicable(takes.reason)
    expect(takes.reason, "it says not who can read the password")


async def _buy_private(h: Harness, login: RegistryLogin | None) -> Instance:
    """Buy a machine with a private image, and wait until the provider had time to see how it started."""
    h.make_private(PRIVATE_IMAGE, LOGIN)
    h.logins = () if login is None else (login,)
    key = h.key()
    await h.provider.launch(h.request(await an_offer(h), key, image=PRIVATE_IMAGE, login=login))
    await h.settle()
    await h.provider.instances()
    await h.advance(LATE)
    await h.provider.offers(h.query())
    return await the_machine(h, key)


@behaviour()
async def a_private_image_starts_with_its_login(h: Harness) -> None:
    """A machine is given the login of its image's registry, and runs."""
    _require_logins(h)
    found = await _buy_private(h, LOGIN)
    expect(found.state is InstanceState.RUNNING, f"with the right login the machine is {found.state}: {found.detail}")


@behaviour(cases=("no login", "wrong password", "wrong name"))
async def a_private_image_without_its_login_is_an_image_error(h: Harness, case: str) -> None:
    """A machine that its registry refuses the image is lost by the image, in words that say it was refused."""
    _require_logins(h)
    login = {
        "no login": None,
        "wrong password": replace(LOGIN, password=Secret("canary-other-login-77")),
        "wrong name": replace(LOGIN, username="other"),
    }[case]
    found = await _buy_private(h, login)
    expect(found.loss is Loss.IMAGE_ERROR, f"the machine is {found.state}, lost by {found.loss}")
    expect("unauthorized" in found.detail.lower(), f"its detail is {found.detail!r}")


@behaviour()
async def a_login_is_shown_nowhere(h: Harness) -> None:
    """Machines, offers, check lines and the request itself hold no password; nor do logs and errors."""
    _require_logins(h)
    found = await _buy_private(h, LOGIN)
    shown = [
        repr(h.request(await an_offer(h), login=LOGIN)),
        repr(found),
        repr(await h.provider.instances()),
        repr(await h.provider.check()),
        repr(h.provider),
    ]
    if isinstance(h.provider, ReadsLogs):
        shown.append(repr(await attempt(h, partial(h.provider.logs, found.ref, lines=100))))
    expect(not any(LOGIN.password.reveal() in text for text in shown), "a password is shown")
    # `run` searches errors, logs and URLs for it when the behaviour is over.


@behaviour()
async def a_login_that_cannot_be_passed_on_buys_nothing(h: Harness) -> None:
    """A provider without this power refuses a launch with a login by its declared sentence."""
    takes = h.plugin.traits(h.settings()).private_images
    if takes.available:
        raise NotApplicable("it takes logins")
    if not h.plugin.traits(h.settings()).runs_images:
        raise NotApplicable("it runs no images")
    request = h.request(await an_offer(h), login=LOGIN)
    error = await require_refusal(h, partial(h.provider.launch, request), NotSupported)
    expect(takes.reason in str(error), f"{error} is not what it declares")
    expect(not h.live(request.key) and h.launch_calls() == 0, "a machine was bought")

"""What is on sale: priced for the whole machine, named canonically, row by row."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.gpus import gpu_info, kept_name
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, NO_GPU, Interruption, Market, OfferQuery
from spotd_providers.testkit.expect import all_offers, an_offer, attempt, expect
from spotd_providers.testkit.faults import NOTHING, Call
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.suite import behaviour

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
    """Every offer has a positive price, GPUs, a pool, this provider's name and an id of its own."""
    offers = await all_offers(h)
    for offer in offers:
        expect(offer.provider == h.plugin.name, f"{offer!r} names another provider")
        expect(offer.offer_id and offer.pool, f"{offer!r} lacks an id or a pool")
        expect((offer.gpu_count == 0) == (offer.gpu == NO_GPU), f"{offer!r} says that it has a GPU and none")
        expect(offer.gpu_price > 0, f"{offer!r} is free")
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

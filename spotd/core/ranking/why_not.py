"""Why none of the offers is taken for a job, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spotd.core.domain.jobs import Job
from spotd.core.domain.quotes import Quote
from spotd.core.domain.verdicts import PassedOver, VerdictKind
from spotd.core.pricing.words import most_frequent_first, passed_over_words, per_gpu_words, wanted_words
from spotd.core.ranking.candidates import ANOTHER_KIND, CandidateCatalogue
from spotd.core.ranking.ceilings import total_ceiling
from spotd.core.ranking.ranked_offers import RankedOffers
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour, as_usd, per_gpu

NOT_COMPARED: Final = "ranked behind those, not compared"


def nothing_fits(catalogue: CandidateCatalogue, job: Job, offers: RankedOffers) -> tuple[VerdictKind, str]:
    silent = "; ".join(f"{name}: {why}" for name, why in sorted(catalogue.silent.items()))
    silent = f" ({silent})" if silent else ""
    if catalogue.size == 0:
        return VerdictKind.NO_OFFERS, f"no provider shows offers now{silent}"
    wanted, others = wanted_words(job.spec.resources), dict(offers.mismatches)
    kinds = others.pop(ANOTHER_KIND, 0)
    reasons = []
    if kinds:
        reasons.append("1 offer is another machine" if kinds == 1 else f"{kinds} offers are other machines")
    if others:
        reasons.append(passed_over_words(others))
    if own := catalogue.rented_now(job.spec.resources):
        reasons.append(f"your own jobs have {own} such machine{'s' if own > 1 else ''}")
    return VerdictKind.NO_MATCH, f"no {wanted.removeprefix('a ')} is on offer now ({', '.join(reasons)}){silent}"


def all_blocked(catalogue: CandidateCatalogue, offers: RankedOffers) -> str:
    reasons = sorted({catalogue.blocked(offer) for offer in offers.entries})
    return f"all {len(offers.entries)} offers that fit are out for now: {'; '.join(reasons)}"


def all_too_expensive(catalogue: CandidateCatalogue, offers: RankedOffers, compared: Mapping[str, int]) -> PassedOver:
    """Return why each offer is not taken; those that rank behind the last one compared are not read at all.

    Many jobs of the same requirements pass over the same offers, so the sums are made once.
    """
    known = (offers.walked, offers.read, *compared.items())
    found = offers.summaries.get(known)
    if found is None:
        counts = offers.mismatches + offers.blocked
        counts.update(compared)
        unread = catalogue.size - counts.total()
        if unread > 0:
            counts[NOT_COMPARED] = unread
        found = offers.summaries[known] = most_frequent_first(counts)
    return found


def too_expensive(
    job: Job, offers: RankedOffers, best: Quote, ceiling: MicroUsdPerGpuHour | None
) -> tuple[VerdictKind, str]:
    offer = best.offer
    if ceiling is None:
        return (
            VerdictKind.NO_CEILING,
            f"no ceiling for {offer.gpu}: give max_price in the job or set [ceilings] in the config",
        )
    allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
    which = "the best by expected cost" if offers.terms.speeds.is_known else "the cheapest"
    over = as_usd(per_gpu(MicroUsdPerHour(best.price.total - allowed), offer.gpu_count))
    return (
        VerdictKind.ABOVE_CEILING,
        f"{which}, {offers.words_of(best)}, is ${over:.4f} above the ceiling of {per_gpu_words(ceiling)}",
    )

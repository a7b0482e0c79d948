"""What each leaf of the providers' error tree means for a launch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, cast

import anyio

from spotd.core import bids, gangs
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import IntentState, bid_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.kernel.outcomes import LaunchFailure
from spotd.core.kernel.quarantine import in_words
from spotd.daemon.commits import Committed, CrashPoint, Decide, Points
from spotd.daemon.market.guarded import GuardedProvider
from spotd_providers.contract import errors
from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
)
from spotd_providers.contract.provider import ChangesBids, Logger, ReplacesMembers
from spotd_providers.contract.values import LaunchRequest, MicroUsdPerHour, ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefusal:
    """The provider certainly made no machine."""

    failure: LaunchFailure
    detail: str
    retry_after: timedelta | None = None
    quota: str = ""


_FAILURES: Final[dict[type[errors.ProviderError], LaunchFailure]] = {
    errors.NoCapacity: LaunchFailure.NO_CAPACITY,
    errors.OfferGone: LaunchFailure.OFFER_GONE,
    errors.PriceMoved: LaunchFailure.PRICE_MOVED,
    errors.QuotaExceeded: LaunchFailure.QUOTA,
    errors.RequestRejected: LaunchFailure.REJECTED,
    errors.NotSupported: LaunchFailure.NOT_SUPPORTED,
    errors.NoBalance: LaunchFailure.NO_BALANCE,
    errors.AuthFailed: LaunchFailure.AUTH,
    errors.RateLimited: LaunchFailure.RATE_LIMITED,
    errors.Unavailable: LaunchFailure.UNAVAILABLE,
    errors.ContractViolation: LaunchFailure.CONTRACT,
}
"""Every leaf but `OutcomeUnknown`; a test holds this to the tree."""


def refusal_of(error: errors.ProviderError) -> LaunchRefusal | None:
    """Return what the error states for certain; `None` when only the machine's key can settle it."""
    failure = _FAILURES.get(type(error))
    if failure is None:
        return None
    wait: timedelta | None = None
    if isinstance(error, errors.RateLimited):
        wait = error.retry_after
    elif isinstance(error, errors.OfferGone):
        wait = error.lasts
    quota = error.quota if isinstance(error, errors.QuotaExceeded) else ""
    return LaunchRefusal(failure=failure, detail=str(error) or type(error).__name__, retry_after=wait, quota=quota)


# Changes of bids, each called once: the answer, or that it was lost, is committed.


CHANGE_DEADLINE_S: Final = 60.0
_POINTS: Final = (CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER)
_REFUSALS: Final = (AuthFailed, NoBalance, QuotaExceeded, RateLimited, RequestRejected)
"""After these the bid is certainly what it was."""


class Commit(Protocol):
    """Makes an outcome durable, however long that takes."""

    def __call__(self, decide: Decide, points: Points, *, otherwise: Decide | None = None) -> Awaitable[Committed]: ...


class BidChanges:
    """Makes the calls that change bids."""

    def __init__(
        self,
        provider: Callable[[ProviderName], GuardedProvider | None],
        commit: Commit,
        market: Callable[[], MarketSnapshot],
        log: Logger,
    ) -> None:
        self._provider = provider
        self._commit = commit
        self._market = market
        self._log = log

    async def change(self, attempt: Attempt) -> None:
        """Set the bid of this attempt's machine to the newest that is owed, once."""
        market = self._market()
        committed = await self._commit(
            lambda world, now: bids.bid_sent(world, attempt.id, now, market),
            _POINTS,
            # Left as it is, it would be taken up again at once, and for ever.
            otherwise=lambda world, now: bids.bid_refused(world, attempt.id, "it cannot be recorded", now),
        )
        intent = committed.world.intents.get(bid_intent_id(attempt.key))
        now = committed.world.attempts.get(attempt.id)
        if intent is None or intent.state is not IntentState.SENT or now is None or now.ref is None:
            return
        bid = bids.owed_bid(now)
        refused, unknown = await self._call(now, bid)
        fields = {"key": attempt.key, "provider": attempt.provider, "bid_microusd_h": bid}
        if unknown:
            await self._commit(lambda world, at: bids.bid_unknown(world, attempt.id, unknown, at), _POINTS)
            self._log.warning("bid.unknown", detail=unknown, **fields)
        elif refused:
            await self._commit(lambda world, at: bids.bid_refused(world, attempt.id, refused, at), _POINTS)
            self._log.warning("bid.refused", detail=refused, **fields)
        else:
            await self._commit(lambda world, at: bids.bid_changed(world, attempt.id, at), _POINTS)
            self._log.info("bid.changed", **fields)

    async def _call(self, attempt: Attempt, bid: MicroUsdPerHour) -> tuple[str, str]:
        """Return why the provider refused the bid, and why it is unknown whether it took it; mostly two empty texts."""
        if attempt.ref is None:
            return "there is no machine", ""
        provider = self._provider(attempt.provider)
        if not isinstance(provider, ChangesBids):
            return f"bids at {attempt.provider} cannot be changed", ""
        try:
            with anyio.fail_after(CHANGE_DEADLINE_S):
                await cast(ChangesBids, provider).change_bid(attempt.ref, bid)
        except _REFUSALS as exc:
            return str(exc) or type(exc).__name__, ""
        except ProviderError as exc:
            return "", str(exc) or type(exc).__name__
        except TimeoutError:
            return "", f"no answer within {CHANGE_DEADLINE_S:.0f} s"
        return "", ""


# Calls that replace machines of several, or leave them out: each may be repeated, so a lost answer is no doubt.


REPLACE_DEADLINE_S: Final = 90.0
_SENT: Final = (CrashPoint.BEFORE_COMMIT_REPLACE_SENT, CrashPoint.AFTER_COMMIT_REPLACE_SENT)
_REPLACED: Final = (CrashPoint.BEFORE_COMMIT_REPLACED, CrashPoint.AFTER_COMMIT_REPLACED)
_FINAL: Final = (errors.NotSupported, errors.ContractViolation)
"""Not that it does not run: its lists say why, and until then it is asked again."""


class Replacements:
    """Makes the calls that replace lost machines of several."""

    def __init__(
        self,
        provider: Callable[[ProviderName], GuardedProvider | None],
        commit: Commit,
        request: Callable[[Attempt, Job], Awaitable[LaunchRequest]],
        log: Logger,
    ) -> None:
        self._provider = provider
        self._commit = commit
        self._request = request
        self._log = log

    async def mend(self, attempt: Attempt) -> None:
        """Replace what this attempt lost, or leave it out, once."""
        committed = await self._commit(lambda world, now: gangs.begin_mending(world, attempt.id, now), _SENT)
        world = committed.world
        found, job = gangs.mending_of(world, attempt.id, committed.at), world.jobs.get(attempt.id.job)
        if found is None or job is None:
            return
        refused, wait = await self._call(found, job)
        fields = {"key": attempt.key, "provider": attempt.provider, "ranks": found.ranks, "shrinks": found.shrinks}
        if not refused:
            await self._commit(lambda world, now: gangs.record_mending(world, found, now), _REPLACED)
            self._log.info("members.replaced", **fields)
            return
        detail, is_final = refused
        await self._commit(
            lambda world, now: gangs.fail_mending(world, found, detail, now, is_final=is_final, wait=wait), _REPLACED
        )
        self._log.warning("members.not_replaced", detail=detail, **fields)

    async def _call(self, mending: gangs.Mending, job: Job) -> tuple[tuple[str, bool] | None, timedelta | None]:
        """Return why it was not done, or may not be, and whether that is final; and how long is to be waited."""
        item = mending.item
        provider = self._provider(item.provider)
        if provider is None:
            return (f"the config has no {item.provider}", False), None
        if item.ref is None or not isinstance(provider, ReplacesMembers):
            return (f"{item.provider} replaces no machine of several", True), None
        try:
            with anyio.fail_after(REPLACE_DEADLINE_S):
                if mending.shrinks:
                    await provider.drop_members(item.ref, mending.ranks)
                else:
                    request = await self._request(item, job)
                    await provider.replace_members(request, item.ref, mending.ranks, mending.number)
        except _FINAL as exc:
            return (str(exc) or type(exc).__name__, True), None
        except ProviderError as exc:
            wait = exc.retry_after if isinstance(exc, RateLimited) else None
            return (str(exc) or type(exc).__name__, False), wait
        except TimeoutError:
            return (f"no answer within {REPLACE_DEADLINE_S:.0f} s", False), None
        except Exception as exc:  # noqa: BLE001 - a start that cannot be prepared now may be later, until time is over
            return (f"it cannot be prepared ({in_words(exc)})", False), None
        return None, None

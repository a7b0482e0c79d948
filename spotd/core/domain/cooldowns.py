"""When something that was refused may be tried again: after its time, or once its cause is seen to be over.

A cause that can be asked about ends a cool-down early. A first refusal is then repeated at once; what is refused again
although its cause seemed to be over is left alone for a while, which doubles each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, assert_never

from spotd.core.domain.backoff import doubled
from spotd.core.domain.market import ProviderOffers
from spotd_providers.contract.values import ProviderName

SHOWN_FIRST: Final = timedelta(seconds=5)
SHOWN_MAX: Final = timedelta(minutes=5)
LAG_MAX: Final = timedelta(minutes=10)
"""For so long after an account was filled its provider may refuse launches all the same."""
LAG_FIRST: Final = timedelta(seconds=15)
PRESSED_FIRST: Final = timedelta(minutes=3)
"""A lost host is left alone at least so long, and twice as long each time in a row, whatever a deadline needs."""
COOLDOWNS_REMEMBERED: Final = timedelta(hours=1)
"""After its end: what is refused again soon cools down for longer."""


class CooldownScope(StrEnum):
    HOST = "host"
    POOL = "pool"
    QUOTA = "quota"
    """A limit of the account at the provider, shared by many offers."""
    OFFER = "offer"
    PROVIDER = "provider"
    STORE = "store"
    """No launch can be prepared anywhere, since the checkpoint store takes no grant."""
    TARGET = "target"
    """A machine for which a healthy one was stopped, and that could not be had; others may be launched there."""
    BUDGET = "budget"
    """A budget of all jobs together is used up for its day or month."""


EVERYWHERE: Final = ProviderName("")
"""The provider of a cool-down that concerns all of them."""


class CooldownEnd(StrEnum):
    """What ends a cool-down before its time.

    TIME: nothing. SHOWN: a list of offers that was asked for after the refusal and shows the offer again. CREDIT: the
    account's balance rose. KEY: the provider took the key again. DEADLINE: one that nothing else can meet.
    """

    TIME = "time"
    SHOWN = "shown"
    CREDIT = "credit"
    KEY = "key"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """Something not to be bought before `until`, or before what ended it is known.

    Attributes:
        since: when it was refused last; `None` in rows of an older spotd.
        strikes: how often in a row it had been refused before.
    """

    provider: ProviderName
    scope: CooldownScope
    subject: str
    until: datetime
    reason: str
    since: datetime | None = None
    strikes: int = 0
    ends: CooldownEnd = CooldownEnd.TIME


def cooling_until(cooldown: Cooldown, provider_offers: ProviderOffers | None) -> datetime:
    """Return the end of a cool-down, as far as what is known of its provider can bring it nearer."""
    since = cooldown.since
    if since is None or provider_offers is None:
        return cooldown.until
    match cooldown.ends:
        case CooldownEnd.TIME | CooldownEnd.DEADLINE:
            return cooldown.until
        case CooldownEnd.SHOWN:
            # An offer that is on no list is not bought anyway.
            again = cooldown.strikes > 0
            pause = doubled(SHOWN_FIRST, cooldown.strikes - 1, SHOWN_MAX) if again else timedelta(0)
            seen_at = provider_offers.at
        case CooldownEnd.CREDIT:
            pause, seen_at = timedelta(0), provider_offers.credit_at
        case CooldownEnd.KEY:
            pause, seen_at = timedelta(0), provider_offers.key_at
        case _:
            assert_never(cooldown.ends)
    if seen_at is None:
        return cooldown.until
    if seen_at > since:
        return min(cooldown.until, since + pause)
    if cooldown.ends is CooldownEnd.CREDIT and since - seen_at <= LAG_MAX:
        # Its launches lag behind what it states of the account: each pause is as long as the lag has lasted.
        return min(cooldown.until, since + max(LAG_FIRST, since - seen_at))
    return cooldown.until


def pressed_until(cooldown: Cooldown) -> datetime:
    """Return the end of a cool-down for a job whose deadline nothing else can meet."""
    if cooldown.ends is not CooldownEnd.DEADLINE or cooldown.since is None:
        return cooldown.until
    return min(
        cooldown.until, cooldown.since + doubled(PRESSED_FIRST, cooldown.strikes, cooldown.until - cooldown.since)
    )

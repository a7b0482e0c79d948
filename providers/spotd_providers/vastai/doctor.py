"""The checks of `spotctl doctor` at vast.ai, one line for each finding."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import CheckLine, Market, OfferQuery
from spotd_providers.kit.checks import check_line, clock_line
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.offers import search_body
from spotd_providers.vastai.settings import VastSettings
from spotd_providers.vastai.wire import UserReply

CREDIT_LOW_USD: Final = 5.0
_KEY: Final = "create a key at console.vast.ai/manage-keys and put it in api_key"
_SCOPES: Final = "give the key the permissions misc, user_read, instance_read, instance_write and billing_read"
_FILTERS: Final = "relax the filters under [providers.vast]"
_LATER: Final = "vast.ai cannot be asked now; try again in a minute"
"""Nothing was found out about the key or its permissions, so this hint does not ask to change them."""


async def examine(client: VastClient, settings: VastSettings, services: Services) -> Sequence[CheckLine]:
    """Check key, credit, quota, clock and each permission. A failed check is a line, never an exception."""
    lines: list[CheckLine] = []
    account: list[tuple[UserReply, HttpAnswer]] = []

    async def key() -> str:
        account.append(await client.user())
        return "accepted"

    async def instances() -> str:
        await client.instance_page(label=None, after=None)
        return "can list instances"

    async def billing() -> str:
        now = services.clock.now()
        await client.charge_page(now - timedelta(days=1), now, after=None)
        return "can read charges"

    async def market() -> str:
        found = await client.search(search_body(settings, OfferQuery().disk_gb, Market.SPOT))
        return f"{found.count} interruptible offers under your filters"

    lines.append(await check_line("key", key, hint=_KEY, unanswered=_LATER))
    if not account:
        return tuple(lines)  # whatever is wrong would only be found three more times, each after its time-out
    lines.extend(_of_account(account[0], services))
    lines.append(await check_line("instances", instances, hint=_SCOPES, unanswered=_LATER))
    lines.append(await check_line("billing", billing, hint=_SCOPES, unanswered=_LATER))
    lines.append(await check_line("market", market, hint=_FILTERS, refused=_SCOPES, unanswered=_LATER))
    return tuple(lines)


def _of_account(account: tuple[UserReply, HttpAnswer], services: Services) -> list[CheckLine]:
    reply, answer = account
    credit = reply.balance if reply.credit is None else reply.credit
    if credit is None:
        money = CheckLine(name="balance", ok=False, detail="the account states no credit", hint=_SCOPES)
    else:
        hint = "add credit; vast.ai stops every machine at zero" if credit < CREDIT_LOW_USD else ""
        money = CheckLine(name="balance", ok=not hint, detail=f"${credit:.2f} left", hint=hint)
    if answer.date is None:
        return [money, _quota(reply)]
    clock = clock_line(abs(answer.date - services.clock.now()), who="vast.ai")
    return [money, _quota(reply), clock]


def _quota(reply: UserReply) -> CheckLine:
    """Report the quota: vast.ai's API states none, only a refused purchase shows how fast an account may spend."""
    if reply.email_verified is not None and not reply.email_verified:
        return CheckLine(
            name="quota",
            ok=True,  # with a hint, so a warning: a little may be spent
            detail="the account's e-mail address is not verified, so it may spend only a little per hour",
            hint="verify the address at console.vast.ai",
        )
    return CheckLine(
        name="quota", ok=True, detail="vast.ai states none; it may refuse purchases of a new account that spends fast"
    )

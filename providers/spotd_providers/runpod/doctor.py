"""What `spotctl doctor` asks of RunPod, one line for each finding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed, ProviderError
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.http import AnswerLost, HttpAnswer
from spotd_providers.runpod.answers import RunpodRefused
from spotd_providers.runpod.books import account
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.graphql import Graph
from spotd_providers.runpod.settings import RunpodSettings
from spotd_providers.runpod.spot import SpotMarket
from spotd_providers.runpod.wire import Myself

BALANCE_LOW_USD: Final = 5.0
SKEW_MAX: Final = timedelta(seconds=5)
_KEY: Final = "create a key with read and write access at console.runpod.io/user/settings and put it in api_key"
_ANSWERS: Final = "look at the network, at base_url and at RunPod's status page; the key was not judged"
_SCOPES: Final = "give the key read and write access to pods and read access to billing"


async def examine(
    client: RunpodClient, graph: Graph, spot: SpotMarket, settings: RunpodSettings, services: Services
) -> Sequence[CheckLine]:
    """Key, clock, catalogue, billing, balance, and spot if asked for. A failed check is a line, never an exception."""
    lines: list[CheckLine] = []
    heard: list[HttpAnswer] = []
    money: list[Myself] = []

    async def key() -> str:
        heard.append(await client.greeting())
        return "accepted, can list pods"

    async def market() -> str:
        found = await client.gpus(
            cloud=settings.clouds[0] if settings.clouds else "SECURE", count=1, cuda_min=settings.cuda_min
        )
        return f"{len(found.rows)} kinds of GPU in the catalogue"

    async def billing() -> str:
        now = services.clock.now()
        await client.billing(now - timedelta(days=1), now)
        return "can read charges"

    async def balance() -> str:
        money.append(await account(graph))
        return f"${money[0].balance:.2f} left"

    lines.append(await _line("key", key, hint=_ANSWERS))
    if not heard:
        return tuple(lines)  # whatever is wrong would only be found again and again, each time after its time-out
    lines.extend(_clock(heard[0], services))
    lines.extend(await _creates(client))
    lines.append(await _line("market", market, hint="RunPod's catalogue does not answer; see its status page"))
    lines.append(await _line("billing", billing, hint=_SCOPES))
    lines.append(await _line("balance", balance, hint="the balance is told by RunPod's old GraphQL API only"))
    if money and money[0].balance < BALANCE_LOW_USD:
        lines[-1] = CheckLine(
            name="balance",
            ok=False,
            detail=lines[-1].detail,
            hint="add credit; RunPod deletes pods and their disks at zero",
        )
    lines.append(_quota(money[0] if money else None))
    if settings.spot:
        lines.append(
            CheckLine(
                name="spot",
                ok=spot.is_open,
                detail=spot.closed or "asked for, and not refused so far",
                hint="" if spot.is_open else "set spot = false under [providers.runpod]",
            )
        )
    return tuple(lines)


async def _creates(client: RunpodClient) -> list[CheckLine]:
    """A line for a key that may read and not create: each of its creates is refused like a pool it may not use."""
    try:
        await client.may_create()
    except AuthFailed as exc:
        return [CheckLine(name="create", ok=False, detail=str(exc), hint=_KEY)]
    except (ProviderError, AnswerLost):
        pass  # nothing was found out about it, and whatever is wrong is found by the next line
    return []


def _quota(account: Myself | None) -> CheckLine:
    """What all pods together may cost per hour, where RunPod tells."""
    if account is None or account.limit is None:
        return CheckLine(name="quota", ok=True, detail="RunPod does not tell the account's spend limit")
    used = account.spend or 0.0
    left = used < account.limit
    return CheckLine(
        name="quota",
        ok=left,
        detail=f"${used:.2f} of ${account.limit:.2f} per hour in use",
        hint="" if left else "ask RunPod's support for a higher spend limit, or end pods",
    )


def _clock(answer: HttpAnswer, services: Services) -> list[CheckLine]:
    if answer.date is None:
        return []
    skew = abs(answer.date - services.clock.now())
    return [
        CheckLine(
            name="clock",
            ok=skew <= SKEW_MAX,
            detail=f"{skew.total_seconds():.0f} s from RunPod's",
            hint="" if skew <= SKEW_MAX else "synchronise this computer's clock",
        )
    ]


async def _line(name: str, ask: Callable[[], Awaitable[str]], *, hint: str) -> CheckLine:
    try:
        return CheckLine(name=name, ok=True, detail=await ask())
    except AuthFailed as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=_KEY if name == "key" else _SCOPES)
    except (ProviderError, RunpodRefused) as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=hint)

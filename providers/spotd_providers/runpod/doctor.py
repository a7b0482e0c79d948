"""The checks of `spotctl doctor` at RunPod, one line for each finding."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed, ProviderError
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.checks import check_line, clock_line
from spotd_providers.kit.http import AnswerLost, HttpAnswer
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.settings import RunpodSettings

_KEY: Final = "create a key with read and write access at console.runpod.io/user/settings and put it in api_key"
_ANSWERS: Final = "check the network, at base_url and at RunPod's status page; the key was not judged"
_CATALOGUE: Final = "RunPod's catalogue does not answer; see its status page"
_SCOPES: Final = "give the key read and write access to pods and read access to billing"
NO_BALANCE: Final = "RunPod's REST API states no balance and no spend limit; see console.runpod.io/user/billing"


async def examine(client: RunpodClient, settings: RunpodSettings, services: Services) -> Sequence[CheckLine]:
    """Check key, clock, catalogue and billing. A failed check is a line, never an exception."""
    lines: list[CheckLine] = []
    answers: list[HttpAnswer] = []

    async def key() -> str:
        answers.append(await client.greeting())
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

    lines.append(await check_line("key", key, hint=_ANSWERS, refused=_KEY))
    if not answers:
        return tuple(lines)  # whatever is wrong would only be found again and again, each time after its time-out
    if answers[0].date is not None:
        lines.append(clock_line(abs(answers[0].date - services.clock.now()), who="RunPod"))
    lines.extend(await _creates(client))
    lines.append(await check_line("market", market, hint=_CATALOGUE, refused=_SCOPES))
    lines.append(await check_line("billing", billing, hint=_SCOPES))
    lines.append(CheckLine(name="balance", ok=True, detail=NO_BALANCE))
    return tuple(lines)


async def _creates(client: RunpodClient) -> list[CheckLine]:
    """Check that the key may create: a create that is refused for the key reads like one of a forbidden pool."""
    try:
        await client.may_create()
    except AuthFailed as exc:
        return [CheckLine(name="create", ok=False, detail=str(exc), hint=_KEY)]
    except (ProviderError, AnswerLost):
        pass  # nothing was found out about it, and whatever is wrong is found by the next line
    return []

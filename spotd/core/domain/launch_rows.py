"""The attempt and the intent of a launch that was admitted."""

from __future__ import annotations

from datetime import datetime

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.intents import Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.keys import attempt_key
from spotd.core.domain.policy import Policy
from spotd.core.domain.quotes import Quote
from spotd.core.domain.states import AttemptState
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour


def launch_rows(
    job: Job,
    agreed: Quote,
    ceiling: MicroUsdPerGpuHour,
    price_max: MicroUsdPerHour,
    policy: Policy,
    now: datetime,
) -> tuple[Attempt, Intent]:
    """Return the next attempt of the job, and the paid call that is owed for it."""
    number = job.attempts_made + 1
    item = Attempt(
        id=AttemptId(job=job.id, number=number),
        key=attempt_key(policy.install, job.id, number, policy.identity),
        state=AttemptState.INTENDED,
        quote=agreed,
        ceiling=ceiling,
        price_max=price_max,
        intended_at=now,
        account=policy.providers[agreed.offer.provider].account,
    )
    intent = Intent(
        id=launch_intent_id(item.key),
        kind=IntentKind.LAUNCH,
        provider=item.provider,
        key=item.key,
        state=IntentState.OPEN,
        created_at=now,
        attempt=item.id,
    )
    return item, intent

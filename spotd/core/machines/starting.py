"""How long a machine may start, and why it gets longer while nothing that it wrote could arrive.

Theory. A machine that never gave a sign of life is given up after its provider's time for a start. Where the checkpoint
store is known to take no writes from hosts, or was until a moment ago, its sign of life could not arrive: to give it up
would only buy the next one, whose could not arrive either. So its time is prolonged in small steps for as long as the
outage is known, and ends a little after it. Its budget, its provider's word and a limit end it all the same.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.policy import ProviderPolicy
from spotd.core.machines.loss_evidence import LossEvidence
from spotd.core.plans.plan_builder import PlanBuilder

PARTS_MAX: Final = 4
"""However long the store is away, no machine starts for longer than so many times its provider's time for a start."""
GRACE: Final = 2
"""After the outage a host gives a sign of life within so many times the silence that is borne of a host that runs."""


def start_deadline(
    builder: PlanBuilder, item: Attempt, rules: ProviderPolicy, evidence: LossEvidence, launched_at: datetime
) -> datetime:
    """When the machine is given up if it has not spoken since its launch; written down while that moves."""
    usual = launched_at + rules.provision_timeout
    limit = launched_at + PARTS_MAX * rules.provision_timeout
    known = usual if item.start_deadline is None else max(usual, item.start_deadline)
    grace = GRACE * builder.policy.silence_max
    if not evidence.hosts_cannot_write or known - builder.now > grace / 2:
        return known
    until = min(limit, builder.now + grace)
    if until <= known:
        return known
    if item.start_deadline is None:
        builder.event("attempt.unheard", "nothing that it writes can arrive: it is given more time", attempt=item.id)
    builder.put_attempt(replace(item, start_deadline=until))
    return until

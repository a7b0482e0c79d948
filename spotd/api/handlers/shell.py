"""Where a job's machine gives its user a shell."""

from __future__ import annotations

from spotd.api.errors import ApiUnavailable, StateConflict
from spotd.api.handlers.context import ContextHandlers
from spotd.api.schemas.jobs import ShellResponse
from spotd.daemon.market.guarded import guarded
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import GivesShell
from spotd_providers.contract.values import Power


class ShellHandlers(ContextHandlers):
    """Asks a provider for the address; spotd itself never connects and holds no key for it."""

    async def address(self, ref: str) -> ShellResponse:
        """Return the address.

        Raises:
            StateConflict: the job has no machine now, or its provider gives no shell.
            ApiUnavailable: the provider does not state it now.
        """
        context = self._context
        job_id = await context.find(ref)
        attempt = context.world().counting_attempt(job_id)
        if attempt is None or attempt.ref is None:
            raise StateConflict(f"job {ref} has no machine now", hint=f"spotctl why {ref}")
        entry = context.providers.get(attempt.provider)
        if entry is None or entry.provider is None:
            raise ApiUnavailable(f"{attempt.provider} is not open now", hint="spotctl doctor")
        provider = guarded(entry.provider, clock=context.clock, log=context.log)
        power = provider.capabilities.get(Power.SHELL)
        if power is None or not power.available or not isinstance(provider, GivesShell):
            reason = "" if power is None else power.reason
            raise StateConflict(reason or f"{attempt.provider} gives no shell", hint=f"spotctl logs -f {ref}")
        try:
            found = await provider.shell(attempt.ref)
        except ProviderError as exc:
            raise ApiUnavailable(str(exc) or type(exc).__name__, hint="try again in a minute") from exc
        return ShellResponse(
            job_id=job_id, attempt=attempt.id.number, host=found.host, port=found.port, user=found.user
        )

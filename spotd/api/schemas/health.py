"""The state of the daemon and its providers, as JSON."""

from __future__ import annotations

from typing import TypedDict

from spotd.api.schemas.envelope import Answer


class CapabilityResponse(TypedDict):
    """`reason` is the sentence for a power that is missing."""

    power: str
    available: bool
    reason: str


class AccountResponse(TypedDict):
    """The money at one provider.

    Attributes:
        balance_usd, balance_at: what is left of money paid in advance, and when the provider stated it; null where it
            does not, or not lately.
        spend_usd_h: what its machines cost per hour now.
        runway_s: how long the balance lasts at that pace; null where nothing is spent, or no balance is known.
    """

    balance_usd: float | None
    balance_at: str | None
    spend_usd_h: float
    runway_s: float | None


class ProviderResponse(AccountResponse):
    """Health of one provider. `detail` states in one line what is wrong, or how many offers it shows.

    Attributes:
        requests_h: requests of the last hour; before one has passed, as many as there would be at the pace so far.
        requests_min: requests of the last minute.
    """

    name: str
    title: str
    enabled: bool
    ok: bool
    detail: str
    offers: int
    machines: int
    last_poll_at: str | None
    last_listing_at: str | None
    fee_multiplier: float
    requests_h: int
    requests_min: int
    capabilities: list[CapabilityResponse]


class CheckResponse(TypedDict):
    """One finding of `doctor`. `area` is `daemon`, `store` or the provider's name.

    One that is `ok` and has a hint is a warning.
    """

    area: str
    name: str
    ok: bool
    detail: str
    hint: str


class DoctorResponse(Answer):
    ok: bool
    checks: list[CheckResponse]


class ChannelTestResponse(TypedDict):
    """Whether a channel of notifications took a message; `error` is why not, without its address."""

    channel: str
    ok: bool
    error: str


class ListingResponse(TypedDict):
    """What one provider lists as ours. `error` is empty when it answered completely."""

    provider: str
    machines: int
    complete: bool
    error: str


class ReconcileResponse(Answer):
    """The machines were listed and compared at once; `actions` names what follows, empty when all is in order."""

    listings: list[ListingResponse]
    actions: list[str]


class StatusResponse(TypedDict):
    """A summary of the daemon. `clock_scale` is above 1 in an accelerated local market.

    Attributes:
        paused: a sentence while nothing may be launched, else empty.
        jobs: number of jobs by state.
    """

    version: str
    install: str
    pid: int
    started_at: str
    clock_scale: float
    paused: str
    machines: int
    jobs: dict[str, int]
    spent_day_usd: float
    spent_month_usd: float


class HostResponse(TypedDict):
    """What is remembered of one host; counts fade by half in three days, losses and hours in fourteen.

    Attributes:
        failed_starts, slow_starts, early_losses: faults for which it ranks behind.
        losses, machine_h: machines that were lost there, over the machine time of attempts that are over.
        ranks_behind: share of its price by which it ranks behind others.
        at: when the newest of it happened.
        cools_until: until when it is avoided, null where it is not.
    """

    provider: str
    host: str
    failed_starts: float
    slow_starts: float
    early_losses: float
    losses: float
    machine_h: float
    ranks_behind: float
    at: str
    cools_until: str | None


class HostsResponse(Answer):
    """Hosts that jobs have used, the worst first. `more`: there are more than are shown."""

    hosts: list[HostResponse]
    more: bool


class ForgottenHostResponse(TypedDict):
    """A host of which nothing is remembered any more."""

    provider: str
    host: str

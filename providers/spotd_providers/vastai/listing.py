"""What vast.ai says of the account's machines: states, why one stopped or will, what is billed, and the bill itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Final

from pydantic import Field

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    HostId,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerHour,
    ProviderCharge,
    micro_usd,
)
from spotd_providers.kit.shapes import Lenient, Row, as_model, charges_of, readable_rows
from spotd_providers.kit.text import clean, key_of
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.wire import INCREASES, WHO, ChargeRow, Id, InstanceRow, Measure, instant

# From instance rows to machines: which of vast.ai's four state words decides, and why a machine stopped.
#
# Theory. A row holds four states and a text. `intended_status` is what was requested, `cur_state` and `next_state`
# are the contract with the market (does it hold a GPU?), `actual_status` is the last report of the host's agent about
# the container. The contract decides about money, the agent about progress:
#
# * the text decides first where the container does not run: a host that cannot start it says so there, and vast.ai then
#   stops the contract by itself, so that all four words are those of an outbid machine (recorded from the service).
# * contract stopped (all three agree) and we never stop machines: it was outbid, unless its time or the account's
#   credit ran out. The agent may still say `running`, `exited` or nothing.
# * wanted running while the contract is stopped ("Scheduling"): it waits for a GPU that somebody else has. Outbid, too,
#   except in the first moments of a new contract.
# * contract running: the agent's word counts. `exited` means that the container's own process ended.
# * `offline`, `unknown` and words never seen before say nothing about the machine; the daemon's patience decides.
#
# An outbid machine is not gone: its disk bills, and it wakes up by itself when its bid wins again.


SCHEDULING_GRACE: Final = timedelta(seconds=90)
_STARTING: Final = frozenset({"", "created", "loading", "rebooting", "recycling", "restarting", "scheduling"})
_BLIND: Final = frozenset({"offline", "unknown"})
_NEVER_RAN: Final = frozenset({"", "created", "loading", "scheduling"})
_HALTED: Final = _NEVER_RAN | {"exited", "stopped"}
"""Words of an agent whose container does not run: what its text says of a failure is then why."""
_HOST_FAILURES: Final = (
    "oci runtime",
    "failed to create shim task",
    "failed to create task for container",
    "failed to start container",
    "could not select device driver",
    "nvidia-container-cli",
    "cdi device",
    "cannot connect to the docker daemon",
    "no space left on device",
    "input/output error",
    "read-only file system",
)
_IMAGE_FAILURES: Final = (
    "docker_build() error",
    "manifest unknown",
    "pull access denied",
    "repository does not exist",
    "no such image",
    "no matching manifest",
    "invalid reference format",
)
_NOT_IN_THE_IMAGE: Final = re.compile(r"exec: .{0,200}(executable file not found|no such file or directory|permission)")
_FROM_DOCKER: Final = "error response from daemon"


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a machine and, if it stopped, why."""

    state: InstanceState
    loss: Loss | None = None
    detail: str = ""


def ref_of(contract: int) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(str(contract)))


def as_instance(row: InstanceRow, key: AttemptKey, *, now: datetime, bought_at: datetime | None = None) -> Instance:
    """Translate a row to a machine; `bought_at` is when this process bought it, by its own clock."""
    found = standing(row, now=now, bought_at=bought_at)
    return Instance(
        ref=ref_of(row.id),
        key=key,
        state=found.state,
        market=None if row.is_bid is None else (Market.SPOT if row.is_bid else Market.ON_DEMAND),
        host_id=None if row.machine_id is None else HostId(str(row.machine_id)),
        price=None if row.dph_base is None else MicroUsdPerHour(micro_usd(row.dph_base)),
        created_at=instant(row.start_date),
        loss=found.loss,
        detail=clean(found.detail or row.status_msg or ""),
        bid_floor=MicroUsdPerHour(micro_usd(row.min_bid)) if row.is_bid and row.min_bid is not None else None,
        billing=billing(row, found),
        ended_at=instant(row.end_date) if found.loss is Loss.EXPIRED else None,
    )


def billing(row: InstanceRow, found: Standing) -> Billing:
    """Return what vast.ai bills: nothing while the host is offline, the GPU while the container is up, else the disk.

    A frozen container holds its GPU, which bills. Of `unknown` and of words never seen before nothing is documented.
    """
    actual = _word(row.actual_status)
    if found.state in (InstanceState.ENDING, InstanceState.GONE):
        return Billing.UNKNOWN
    if actual == "offline":
        return Billing.NOTHING
    if "frozen" in (actual, _word(row.intended_status)):
        return Billing.FULL
    if found.state is InstanceState.RUNNING:
        return Billing.FULL
    return Billing.DISK if found.state in (InstanceState.PENDING, InstanceState.PAUSED) else Billing.UNKNOWN


def standing(row: InstanceRow, *, now: datetime, bought_at: datetime | None = None) -> Standing:
    """Decide the state from the row's four states and its text."""
    actual, current = _word(row.actual_status), _word(row.cur_state)
    following, intended = _word(row.next_state), _word(row.intended_status)
    fresh = _is_fresh(row, now, bought_at)
    if actual == "destroyed":
        return Standing(InstanceState.GONE)
    failure = _failure_of_start(row.status_msg or "", actual) if actual in _HALTED else None
    if intended == "destroyed" or (current == "unloaded" and not (fresh and intended == "running")):
        return Standing(InstanceState.ENDING)
    if "frozen" in (actual, intended):
        return Standing(InstanceState.PAUSED, Loss.HOST_LOST, "the host froze the container; its GPU still bills")
    if failure is not None:
        return Standing(InstanceState.PAUSED, failure)
    if current == "stopped" and intended == "stopped" and following in ("stopped", ""):
        return Standing(InstanceState.PAUSED, _why_stopped(row, now=now))
    if current == "stopped" and intended == "running":
        if fresh and actual in _STARTING:
            return Standing(InstanceState.PENDING)
        return Standing(InstanceState.PAUSED, _why_stopped(row, now=now))
    return _by_agent(row, actual, now=now)


def _by_agent(row: InstanceRow, actual: str, *, now: datetime) -> Standing:
    message = row.status_msg or ""
    if actual == "running":
        return Standing(InstanceState.RUNNING)
    if actual in _BLIND:
        return Standing(InstanceState.UNKNOWN, detail=f"vast.ai says the host is {actual}")
    if actual in _STARTING:
        return Standing(InstanceState.PENDING)
    if actual == "exited":
        return Standing(InstanceState.PAUSED, Loss.SELF, message or "the container's process ended")
    if actual == "stopped":
        return Standing(InstanceState.PAUSED, _why_stopped(row, now=now))
    return Standing(InstanceState.UNKNOWN, detail=f"vast.ai calls its state {actual!r}")


def _failure_of_start(message: str, actual: str) -> Loss | None:
    """Return whose fault a failed start is by the agent's message: the host's own or the image's."""
    said = message.strip().lower()
    if _NOT_IN_THE_IMAGE.search(said) or any(words in said for words in _IMAGE_FAILURES):
        return Loss.IMAGE_ERROR
    if any(words in said for words in _HOST_FAILURES):
        return Loss.PROVISION_FAILED
    # What else docker complains of: before the container ran it is the pull, afterwards it may be its stop.
    return Loss.IMAGE_ERROR if said.startswith(_FROM_DOCKER) and actual in _NEVER_RAN else None


def _why_stopped(row: InstanceRow, *, now: datetime) -> Loss:
    end = instant(row.end_date)
    if end is not None and end <= now:
        return Loss.EXPIRED
    # On-demand machines are not outbid, and we never stop one: what remains is the host.
    return Loss.HOST_LOST if row.is_bid is False else Loss.OUTBID


def _is_fresh(row: InstanceRow, now: datetime, bought_at: datetime | None) -> bool:
    # The two clocks may differ, and a row may not say when it began.
    known = (since for since in (instant(row.start_date), bought_at) if since is not None)
    return any(now - since < SCHEDULING_GRACE for since in known)


def _word(value: str | None) -> str:
    return (value or "").strip().lower()


# vast.ai's bill for each machine.


_DAY: Final = timedelta(days=1)
_COUNTED_DAYS: Final = re.compile(r"- (\d{1,4}) days?$")


def as_charges(row: ChargeRow, install: InstallId) -> list[ProviderCharge]:
    """Translate one row; no charges for machines that are not ours. The parts are used only if they add up."""
    key = key_of(row.metadata.label if row.metadata else None, install)
    contract = row.source.removeprefix("instance-")
    if key is None or not contract.isdecimal():
        return []
    start, end = instant(row.start), instant(row.end)
    if start is None or end is None:
        return []
    if _counts_last_day(row.description or "", start, end):
        end += _DAY
    parts = [(item.type, item.amount) for item in row.items]
    return charges_of(key, contract, start, end, total=row.amount, parts=parts, rounding=0.01, currency=row.currency)


def _counts_last_day(description: str, start: datetime, end: datetime) -> bool:
    """Whether `end` names the last day, which is in the row: `Instance 12345678 Charges - 4 days`."""
    found = _COUNTED_DAYS.search(description)
    if found is None or start.timestamp() % _DAY.total_seconds() or (end - start) % _DAY:
        return False
    return int(found[1]) == (end - start) // _DAY + 1


# Price increases that hosts announced for our machines: when each of these machines ends by that.
#
# A host that raises its price above that of a contract asks its client for consent. Until the client gives it the
# contract keeps its price and is no longer extended, so that the machine stops at the end of its contract. spotd never
# consents: the job saves before that instant and goes on elsewhere. The end counts as a preemption, by the host's will.
#
# Source: `vastai/api/price_increase.py` and `list__machine` of vast.ai's official client.


ASKED_EVERY: Final = timedelta(minutes=5)
AHEAD: Final = timedelta(minutes=5)
"""The notice is given so long before the end: what a machine does after its last save is lost."""
TIMEOUT_S: Final = 5.0
"""It is asked within a list of machines, which must not wait for it."""
KEPT: Final = timedelta(days=1)
"""For so long after its end a contract's stop has this reason, though vast.ai may name the increase no more."""
ROWS_MAX: Final = 10_000
_SECONDS_PER_HOUR: Final = 3600


class _Increase(Row):
    contract_id: Id
    contract_end_date: Measure
    new_gpu_costpersec: Annotated[Measure | None, Lenient] = None
    old_gpu_costpersec: Annotated[Measure | None, Lenient] = None

    @property
    def ends(self) -> datetime | None:
        return instant(self.contract_end_date)

    @property
    def words(self) -> str:
        """What the host asks for, as far as it is stated."""
        old, new = self.old_gpu_costpersec, self.new_gpu_costpersec
        if old is None or new is None or max(old, new) >= 1:
            return "its host asks for a higher price"
        return f"its host asks ${new * _SECONDS_PER_HOUR:.4f}/h in place of ${old * _SECONDS_PER_HOUR:.4f}/h"


class _Envelope(Row):
    pending_price_increases: Annotated[list[object], Field(max_length=ROWS_MAX)]


class PriceIncreases:
    """What is announced for the machines of the account, asked for every `ASKED_EVERY` at most."""

    def __init__(self, client: VastClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._asked_at: datetime | None = None
        self._known: Mapping[InstanceId, _Increase] = {}

    async def work_in(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return the machines, those with an announced increase with the end of their contract as a notice."""
        if not instances:
            return instances
        now = self._clock.now()
        if self._asked_at is None or not timedelta(0) <= now - self._asked_at < ASKED_EVERY:
            self._asked_at = now
            await self._ask()
        return tuple(self._with_notice(one, now) for one in instances)

    async def _ask(self) -> None:
        try:
            path = "/api/v0/instances/pending-price-increases/"
            value = await self._client.ask("GET", path, what=INCREASES, attempts=1, timeout_s=TIMEOUT_S)
            envelope = as_model(_Envelope, value, who=WHO, what=INCREASES)
        except ProviderError:
            return  # what was known holds: a machine that goes on in spite of it costs a save too many
        now = self._clock.now()
        over = {i: row for i, row in self._known.items() if row.ends is not None and now - KEPT < row.ends <= now}
        rows = readable_rows(_Increase, envelope.pending_price_increases)
        rows.sort(key=lambda row: row.contract_end_date, reverse=True)  # of two that end one contract the first counts
        self._known = over | {InstanceId(str(row.contract_id)): row for row in rows}

    def _with_notice(self, found: Instance, now: datetime) -> Instance:
        row = self._known.get(found.ref.instance_id)
        if row is None or row.ends is None:
            return found
        words = f"{row.words}; spotd does not consent, so its contract ends {row.ends:%Y-%m-%d %H:%M} UTC"
        if found.loss is Loss.EXPIRED:
            return replace(found, loss=Loss.PREEMPTED, detail=words)
        if found.loss is not None or row.ends <= now:
            return found
        return replace(found, notice_at=row.ends if row.ends - now <= AHEAD else None, detail=words)

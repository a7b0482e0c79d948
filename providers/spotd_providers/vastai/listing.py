"""The machines that vast.ai lists as ours, and whether the list is complete.

Absence is only ever concluded from a complete listing, so everything doubtful makes it incomplete: a later page that
fails, a page token that repeats, fewer rows than vast.ai says there are, a row that can not be attributed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    HostId,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Listing,
    Loss,
    Market,
    MicroUsdPerHour,
    ProviderCharge,
    micro_usd,
)
from spotd_providers.kit.calls import PAGES_MAX, Page, all_pages
from spotd_providers.kit.shapes import charges_of, require_few_charges, row_or_none, signed_micro_usd
from spotd_providers.kit.text import CONSOLE_LINES, clean, key_of, start_complaint
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.wire import WHO, ChargeRow, InstanceRow, VastRefused, instant

# From instance rows to machines: which of vast.ai's four state words decides, and why a machine stopped.
#
# Theory. A row holds four states and a text. `intended_status` is what was requested, `cur_state` and `next_state`
# are the contract with the market (does it hold a GPU?), `actual_status` is the last report of the host's agent about
# the
# container. The contract decides about money, the agent about progress:
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


def unreadable(contract: int, key: AttemptKey) -> Instance:
    """Describe a machine that certainly exists under our label, though its row is malformed."""
    return Instance(
        ref=ref_of(contract), key=key, state=InstanceState.UNKNOWN, detail="vast.ai's row about it is malformed"
    )


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


# The account's money, and vast.ai's bill for each machine.


_DAY: Final = timedelta(days=1)
_COUNTED_DAYS: Final = re.compile(r"- (\d{1,4}) days?$")


async def money_left(client: VastClient) -> tuple[int, datetime | None]:
    """Return the spendable micro-dollars (negative for a debt), and the server's clock.

    Raises:
        Unavailable: the account answer states no money.
    """
    try:
        reply, answer = await client.user()
    except VastRefused as exc:
        raise Unavailable(str(exc)) from exc
    left = reply.balance if reply.credit is None else reply.credit
    if left is None:
        raise Unavailable("vast.ai's account answer states neither credit nor balance")
    return signed_micro_usd(left), answer.date


async def charges_between(
    client: VastClient, services: Services, since: datetime, until: datetime
) -> tuple[ProviderCharge, ...]:
    """Return what our machines were billed in a span: one charge per kind (gpu, disk, bwd, bwu), or one `total`."""
    found: list[ProviderCharge] = []
    after: str | None = None
    judged = odd = 0
    for _ in range(PAGES_MAX):
        try:
            page = await client.charge_page(since, until, after=after)
        except VastRefused as exc:
            raise Unavailable(str(exc)) from exc
        judged += len(page.results)
        require_few_charges(judged, who=WHO)
        for raw in page.results:
            row = row_or_none(ChargeRow, raw)
            if row is None:
                odd += 1
            else:
                found.extend(as_charges(row, services.install))
        if not page.next_token or page.next_token == after:
            break
        after = page.next_token
    if odd:
        services.log.warning("vast.charge_unreadable", rows=odd)
    return tuple(found)


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


CREDIT_AGE_MAX: Final = timedelta(minutes=1)
_STOPPED_SOMEHOW: Final = frozenset({Loss.OUTBID, Loss.HOST_LOST})


class InstanceListing:
    """Listings of one account, with what was learned from them so far.

    Attributes:
        ours: contracts that carry our label, which may be destroyed without another read.
    """

    def __init__(
        self, client: VastClient, services: Services, *, console: Callable[[int, int], Awaitable[Sequence[str]]]
    ) -> None:
        self._client = client
        self._services = services
        self._console = console
        self._complaints: dict[InstanceId, str] = {}
        self.ours: set[InstanceId] = set()
        self._bought_at: dict[InstanceId, datetime] = {}
        self._unverified: dict[AttemptKey, Market] = {}
        self._credit_gone = (False, datetime.min.replace(tzinfo=UTC))

    def own(self, contract: int) -> None:
        """Record that this contract was bought here, now."""
        machine = ref_of(contract).instance_id
        self.ours.add(machine)
        self._bought_at[machine] = self._services.clock.now()

    def own_row(self, row: InstanceRow, key: AttemptKey) -> Instance:
        """Translate a row of ours to a machine."""
        bought_at = self._bought_at.get(ref_of(row.id).instance_id)
        return as_instance(row, key, now=self._services.clock.now(), bought_at=bought_at)

    def verify_later(self, key: AttemptKey, wanted: Market) -> None:
        """Check, when this machine is first listed, that it is of the market that was paid for."""
        self._unverified[key] = wanted

    async def read(self, label: str | None) -> Listing:
        """Return every machine under our install label (and this label, if given), all pages.

        Raises:
            AuthFailed, RateLimited, Unavailable: not even the first page came.
        """
        total: int | None = None

        async def page(after: str | None) -> Page:
            nonlocal total
            try:
                answer = await self._client.instance_page(label=label, after=after)
            except VastRefused as exc:
                raise Unavailable(str(exc)) from exc
            total = answer.total_instances
            return answer.instances, answer.next_token or None

        raw, whole = await all_pages(page)
        rows: dict[int, Instance] = {}
        seen: set[int] = set()
        complete = self._attribute(raw, rows, seen) and whole
        if label is None and total is not None and len(seen) < total:
            complete = False
        found = await self._apply_findings(tuple(rows.values()))
        self.ours.update(instance.ref.instance_id for instance in found)
        return Listing(instances=found, complete=complete, at=self._services.clock.now())

    def _attribute(self, page: Sequence[Any], rows: dict[int, Instance], seen: set[int]) -> bool:
        """Add the machines that are ours to `rows`; return whether every row could be attributed."""
        whole = True
        for raw in page:
            row = row_or_none(InstanceRow, raw)
            if row is not None:
                seen.add(row.id)
                key = key_of(row.label, self._services.install)
                if key is not None:
                    rows[row.id] = self.own_row(row, key)
                continue
            fields = raw if isinstance(raw, dict) else {}
            contract, label = fields.get("id"), fields.get("label")
            key = key_of(label, self._services.install)
            if isinstance(contract, int) and not isinstance(contract, bool) and 0 < contract < 2**53:
                seen.add(contract)
                if key is not None:
                    rows.setdefault(contract, unreadable(contract, key))
                    continue
            if key is not None or not isinstance(label, str):
                whole = False
        return whole

    async def _apply_findings(self, found: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Work three late findings into the machines.

        An empty account, an image that cannot start our script, and a bid that was sold on-demand.
        """
        if any(_stopped_somehow(i) for i in found) and await self._is_out_of_credit():
            found = tuple(
                replace(i, loss=Loss.BALANCE, detail="the account has no credit left") if _stopped_somehow(i) else i
                for i in found
            )
        return tuple([await self._verify_market(await self._explain_loss(instance)) for instance in found])

    async def _explain_loss(self, instance: Instance) -> Instance:
        """Read why a container ended by itself: in an image without Python only its console says so."""
        if instance.loss is not Loss.SELF:
            return instance
        machine = instance.ref.instance_id
        if machine not in self._complaints:
            try:
                self._complaints[machine] = start_complaint(await self._console(int(machine), CONSOLE_LINES))
            except ProviderError:
                self._complaints[machine] = ""
        complaint = self._complaints[machine]
        return replace(instance, loss=Loss.IMAGE_ERROR, detail=complaint) if complaint else instance

    async def _verify_market(self, instance: Instance) -> Instance:
        wanted = self._unverified.get(instance.key)
        if wanted is None or instance.market is None:
            return instance
        if instance.market is wanted:
            del self._unverified[instance.key]
            return instance
        detail = f"sold {instance.market.value} though {wanted.value} was asked for"
        self._services.log.error("vast.wrong_purchase", key=instance.key, reason=detail)
        try:
            await self._client.destroy(int(instance.ref.instance_id))
        except ProviderError:
            return replace(instance, detail=detail)  # the next listing tries again
        return replace(instance, state=InstanceState.ENDING, loss=Loss.PROVISION_FAILED, detail=detail)

    async def _is_out_of_credit(self) -> bool:
        gone, at = self._credit_gone
        now = self._services.clock.now()
        if now - at < CREDIT_AGE_MAX:
            return gone
        try:
            left, _ = await money_left(self._client)
        except ProviderError:
            return False
        self._credit_gone = (left <= 0, now)
        return left <= 0


def _stopped_somehow(instance: Instance) -> bool:
    return instance.state is InstanceState.PAUSED and instance.loss in _STOPPED_SOMEHOW

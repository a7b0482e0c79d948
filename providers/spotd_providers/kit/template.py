"""The template of an adapter: what every provider does with the machines of its account, written once.

An adapter states how its rows are read (`_label`, `_machine`) and which requests list, show, buy and end (`_page`,
`_row`, `_buy`, `_end`). The template says what follows from the answers, and it says it with the same care for all:

* Absence is only ever concluded from a complete list, so a page that is missing and a row that cannot be attributed
  make it incomplete.
* A call that names a machine is made only if the machine carries our label, or the provider does not show it at all.
* A new machine that is not what was agreed (its price, its market) is ended, and the launch says that it failed. If it
  cannot be ended, the outcome is unknown. One that cannot be read yet is checked when it is first listed.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, TypeVar

import anyio
from pydantic import BaseModel

from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NotSupported,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import CountsRequests, Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    Loss,
    Market,
    Power,
    ProviderCharge,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.calls import Page, all_pages, check_line, clock_line, rejected
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.shapes import CHARGE_ROWS_MAX, listed_reasons, readable_rows, require_few_charges
from spotd_providers.kit.text import clean, key_of, start_complaint

CONFIRM_READS: Final = 3
CONFIRM_WAIT: Final = timedelta(seconds=2)
END_REQUESTS: Final = 2
END_READS: Final = 3
END_WAIT: Final = timedelta(seconds=2)
SHOWN_WITHIN: Final = timedelta(minutes=3)
"""The worst lag of a list that was seen; later the same answer means that the machine is gone."""
UNDO_S: Final = 30.0
CONSOLE_WITHIN_S: Final = 10.0
"""Real seconds that a list waits for what one machine printed."""
REMEMBERED_MAX: Final = 10_000
KEY_NAME_DIGITS: Final = 12
"""Enough to tell keys from each other, and far too little to find one."""
T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)


class ProviderTemplate(ABC):
    """A provider of machines that carry our key; what is special of it is in a subclass."""

    name: ProviderName
    capabilities: Mapping[Power, Capability]
    who: ClassVar[str]
    machine: ClassVar[str] = "instance"
    """The provider's word for a machine."""
    mark: ClassVar[str] = "label"
    """What a machine carries of ours."""
    no_login: ClassVar[str] = ""
    """Why no login of a registry is taken, as `ProviderTraits.private_images` says it; empty where one is."""
    ids: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z0-9_-]{1,128}")
    judged_prices: ClassVar[frozenset[Market]] = frozenset(Market)
    """Markets in which the price that a new machine shows is held against what was agreed."""
    confirms_ends: ClassVar[bool] = True
    """Whether a machine is read again after its end was accepted; otherwise the next list shows it."""
    shown_within: ClassVar[timedelta] = SHOWN_WITHIN

    def __init__(self, services: Services, *clients: CountsRequests) -> None:
        self._services = services
        self._clients = clients
        self._complaints: dict[InstanceId, str] = {}
        self._ours: dict[InstanceId, datetime] = {}
        self._unconfirmed: dict[InstanceId, LaunchRequest] = {}
        self._not_shown_yet: dict[InstanceId, datetime] = {}

    # What an adapter states.

    @abstractmethod
    async def _page(self, _token: str | None) -> Page:
        """Return the rows of one page of the account's machines, and the token of the next as `all_pages` takes it.

        What of it could not be read (one of several hosts is silent) stands in it as a `Rejected`.
        """

    @abstractmethod
    async def _row(self, ref: InstanceRef) -> Any | None:
        """Return the row of one machine; `None` where the provider says that it does not exist."""

    @abstractmethod
    def _label(self, raw: Any) -> str | None:
        """Return the label of a row, empty where it has none; `None` for a row that may be anybody's."""

    @abstractmethod
    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        """Translate a row that carries this key; `None` if it does not even name a machine."""

    @abstractmethod
    async def _buy(self, request: LaunchRequest) -> Instance:
        """Buy one machine by one request; return what the answer says of it, its price only if it says so."""

    @abstractmethod
    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        """Ask for the end of this machine; return once that is accepted, or the machine does not exist.

        `False` where the provider says in its own words that it does not: then nothing more is asked.
        """

    async def _rows(self, _key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
        """Return the rows of the account's machines, and whether these are all that there are.

        With a key it is enough that they hold every machine of this key.
        """
        return await all_pages(self._page)

    def _shows_terms(self, instance: Instance) -> bool:
        """Whether what is known of a new machine shows its market and price, so that it is judged at once."""
        is_priced = instance.price is not None or instance.market not in self.judged_prices
        return is_priced and instance.market is not None

    # What follows from it.

    @property
    def requests_sent(self) -> int:
        """How many requests its clients have sent since it was opened."""
        return sum(one.requests_sent for one in self._clients)

    async def launch(self, request: LaunchRequest) -> Launched:
        """Buy one machine at no more than the agreed price, and check what was bought."""
        if request.login is not None and self.no_login:
            raise NotSupported(self.no_login)
        if request.offer.market is Market.ON_DEMAND and request.offer.gpu_price > request.price_max:
            raise PriceMoved(f"{self.who} sells {request.offer.offer_id} for more than was agreed")
        instance = await self._buy(request)
        self._own(instance)
        if not self._shows_terms(instance):  # the answer only names it
            self._not_shown_yet[instance.ref.instance_id] = self._services.clock.now()
            bound(self._not_shown_yet)
        return Launched(instance=await self._confirmed(instance, request))

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key; only a complete list proves that there is none."""
        if key_of(key, self._services.install) is None:
            return ()
        listing = await self._listing(key)
        found = tuple(i for i in listing.instances if i.key == key and i.state is not InstanceState.GONE)
        if not found and not listing.complete:
            raise Unavailable(
                f"{self.who}'s list of {self.machine}s is incomplete, so it does not prove that {key} is absent"
            )
        return found

    async def instances(self) -> Listing:
        """Return every machine under our install label, all pages; a row that cannot be read makes it incomplete."""
        return await self._listing(None)

    async def _listing(self, wanted: AttemptKey | None) -> Listing:
        rows, whole = await self._rows(wanted)
        found: dict[InstanceRef, Instance] = {}  # a name may be there once in each scope
        rejected: list[Rejected] = []
        for raw in rows:
            if isinstance(raw, Rejected):
                rejected.append(raw)
                continue
            label = self._label(raw)
            key = key_of(label, self._services.install)
            instance = None if key is None else self._machine(raw, key)
            if instance is not None:
                found[instance.ref] = instance
                self._own(instance)
                self._not_shown_yet.pop(instance.ref.instance_id, None)
            elif key is not None:
                rejected.append(Rejected(offer_id=str(key), reason="its row names no machine"))
            elif label is None:
                rejected.append(Rejected(offer_id="unreadable", reason="the row does not show whose machine it is"))
        confirmed = [await self._confirm_listed(instance) for instance in found.values()]
        return Listing(
            instances=await self._explain(tuple(confirmed)),
            complete=whole and not rejected,
            at=self._services.clock.now(),
            rejected=listed_reasons(rejected),
        )

    async def terminate(self, ref: InstanceRef) -> None:
        """End this machine; an absent one is a success, and one that is not ours is refused."""
        await self._require_ours(ref)
        await self._end(ref)

    async def _end(self, ref: InstanceRef) -> None:
        """Ask for the end of a machine and see that it is no longer shown as alive, asking once more if it is.

        Machines were seen to run and bill on after an accepted end; and one that ends already may refuse to end.
        """
        for _ in range(END_REQUESTS):
            try:
                is_known = await self._ask_end(ref)
            except Unavailable:
                if self.confirms_ends and await self._has_ended(ref):
                    return
                raise
            if is_known is False:
                self._require_shown_before(ref)
            if is_known is False or not self.confirms_ends:
                return
            for read in range(END_READS):
                if read:
                    await self._services.clock.sleep(END_WAIT)
                try:
                    if await self._has_ended(ref):
                        return
                except AuthFailed:
                    raise
                except ProviderError:
                    self._require_shown_before(ref)
                    return  # accepted; the next list shows whether it took effect
        raise Unavailable(f"{self.who} accepted the end of {self.machine} {ref.instance_id} and still shows it")

    async def _has_ended(self, ref: InstanceRef) -> bool:
        raw = await self._row(ref)
        if raw is None:
            self._require_shown_before(ref)
            return True
        shown = self._machine(raw, AttemptKey(""))
        return shown is not None and shown.state in (InstanceState.ENDING, InstanceState.GONE)

    def _require_shown_before(self, ref: InstanceRef) -> None:
        """Require that a machine that does not exist is not one that was bought a moment ago and is not shown yet.

        Raises:
            Unavailable: it may be.
        """
        bought_at = self._not_shown_yet.get(ref.instance_id)
        if bought_at is not None and self._services.clock.now() - bought_at < self.shown_within:
            raise Unavailable(f"{self.who} does not show its new {self.machine} {ref.instance_id} yet")

    async def _running_row(self, ref: InstanceRef) -> Any:
        """Return the row of a machine of ours that runs.

        Raises:
            Unavailable: it does not, or not yet.
        """
        await self._require_ours(ref)
        raw = await self._row(ref)
        shown = None if raw is None else self._machine(raw, AttemptKey(""))
        if shown is None or shown.state is not InstanceState.RUNNING:
            raise Unavailable(f"the {self.machine} {clean(ref.instance_id)} does not run")
        return raw

    async def account(self) -> str:
        """Return a name of the key, for providers that name no account: another key's list proves nothing of ours."""
        digest = hashlib.sha256((self._services.credential or "").encode()).hexdigest()
        return f"key {digest[:KEY_NAME_DIGITS]}"

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return the listed machines with what only further requests show of them; none by default."""
        return instances

    async def _complaint(self, ref: InstanceRef, console: Callable[[], Awaitable[Sequence[str]]]) -> str:
        """Return the error that our own start script reported as the last line of a console, which is read once.

        In an image without Python nothing else says why the machine ended.
        """
        machine = ref.instance_id
        if machine not in self._complaints:
            try:
                with anyio.fail_after(CONSOLE_WITHIN_S):
                    self._complaints[machine] = start_complaint(await console())
            except (ProviderError, TimeoutError):
                self._complaints[machine] = ""
            bound(self._complaints)
        return self._complaints[machine]

    async def _bill(
        self,
        read: Callable[[str | None], Awaitable[Page]],
        model: type[R],
        charges: Callable[[R], Iterable[ProviderCharge]],
    ) -> tuple[ProviderCharge, ...]:
        """Return the charges in the rows of all pages of a bill; a row that cannot be read is logged.

        Raises:
            Unavailable: it breaks off, or has more rows than are judged. Of a part nothing could be concluded.
        """
        raw, whole = await all_pages(read, rows_max=CHARGE_ROWS_MAX + 1)
        require_few_charges(len(raw), who=self.who)
        if not whole:
            raise Unavailable(f"{self.who}'s bill breaks off")
        rows = readable_rows(model, raw)
        if odd := len(raw) - len(rows):
            self._services.log.warning(self._event("charge_unreadable"), rows=odd)
        return tuple(charge for row in rows for charge in charges(row))

    def _price_limit(self, request: LaunchRequest) -> int:
        """Return the most that a machine may be shown to cost, in micro-dollars per hour.

        The same price comes once as a sum and once as a product: a float's last digit for each GPU is no rise.
        """
        return request.price_max + request.offer.gpu_count

    async def _require_ours(self, ref: InstanceRef) -> None:
        """Require that a machine carries our label, or is not shown at all.

        Raises:
            RequestRejected: it is another's, or the reference is none of this provider's.
        """
        number = str(ref.instance_id)
        if self.ids.fullmatch(number) is None:
            raise RequestRejected(
                f"{clean(number)!r} is no {self.who} {self.machine} id", field="ref", reason=f"not a {self.machine} id"
            )
        if ref.instance_id in self._ours:
            return
        raw = await self._row(ref)
        if raw is not None and key_of(self._label(raw), self._services.install) is None:
            raise RequestRejected(
                f"{self.who} {self.machine} {number} does not carry the {self.mark} of this installation",
                field="ref",
                reason="not ours",
            )

    def _event(self, what: str) -> str:
        return f"{self.name}.{what}"

    def _own(self, instance: Instance) -> None:
        """Remember that a machine carries our label, so that it may be ended without another read."""
        self._ours.setdefault(instance.ref.instance_id, instance.created_at or self._services.clock.now())
        bound(self._ours)

    async def _confirmed(self, instance: Instance, request: LaunchRequest) -> Instance:
        """Return the new machine as it is shown, once that shows that it is what was agreed."""
        for read in range(CONFIRM_READS):
            if self._shows_terms(instance):
                break
            if read:
                await self._services.clock.sleep(CONFIRM_WAIT)
            try:
                raw = await self._row(instance.ref)
            except ProviderError as exc:
                self._services.log.warning(
                    self._event("confirmation_failed"), key=request.key, reason=type(exc).__name__
                )
                break
            if raw is not None:
                self._not_shown_yet.pop(instance.ref.instance_id, None)
                instance = self._machine(raw, request.key) or instance
        fault = self._fault(instance, request)
        if fault is not None:
            self._unconfirmed[instance.ref.instance_id] = request  # where it cannot be ended yet, each list tries again
            bound(self._unconfirmed)
            await self._undo(instance.ref, request.key, str(fault))
            del self._unconfirmed[instance.ref.instance_id]
            raise fault
        if not self._shows_terms(instance):
            self._unconfirmed[instance.ref.instance_id] = request
            bound(self._unconfirmed)
        return instance

    async def _confirm_listed(self, instance: Instance) -> Instance:
        """Check a machine that could not be read when it was new; one that is not what was agreed is ended."""
        request = self._unconfirmed.get(instance.ref.instance_id)
        if request is None:
            return instance
        fault = self._fault(instance, request)
        if fault is not None:
            try:
                await self._undo(instance.ref, request.key, str(fault))
            except ProviderError:
                return replace(instance, detail=str(fault))  # it stays unconfirmed, so the next list tries again
            instance = replace(
                instance, state=InstanceState.ENDING, loss=Loss.PROVISION_FAILED, detail=clean(str(fault))
            )
        if fault is not None or self._shows_terms(instance):
            del self._unconfirmed[instance.ref.instance_id]
        return instance

    def _fault(self, instance: Instance, request: LaunchRequest) -> ProviderError | None:
        """Return what is wrong with a purchase, as an error; `None` if it is what was agreed."""
        if instance.market is not None and instance.market is not request.offer.market:
            return ContractViolation(
                f"{self.who} sold {instance.ref.instance_id} {instance.market} though {request.offer.market} was asked"
            )
        is_judged = request.offer.market in self.judged_prices
        if is_judged and instance.price is not None and instance.price > self._price_limit(request):
            asked, agreed = instance.price / MICRO, request.price_max / MICRO
            return PriceMoved(f"{self.who} charges ${asked:.4f}/h where ${agreed:.4f}/h was agreed")
        return None

    async def _undo(self, ref: InstanceRef, key: AttemptKey, reason: str) -> None:
        """End a machine that is not what was agreed, also while the launch is being cancelled.

        Raises:
            OutcomeUnknown: it could not be ended.
        """
        self._services.log.error(self._event("wrong_purchase"), key=key, machine=ref.instance_id, reason=reason)
        cause: ProviderError | None = None
        with anyio.CancelScope(shield=True), anyio.move_on_after(UNDO_S):
            try:
                await self._end(ref)
                return
            except ProviderError as exc:
                cause = exc
        raise OutcomeUnknown(f"{reason}; ending {self.machine} {ref.instance_id} failed", key=key) from cause


def require_launchable(
    request: LaunchRequest,
    *,
    who: str,
    extra: Iterable[str],
    script_bytes_max: int,
    key_chars_max: int,
    image_chars_max: int | None = None,
) -> None:
    """Require that a provider can be asked for this: its own offer, a script, a name and an image within its limits.

    Raises:
        RequestRejected: it would be refused for ever.
    """
    if not all(request.offer.extra.get(name) for name in extra):
        raise rejected(who, "offer", f"it is not an offer of {who}")
    size = len(request.start_script.encode())
    if size > script_bytes_max:
        raise rejected(who, "start_script", f"it has {size} of at most {script_bytes_max} bytes")
    if "\0" in request.start_script:
        raise rejected(who, "start_script", "it holds a NUL")
    if len(request.key) > key_chars_max:
        raise rejected(who, "key", f"a name has at most {key_chars_max} characters")
    if image_chars_max is not None and not 0 < len(request.image) <= image_chars_max:
        raise rejected(who, "image", f"an image name has 1 to {image_chars_max} characters")


def as_unreadable(ref: InstanceRef, key: AttemptKey, *, who: str) -> Instance:
    """Describe a machine that certainly exists under our label, though its row is malformed."""
    return Instance(ref=ref, key=key, state=InstanceState.UNKNOWN, detail=f"{who}'s row about it is malformed")


def bound(remembered: dict[Any, Any]) -> None:
    """Forget the oldest beyond the bound."""
    while len(remembered) > REMEMBERED_MAX:
        del remembered[next(iter(remembered))]


# The lines of `spotctl doctor`: the key first, since without it whatever is wrong would only be found again and again.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A line that takes a request. `refused` and `unanswered` replace the hint as in `check_line`."""

    name: str
    ask: Callable[[], Awaitable[str]]
    hint: str
    refused: str = ""
    unanswered: str = ""

    async def line(self) -> CheckLine:
        return await check_line(self.name, self.ask, hint=self.hint, refused=self.refused, unanswered=self.unanswered)


async def examine(
    greet: Callable[[], Awaitable[T]],
    then: Callable[[T], Iterable[Check | CheckLine]],
    *,
    accepted: str | Callable[[T], str],
    hint: str,
    refused: str = "",
    unanswered: str = "",
) -> tuple[CheckLine, ...]:
    """Check the key by `greet`, and if it is accepted what `then` makes of the answer, one line each."""
    answers: list[T] = []

    async def key() -> str:
        answers.append(await greet())
        return accepted if isinstance(accepted, str) else accepted(answers[0])

    lines = [await check_line("key", key, hint=hint, refused=refused, unanswered=unanswered)]
    further = then(answers[0]) if answers else ()
    lines.extend([one if isinstance(one, CheckLine) else await one.line() for one in further])
    return tuple(lines)


def clock_lines(answer: HttpAnswer, services: Services, *, who: str) -> list[CheckLine]:
    """Compare this computer's clock with that of an answer, if the answer names a time."""
    if answer.date is None:
        return []
    try:
        skew = abs(answer.date - services.clock.now())
    except TypeError:
        return []  # a date without a zone
    return [clock_line(skew, who=who)]

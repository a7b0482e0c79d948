"""A plain market of virtual machines: what its adapters share beyond the template.

Such a market lists prices, boots a machine with a script, and knows no bids, no notice, no console and no hosts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar
from urllib.parse import quote

from pydantic import Field

from spotd_providers.contract.errors import (
    AuthFailed,
    NotSupported,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Balance,
    Capability,
    CheckLine,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Listing,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
    ShellAddress,
    micro_usd,
)
from spotd_providers.kit.boundary import AdapterPlugin, AdapterSettings, ApiSettings, all_but, is_loopback
from spotd_providers.kit.calls import Page, Rest, rejected
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Meaning, RestClient, RestRefused
from spotd_providers.kit.shapes import ROWS_MAX, Lenient, Row, row_or_none
from spotd_providers.kit.template import Check, ProviderTemplate, bound, clock_lines, examine, require_launchable
from spotd_providers.kit.text import begins_like_ours, key_of
from spotd_providers.kit.vm_boot import boot_script

GB_TO_MB: Final = 1024
SCRIPT_BYTES_MAX: Final = 100_000
NAME_CHARS_MAX: Final = 64
SWEEP_EVERY: Final = timedelta(minutes=10)
SWEPT_MAX: Final = 200
"""What one sweep deletes at most; the next one goes on."""
FAILURES_MAX: Final = 5
"""After so many refused deletions a sweep ends: the list waits for it. The next one begins with the others."""
PAGE_ROWS: Final = 100
UNSEEN_MAX: Final = 5
"""Pages of missing machines that are read for one list, which waits for them; the next one goes on."""
SIZE_TEXT_MAX: Final = 40
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Size = Annotated[float, Field(ge=0, lt=10_000_000, allow_inf_nan=False)]
S = TypeVar("S", bound=ApiSettings)
Ip = Annotated[str, Field(pattern=r"^[0-9A-Fa-f.:]{2,45}$")]


class VmSettings(AdapterSettings):
    """What the settings of every such market have."""

    container: Literal["docker", "none"] = Field(
        default="docker",
        description='"docker" runs the job\'s image with the GPUs; "none" runs the job on the machine image itself.',
    )


class Named(Row):
    """A row with an id."""

    id: Id


def row_name(raw: Any, field: str) -> str:
    """Return what a row is called in the reason why it is rejected: its id, or `unreadable` if it has none."""
    name = raw.get(field) if isinstance(raw, dict) else None
    return name if isinstance(name, str) and row_or_none(Named, {"id": name}) is not None else "unreadable"


def listed_price(value: Any) -> MicroUsdPerHour:
    """Read a price that may be a text or a number.

    Raises:
        ValueError: it is none, or it is nothing.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool) or len(str(value)) > SIZE_TEXT_MAX:
        raise ValueError("not a price")
    price = micro_usd(value)
    if price == 0:
        raise ValueError("a price of nothing")
    return MicroUsdPerHour(price)


def price_or_none(value: Any) -> MicroUsdPerHour | None:
    """Read a price; `None` where there is none that can be understood."""
    try:
        return listed_price(value)
    except ValueError:
        return None


def usd_balance(amount: Any, currency: Any, *, who: str) -> Balance:
    """Read what is left in an account; a debt is nothing left.

    Raises:
        Unavailable: it is no amount of US dollars.
    """
    if str(currency).lower() != "usd":
        raise Unavailable(f"{who} states a balance that is not in US dollars")
    try:
        is_debt = isinstance(amount, int | float) and amount < 0
        return Balance(available=MicroUsd(0 if is_debt else micro_usd(amount)))
    except (TypeError, ValueError) as exc:
        raise Unavailable(f"{who} states a balance that is no amount of money") from exc


class _Tag(Row):
    key: str
    value: str


def label_in(raw: Any, install: InstallId, *, names: Sequence[str], tag: str = "") -> str | None:
    """Return what names the owner of a row that has an id: a key of ours in these fields or this tag, else the first.

    `None` where a field is no text, or where only a later one begins like a key of ours: what it was may be lost.
    """
    if not isinstance(raw, dict) or row_or_none(Named, {"id": raw.get("id")}) is None:
        return None
    said = [raw.get(name) for name in names]
    if any(one is not None and not isinstance(one, str) for one in said):
        return None
    tags = raw.get("tags")
    found = (row_or_none(_Tag, one) for one in tags[:100]) if isinstance(tags, list) else ()
    labels = [*(one or "" for one in said), *(one.value for one in found if one is not None and one.key == tag)]
    ours = next((label for label in labels if key_of(label, install) is not None), None)
    if ours is None and not labels[0] and any(begins_like_ours(label, install) for label in labels):
        return None
    return ours or next((label for label in labels if label), "")


def missing_powers(who: str, **reasons: str) -> dict[Power, str]:
    """Return the sentences about what a plain market lacks; `reasons`, by the names of powers, replace them."""
    usual = {
        Power.BID_CHANGE: f"{who} sells at list price, so there is no bid to change",
        Power.NOTICES: f"{who} gives no notice before a machine ends, so checkpoint regularly",
        Power.PORTS: "only ssh leads into a machine: spotctl forward uses it with your own key",
        Power.LOGS: f"{who} keeps no console of its machines",
        Power.BILLING: f"{who}'s API states no charges; its website shows them",
        Power.PRICE_HISTORY: f"spotd reads only the prices of now of {who}",
        Power.GANG: f"spotd rents the machines of {who} one by one",
        Power.REPLACE: "it starts no machines that reach each other, of which one could be replaced",
        Power.STOP_RESUME: f"a stopped machine may be billed on at {who}, so spotd never stops one",
        Power.HOST_IDENTITY: f"{who} does not say on which host a machine runs",
        Power.SELF_TERMINATE: f"a machine at {who} that shuts itself down is billed on, so the daemon ends it",
        Power.CAPACITY_SCORES: f"{who} says whether a type can be had now, not how likely a launch is to succeed",
    }
    return {**usual, **{Power[name]: reason for name, reason in reasons.items()}}


def user_data(
    request: LaunchRequest,
    *,
    who: str,
    extra: Iterable[str],
    container: str,
    script_bytes_max: int = SCRIPT_BYTES_MAX,
    user_data_bytes_max: int = 2 * SCRIPT_BYTES_MAX,
    key_chars_max: int = NAME_CHARS_MAX,
    beside: str = "",
) -> str:
    """Build the script of a machine's first boot; `beside` is as in `boot_script`.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(request, who=who, extra=extra, script_bytes_max=script_bytes_max, key_chars_max=key_chars_max)
    try:
        return boot_script(
            image=request.image,
            start_script=request.start_script,
            container=container,
            has_gpu=request.offer.gpu_count > 0,
            bytes_max=user_data_bytes_max,
            beside=beside,
        )
    except ValueError as exc:
        raise rejected(who, "image", str(exc)) from exc


class Leftover(Named):
    """What a machine may leave at its provider and bills, or holds a secret; its name is the machine's key."""

    name: str
    status: Annotated[str | None, Lenient] = None
    instance_id: str | None = None


class VmMarket(ProviderTemplate):
    """A provider of virtual machines at list prices, over one REST client."""

    key_hint: ClassVar[str] = ""
    """What to do where the key is refused."""
    list_path: ClassVar[str]
    label_fields: ClassVar[Sequence[str]] = ("name",)
    label_tag: ClassVar[str] = ""
    """Where a machine carries its key, the surest first."""
    leftovers: ClassVar[Mapping[str, str]] = {}
    """Paths of what machines may leave, with what it is called; empty where nothing is left."""

    def __init__(self, client: RestClient, services: Services, missing: Mapping[Power, str]) -> None:
        super().__init__(services, client)
        self._client = client
        self._sweeps = Rest(services.clock)
        self._alive: dict[InstanceId, AttemptKey] = {}
        self._asked_to_end: dict[str, None] = {}
        self._left_before: set[tuple[str, str]] = set()
        self._undeleted: set[tuple[str, str]] = set()
        self.capabilities: Mapping[Power, Capability] = all_but(missing)

    @abstractmethod
    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return what is on sale now."""

    def _address(self, _raw: Any) -> ShellAddress | None:
        """Return where ssh reaches the machine of a row; `None` as long as the row shows no address."""
        return None

    def _label(self, raw: Any) -> str | None:
        return label_in(raw, self._services.install, names=self.label_fields, tag=self.label_tag)

    def _further_checks(self) -> Sequence[Check | CheckLine]:
        """Return the lines of the doctor that only this market has."""
        return ()

    def _at(self, path: str) -> str:
        """Return one of these paths as the API takes it."""
        return path

    def _leftover(self, raw: Any) -> Any:
        """Return a row of what may be left, in the words of `Leftover`."""
        return raw

    def _is_left(self, _what: str, _one: Leftover, _state: InstanceState | None) -> bool:
        """Whether this is of no use any more; the state is that of the machine of its name, `None` for none."""
        return _state is None

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return the machine's own ssh server, which has a key of the user."""
        if not self.capabilities[Power.SHELL].available:
            raise NotSupported(self.capabilities[Power.SHELL].reason)
        await self._require_ours(ref)
        address = self._address(await self._row(ref))
        if address is None:
            raise Unavailable(f"{self.who} shows no address of {self.machine} {ref.instance_id} yet")
        return address

    async def check(self) -> Sequence[CheckLine]:
        """Check key, clock, market and money, one line each."""

        async def greet() -> HttpAnswer:
            path = self._at(self.list_path)
            answer, _ = await self._client.answer("GET", path, what=f"the list of {self.machine}s")
            return answer

        async def market() -> str:
            page = await self.offers(OfferQuery())
            spot = sum(one.market is Market.SPOT for one in page.offers)
            found = f"{len(page.offers)} offers now, {spot} of them spot, {len(page.rejected)} rows not offered"
            return f"{found}; {page.note}" if page.note else found

        async def money() -> str:
            balance: Balance = await self.balance()  # type: ignore[attr-defined] # declared by Power.BALANCE
            return f"${balance.available / MICRO:.2f}"

        def further(answer: HttpAnswer) -> Iterable[Check | CheckLine]:
            has = self.capabilities[Power.BALANCE]
            said = CheckLine(name="balance", ok=True, detail=has.reason)
            paid = Check(name="balance", ask=money, hint=f"{self.who} does not state what is left in the account")
            return (
                *clock_lines(answer, self._services, who=self.who),
                Check(name="market", ask=market, hint=f"{self.who}'s prices do not answer; see its status page"),
                paid if has.available else said,
                *self._further_checks(),
            )

        return await examine(
            greet,
            further,
            accepted=f"accepted, can list {self.machine}s",
            hint=f"check the network, base_url and {self.who}'s status page; the key was not judged",
            refused=self.key_hint,
        )

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        if instance.state is InstanceState.GONE:
            self._alive.pop(instance.ref.instance_id, None)
        else:
            self._alive[instance.ref.instance_id] = instance.key
            bound(self._alive)

    async def _listing(self, wanted: AttemptKey | None) -> Listing:
        """Read the list; a machine that it leaves out is absent only if its own page says so, too.

        A list in one bare answer states no count, so a sick server's empty one would end every job.
        """
        listing = await super()._listing(wanted)
        shown = {one.ref.instance_id for one in listing.instances}
        unseen = [(ref, key) for ref, key in self._alive.items() if ref not in shown and wanted in (None, key)]
        hidden = [
            Rejected(offer_id=str(key), reason="the list leaves it out, and its own page does not say that it is gone")
            for number, (ref, key) in enumerate(unseen)
            if number >= UNSEEN_MAX or not await self._is_absent(ref)
        ]
        return replace(listing, complete=False, rejected=(*listing.rejected, *hidden)) if hidden else listing

    async def _is_absent(self, number: InstanceId) -> bool:
        try:
            is_absent = await self._has_ended(InstanceRef(provider=self.name, instance_id=number))
        except AuthFailed:
            raise
        except ProviderError:
            return False
        if is_absent:
            del self._alive[number]
        return is_absent

    async def instances(self) -> Listing:
        """Return every machine of ours; after a complete list, delete what ended machines left, now and then."""
        listing = await super().instances()
        if self.leftovers and listing.complete and self._sweeps.left() <= timedelta(0):
            self._sweeps.take(SWEEP_EVERY)
            states = {one.key: one.state for one in listing.instances if one.state is not InstanceState.GONE}
            await self._sweep(states)
        return listing

    async def _sweep(self, states: Mapping[AttemptKey, InstanceState]) -> None:
        """Delete what carries a key of ours and was of no use in this sweep and in the one before it.

        Two sweeps are minutes apart: a launch that is under way has its script and volume before its machine is listed.
        """
        found: set[tuple[str, str]] = set()
        for path, what in self.leftovers.items():
            try:
                rows = await self._left(path, f"the list of {what}s")
            except ProviderError as exc:
                self._services.log.warning(self._event("leftovers_unread"), kind=what, reason=type(exc).__name__)
                continue
            for raw in rows:
                one = row_or_none(Leftover, self._leftover(raw))
                key = None if one is None else key_of(one.name, self._services.install)
                if one is not None and key is not None and self._is_left(what, one, states.get(key)):
                    found.add((path, one.id))
        # Those that refused before come last, so that a few of them keep no other one billed.
        due = sorted(found & self._left_before, key=lambda one: (one in self._undeleted, one))
        self._undeleted &= found
        failures = 0
        for path, number in due[:SWEPT_MAX]:
            try:
                await self._discard(path, number)
            except ProviderError as exc:
                self._undeleted.add((path, number))
                kind, reason = self.leftovers[path], type(exc).__name__
                self._services.log.warning(self._event("leftover_undeleted"), kind=kind, reason=reason)
                failures += 1
                if failures == FAILURES_MAX:
                    break
            else:
                found.discard((path, number))
                self._undeleted.discard((path, number))
        self._left_before = found

    async def _left(self, path: str, what: str) -> Sequence[Any]:
        """Return the rows of what may be left, of all pages."""
        rows = (await self._client.ask_or_absent("GET", self._at(path), what=what) or {}).get("rows")
        return rows if isinstance(rows, list) else ()

    async def _discard(self, path: str, number: str) -> None:
        """Delete one leftover, for good."""
        what = f"deleting a {self.leftovers[path]}"
        await self._client.ask_or_absent("DELETE", f"{path}/{number}", what=what, json_body={"is_permanent": True})
        self._services.log.info(self._event("leftover_deleted"), kind=self.leftovers[path])

    async def _list(self, path: str, what: str, *, name: str = "rows") -> list[Any]:
        """Read a list that one answer holds whole."""
        rows = (await self._client.ask("GET", path, what=what)).get(name)
        if not isinstance(rows, list) or len(rows) > ROWS_MAX:
            raise Unavailable(f"{self.who}'s answer to {what} is no list")
        return rows

    async def _offset_page(self, path: str, what: str, token: str | None) -> Page:
        """Read one page of `{"data", "total_count"}`; the token is where it begins, and the row before.

        It begins with the last row of the page before: where that has moved, another one may have been passed over.
        """
        offset, _, last = (token or "0:").partition(":")
        answer = await self._client.ask("GET", f"{path}?offset={offset}&limit={PAGE_ROWS}", what=what)
        rows, total = answer.get("data"), answer.get("total_count")
        if not isinstance(rows, list) or type(total) is not int:
            raise Unavailable(f"{self.who}'s answer to {what} is no list with a count")
        names = [row_name(one, "id") for one in rows]
        if last and names[:1] != [last]:
            raise Unavailable(f"{self.who}'s list changed while it was read ({what})")
        end, fresh = int(offset) + len(rows), rows[1:] if last else rows
        if end >= total:
            return fresh, None
        return fresh, f"{end - 1}:{names[-1]}" if len(rows) > 1 else ""

    def _path(self, ref: InstanceRef) -> str:
        return f"{self.list_path.rstrip('/')}/{quote(ref.instance_id, safe='')}"

    async def _page(self, _token: str | None) -> Page:
        return await self._list(self.list_path, f"the list of {self.machine}s"), None

    async def _row(self, ref: InstanceRef) -> Any | None:
        answer = await self._client.ask_or_absent("GET", self._path(ref), what=f"a {self.machine}")
        if answer is not None and answer.get("id") != ref.instance_id:
            raise Unavailable(f"{self.who}'s answer about {self.machine} {ref.instance_id} is about none")
        return answer

    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        if await self._client.ask_or_absent("DELETE", self._path(ref), what="an end") is None:
            return False
        self._note_end(ref)
        return None

    def _note_end(self, ref: InstanceRef) -> None:
        """Remember that we ended this machine: what ends without that was taken away."""
        self._asked_to_end[ref.instance_id] = None
        bound(self._asked_to_end)

    async def _purchase(self, path: str, body: Mapping[str, Any], request: LaunchRequest) -> Mapping[str, Any]:
        """Send the purchase; a refusal in no known words is of the offer, if that is not on sale any more."""
        try:
            return await self._client.buy("POST", path, body, key=request.key)
        except RestRefused as exc:
            raise await self._purchase_refusal(exc, request) from exc

    async def _purchase_refusal(self, exc: RestRefused, request: LaunchRequest) -> ProviderError:
        """Return the leaf of the contract for a purchase that was refused so."""
        if exc.meaning in (Meaning.ABSENT, Meaning.REJECTED) and not await self._is_sold(request):
            return OfferGone(f"{self.who} does not sell {request.offer.offer_id} now: {exc}")
        return exc.of_purchase()

    def _new_machine(self, answer: Mapping[str, Any], request: LaunchRequest) -> Instance:
        """Return the new machine that the answer to a purchase names.

        Raises:
            OutcomeUnknown: it names none.
        """
        row = row_or_none(Named, answer)
        if row is None:
            raise OutcomeUnknown(f"{self.who}'s answer to a launch names no {self.machine}", key=request.key)
        ref = InstanceRef(provider=self.name, instance_id=InstanceId(row.id))
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING)

    async def _is_sold(self, request: LaunchRequest) -> bool:
        try:
            page = await self.offers(OfferQuery(markets=(request.offer.market,)))
        except ProviderError:
            return True
        return not page.complete or request.offer.offer_id in {one.offer_id for one in page.offers}


def market_plugin(
    kind: type[VmMarket],
    settings_model: type[S],
    open_by: Callable[[S, Services], AbstractAsyncContextManager[Provider]],
    *,
    title: str,
    missing: Mapping[Power, str],
    shell_reason: str,
    **traits: Any,
) -> AdapterPlugin[S]:
    """Return the descriptor of such a market; `shell_reason` says what a shell of its machines takes."""

    def traits_by(settings: S) -> ProviderTraits:
        return ProviderTraits(
            start_script_bytes_max=SCRIPT_BYTES_MAX,
            hosts_share_filesystem=is_loopback(settings.base_url),
            private_images=Capability(available=False, reason=kind.no_login),
            **traits,
        )

    return AdapterPlugin(
        name=kind.name,
        title=title,
        settings_model=settings_model,
        needs_credential=True,
        traits_by=traits_by,
        open_by=open_by,
        powers={**all_but(missing), Power.SHELL: Capability(available=True, reason=shell_reason)},
    )

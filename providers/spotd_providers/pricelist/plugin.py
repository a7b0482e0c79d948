"""A price list as a spotd provider: prices without an API, and machines by three commands of the user's own.

Without commands its prices are shown, compared and tested against, and nothing is launched. With them, `launch` runs
once and is never repeated: what it did is found out by `list`, whose rows carry the key. What the commands are given
and what they answer is in docs/providers/pricelist.md.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    NotSupported,
    OutcomeUnknown,
    QuotaExceeded,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but
from spotd_providers.kit.calls import Page, check_line, judge_apart, raise_for_status, rejected
from spotd_providers.kit.http import AnswerLost, Http, open_http
from spotd_providers.kit.shapes import ROWS_MAX, decode, decode_or_none, listed_reasons, row_or_none
from spotd_providers.kit.template import ProviderTemplate
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import SCRIPT_BYTES_MAX, Named, missing_powers, user_data
from spotd_providers.pricelist.rows import (
    LIST_BYTES_MAX,
    PROVIDER,
    WHO,
    PricelistSettings,
    SellerRow,
    offer_of,
    rows_of,
)

NO_LOGIN: Final = "a login would have to be in the start script, which every process of the machine may read"
NO_COMMAND: Final = "its prices are compared and nothing is launched: providers.pricelist.launch names no command"
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
NO_CAPACITY, QUOTA, NO_BALANCE, AUTH, REJECTED = 10, 11, 12, 13, 14
"""Exit codes of `launch` that say that nothing happened, and why. `AUTH` says it of the other commands, too."""
_WHO: Final = "the seller"
_MISSING: Final = missing_powers(
    _WHO,
    BALANCE="a price list knows no account",
    BILLING="a price list knows no bills, so prices and hours are multiplied",
    SHELL="a price list says nothing of how its machines are reached",
    CAPACITY_SCORES="a price list says what is sold, not whether it can be had now",
)


class Commands:
    """The user's own programs, run without a shell, with an environment of their own and a bound on time and output."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self.requests_sent = 0

    async def run(self, command: Sequence[str], *, about: Mapping[str, str], given: str = "") -> tuple[int, bytes]:
        """Run a command once; return its exit code and what it prints.

        Raises:
            Unavailable: it certainly did not run.
            AnswerLost: it may have had its effect.
        """
        self.requests_sent += 1
        environ = {"HOME": str(Path.home()), "PATH": os.defpath, "LANG": "C.UTF-8", **about}
        try:
            process = await anyio.open_process(
                list(command), stderr=subprocess.DEVNULL, env=environ, start_new_session=True
            )
        except (OSError, ValueError) as exc:
            raise Unavailable(f"{Path(command[0]).name} cannot be started ({type(exc).__name__})") from exc
        try:
            with anyio.fail_after(self._timeout_s):
                text = await _exchange(process, given.encode())
                return await process.wait(), text
        except (OSError, TimeoutError, anyio.BrokenResourceError) as exc:
            raise AnswerLost(f"{Path(command[0]).name} gave no whole answer") from exc
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await process.aclose()


async def _exchange(process: anyio.abc.Process, given: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise OSError("no pipes")
    with suppress(anyio.BrokenResourceError):  # a program need not read what it is given
        await process.stdin.send(given)
    await process.stdin.aclose()
    text = bytearray()
    async for piece in process.stdout:
        text += piece
        if len(text) > ANSWER_BYTES_MAX:
            raise OSError("the answer is larger than any that makes sense")
    return bytes(text)


class PricelistProvider(ProviderTemplate):
    """One list, and the machines that its commands show."""

    name = PROVIDER
    who = WHO
    machine = "machine"
    mark = "key"
    no_login = NO_LOGIN
    judged_prices = frozenset()

    def __init__(self, settings: PricelistSettings, services: Services, commands: Commands, http: Http | None) -> None:
        super().__init__(services, *((commands,) if http is None else (commands, http)))
        self._settings = settings
        self._commands = commands
        self._http = http
        self.capabilities: Mapping[Power, Capability] = all_but(_MISSING)

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every row of the list that holds today."""
        at = self._services.clock.now()
        is_json = (self._settings.url or str(self._settings.file)).endswith(".json")
        body = await self._list()
        rows = await judge_apart(lambda: rows_of(body, is_json=is_json), size=len(body))
        found = [offer_of(row, at) for row in rows.rows]
        offers = tuple(one for one in found if isinstance(one, Offer) and one.market in query.markets)
        return OfferPage(
            offers=offers,
            rejected=listed_reasons((*rows.rejected, *(one for one in found if isinstance(one, Rejected)))),
            complete=not rows.is_cut and bool(rows.rows or not rows.rejected),
            at=at,
        )

    async def check(self) -> Sequence[CheckLine]:
        """Read the list, and ask for machines if there are commands."""

        async def prices() -> str:
            page = await self.offers(OfferQuery())
            odd = "; ".join(f"{one.offer_id}: {one.reason}" for one in page.rejected[:3])
            return f"{len(page.offers)} offers, {len(page.rejected)} rows not offered" + (odd and f" ({odd})")

        async def machines() -> str:
            rows, _ = await self._page(None)
            return f"list shows {len(rows)} machines; launch and end are not tried"

        lines = [await check_line("prices", prices, hint="mend the file, or the address of the list")]
        if self._settings.launch is None:
            return (*lines, CheckLine(name="commands", ok=True, detail=NO_COMMAND))
        return (*lines, await check_line("commands", machines, hint="run the command of providers.pricelist.list"))

    async def _list(self) -> bytes:
        if self._http is not None and self._settings.url is not None:
            try:
                answer = await self._http.read("GET", urlsplit(self._settings.url).path or "/")
            except Unavailable as exc:
                raise Unavailable(f"{WHO} does not answer: {exc}") from exc
            raise_for_status(answer, who=WHO, what="a reading")
            if answer.status != 200:
                raise Unavailable(f"{WHO} answered {answer.status}")
            return answer.body
        if self._settings.file is None:
            raise Unavailable("providers.pricelist names neither file nor url")
        try:
            if not self._settings.file.is_file():
                raise Unavailable(f"{self._settings.file} is no file")
            with self._settings.file.open("rb") as file:
                return file.read(LIST_BYTES_MAX + 1)
        except OSError as exc:
            raise Unavailable(f"{self._settings.file} cannot be read ({type(exc).__name__})") from exc

    async def _page(self, _token: str | None) -> Page:
        if self._settings.list is None:
            return (), None
        try:
            code, text = await self._commands.run(self._words("list"), about=self._about())
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc
        self._require_success("list", code, text)
        rows = decode(text, who="the list command")
        if not isinstance(rows, list) or len(rows) > ROWS_MAX:
            raise Unavailable("the list command prints no JSON array")
        return rows, None

    async def _row(self, ref: InstanceRef) -> Any | None:
        rows, _ = await self._page(None)
        named = [row_or_none(Named, one) for one in rows]
        if None in named:
            raise Unavailable("the list command prints a row that names no machine")
        return next((raw for raw, one in zip(rows, named, strict=True) if one and one.id == ref.instance_id), None)

    def _label(self, raw: Any) -> str | None:
        row = row_or_none(SellerRow, raw)
        return None if row is None else row.key

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(SellerRow, raw)
        if row is None:
            return None
        ref = InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id))
        known = row.state in set(InstanceState)
        return Instance(ref=ref, key=key, state=InstanceState(row.state) if known else InstanceState.UNKNOWN)

    async def _buy(self, request: LaunchRequest) -> Instance:
        if self._settings.launch is None:
            raise NotSupported(NO_COMMAND)
        script = user_data(request, who=WHO, extra=("name",), container=self._settings.container)
        about = self._about(
            SPOTD_KEY=request.key,
            SPOTD_NAME=request.offer.extra["name"],
            SPOTD_MARKET=request.offer.market,
            SPOTD_IMAGE=request.image,
            SPOTD_DISK_GB=str(request.disk_gb),
            SPOTD_PRICE_MAX=f"{request.price_max / MICRO:.6f}",
        )
        try:
            code, text = await self._commands.run(self._words("launch"), about=about, given=script)
        except AnswerLost as exc:
            raise OutcomeUnknown(str(exc), key=request.key) from exc
        said = _reason(text)
        match code:
            case 0:
                row = row_or_none(Named, decode_or_none(text, who=WHO))
                if row is None:
                    raise OutcomeUnknown("the launch command names no machine", key=request.key)
            case code if code == NO_CAPACITY:
                raise NoCapacity(f"the launch command has no capacity{said}")
            case code if code == QUOTA:
                raise QuotaExceeded(f"the launch command says that a limit is used up{said}")
            case code if code == NO_BALANCE:
                raise NoBalance(f"the launch command says that there is no money left{said}")
            case code if code == AUTH:
                raise AuthFailed(f"the launch command says that its key is refused{said}")
            case code if code == REJECTED:
                raise rejected(WHO, "request", f"the launch command refuses it{said}")
            case _:
                raise OutcomeUnknown(f"the launch command ended with {code}{said}", key=request.key)
        ref = InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id))
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING, market=request.offer.market)

    async def _ask_end(self, ref: InstanceRef) -> None:
        if self._settings.end is None:
            return  # nothing can have been launched without it
        try:
            code, text = await self._commands.run((*self._words("end"), ref.instance_id), about=self._about())
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc
        self._require_success("end", code, text)

    def _words(self, name: str) -> list[str]:
        return shlex.split(getattr(self._settings, name))

    def _about(self, **further: str) -> dict[str, str]:
        own = {} if self._services.credential is None else {"SPOTD_API_KEY": self._services.credential}
        return {"SPOTD_INSTALL": self._services.install, **own, **further}

    @staticmethod
    def _require_success(name: str, code: int, text: bytes) -> None:
        """Require that a command succeeded.

        Raises:
            AuthFailed, Unavailable: it did not.
        """
        if code == AUTH:
            raise AuthFailed(f"the {name} command says that its key is refused{_reason(text)}")
        if code != 0:
            raise Unavailable(f"the {name} command ended with {code}{_reason(text)}")


def _reason(text: bytes) -> str:
    """Return the `error` that a command printed as JSON, to be put behind a sentence."""
    said = decode_or_none(text, who=WHO)
    error = said.get("error") if isinstance(said, dict) else None
    return f": {quote_safely(error)}" if isinstance(error, str) else ""


def _traits(settings: PricelistSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        provision_timeout=timedelta(minutes=40),
        quote_ttl=timedelta(minutes=15),
        offers_every_min=timedelta(minutes=5) if settings.url is not None else timedelta(0),
        private_images=Capability(available=False, reason=NO_LOGIN),
        no_launches=NO_COMMAND if settings.launch is None else "",
    )


@asynccontextmanager
async def _open(settings: PricelistSettings, services: Services) -> AsyncIterator[Provider]:
    async with AsyncExitStack() as stack:
        http = None
        if settings.url is not None:
            parts = urlsplit(settings.url)
            http = await stack.enter_async_context(open_http(f"{parts.scheme}://{parts.netloc}"))
        yield PricelistProvider(settings, services, Commands(settings.timeout), http)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="price list",
    settings_model=PricelistSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
    powers=all_but(_MISSING),
    tried="lists and commands of its tests",
)

"""The answers of `spotctl init`, and the commented configuration that they make.

A ceiling can be chosen before any poll by what a GPU-hour cost in the last week. A market that keeps its past states it
in pages (`Power.PRICE_HISTORY`). They are laid into a price history of their own, in a folder that goes away, and are
asked as the daemon's history is, in effective prices: with the fee that the configuration states. A figure needs a day
of prices at least; less is said, and nothing proposed.
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import anyio

from spotd.config.credentials import CredentialRef, InstalledPlugins, resolve_credential
from spotd.config.load import load
from spotd.config.model import Config
from spotd.daemon.clock import SystemClock
from spotd.daemon.log import Redactor
from spotd.daemon.market.guarded import guarded
from spotd.history import HISTORY_FILE, IMPORTED_FILE, History, HistoryUnavailable, PriceTerms, SeriesQuery
from spotd.paths import create_whole
from spotd.service.main import open_store, provider_settings
from spotd.setup import SetupRefused
from spotd_jobs.objects.api import ObjectStore, StoreError
from spotd_jobs.spec.problems import BadValue, FileProblems
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import KnowsPastPrices, PriceHistoryPage, Provider, ProviderPlugin, Services
from spotd_providers.contract.values import MICRO, CheckLine, InstallId, Market, Power, ProviderName

WEEK: Final = timedelta(days=7)
DEADLINE_S: Final = 45.0
"""For one market: a person waits for it."""
PAGES_MAX: Final = 500
KNOWN_MIN: Final = timedelta(days=1)
GPUS_SHOWN: Final = 12
_MIDDLE: Final = 2
"""The median among the shares of a `Bucket`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWeek:
    """What is known of the last week.

    Attributes:
        lines: one sentence for each GPU, the one with most offers first.
        notes: why there is nothing, or not all.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...]


async def past_week(
    markets: Mapping[ProviderName, tuple[AbstractAsyncContextManager[Provider], int]], folder: Path, now: datetime
) -> PastWeek:
    """Ask each market for its last week.

    Args:
        markets: how to open each one, and its fee in parts per million.
        folder: for files that are of no use afterwards.
    """
    notes: list[str] = []
    prices = 0
    history = History(folder / HISTORY_FILE, imports=folder / IMPORTED_FILE)
    try:
        for name, (opened, _) in markets.items():
            taken, note = await _take_over(history, name, opened, now)
            prices += taken
            notes += [note] if note else []
        fees = PriceTerms(fee_ppm={name: fee for name, (_, fee) in markets.items()})
        lines = _sentences(history, fees, now) if prices else []
    except HistoryUnavailable as exc:
        return PastWeek(lines=(), notes=(*notes, str(exc)))
    finally:
        history.close()
    if prices and not lines:
        notes.append("the records of the last week cover less than a day")
    return PastWeek(lines=tuple(lines), notes=tuple(notes))


async def _take_over(
    history: History, name: ProviderName, opened: AbstractAsyncContextManager[Provider], now: datetime
) -> tuple[int, str]:
    """Lay the market's week into the history; return how many prices came, and what is to be said of it."""
    prices = 0
    try:
        with anyio.fail_after(DEADLINE_S):
            async with opened as provider:
                power = provider.capabilities.get(Power.PRICE_HISTORY)
                if not isinstance(provider, KnowsPastPrices) or power is None or not power.available:
                    return 0, ""
                async for page in _pages(provider, now - WEEK):
                    prices += history.take_over(page, now=int(now.timestamp()))
    except TimeoutError:
        return prices, f"not all past prices of {name} came within {DEADLINE_S:.0f} s"
    except ProviderError as exc:
        return prices, f"{name} states no past prices now: {str(exc) or type(exc).__name__}"
    return prices, ""


async def _pages(provider: KnowsPastPrices, since: datetime) -> AsyncIterator[PriceHistoryPage]:
    after = ""
    for _ in range(PAGES_MAX):
        page = await provider.price_history(since, after=after)
        yield page
        if not page.next or page.next == after:
            return
        after = page.next


def _sentences(history: History, fees: PriceTerms, now: datetime) -> list[str]:
    until = int(now.timestamp())
    since = until - int(WEEK.total_seconds())
    found = history.ask(SeriesQuery(since=since, until=until), fees)
    rows = [
        (bucket.offers, group.gpu, group.market, bucket.quantiles[_MIDDLE], until - bucket.begins)
        for group in found.groups
        for bucket in group.buckets
        if until - bucket.begins >= KNOWN_MIN.total_seconds()
    ]
    rows.sort(key=lambda row: (-row[0], row[1], row[2].value))
    return [
        f"{gpu}: half of the last {_span(known_s)} was under ${median / MICRO:.4g}"
        f" ({'spot' if market is Market.SPOT else 'on demand'})"
        for _, gpu, market, median, known_s in rows[:GPUS_SHOWN]
    ]


def _span(seconds: int) -> str:
    days = round(seconds / 86_400)
    return "week" if days >= WEEK.days else "day" if days == 1 else f"{days} days"


STORE_ACCESS: Final = "store-access"
STORE_SECRET: Final = "store-secret"  # noqa: S105 - the name of a key, not a key
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_FIGURE: Final = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?")
_KEY_CHARS_MAX: Final = 4096
_HEAD: Final = """\
# Configuration of spotd, written by `spotctl init`. `spotd config example` prints every key with its meaning.
# After a change: `spotd config check`, then reload the service, or send SIGHUP to `spotd run`.
"""


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a secret is: in a file or variable of the user's, or typed just now."""

    kind: Literal["file", "env", "typed"]
    value: str = field(repr=False)


def names_key_place(text: str) -> bool:
    """Whether the text says where a key is kept, and is not the key itself."""
    kind, _, rest = text.strip().partition(":")
    return kind in ("env", "file") and bool(rest)


def read_key_source(text: str) -> KeySource:
    """Return where the secret is that the text names, or the secret itself.

    Raises:
        SetupRefused: it cannot be one; the text is not repeated.
    """
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind == "env" and rest:
        return KeySource("env", rest)
    if colon and kind == "file" and rest:
        return KeySource("file", str(Path(rest).expanduser().absolute()))
    if not text:
        raise SetupRefused("the key is empty")
    if len(text) > _KEY_CHARS_MAX or not text.isascii() or not text.isprintable() or " " in text:
        raise SetupRefused("this is no key: it holds blanks or characters that no key has", hint="paste it again")
    return KeySource("typed", text)


@dataclass(slots=True, kw_only=True)
class ConfigDraft:
    """What was answered so far.

    Attributes:
        keys: secrets by name: that of a market, or `store-access` and `store-secret`.
        titles: what a person calls each market.
        ceilings: dollars per GPU-hour, as they were written.
    """

    markets: dict[str, str] = field(default_factory=dict)
    keys: dict[str, KeySource] = field(default_factory=dict)
    bucket: str = ""
    endpoint_url: str = ""
    region: str = ""
    ceilings: dict[str, str] = field(default_factory=dict)
    budget_day: str = ""

    def text(self, references: Mapping[str, str]) -> str:
        """Return the configuration; `references` say for each secret where it is, in TOML."""
        return _HEAD + "".join(f"\n{line}" for line in self._lines(references)) + "\n"

    def _lines(self, references: Mapping[str, str]) -> Iterator[str]:
        yield "# What may be spent; what running machines are committed to counts as spent."
        yield "[budget]"
        yield "# Dollars from midnight to midnight UTC."
        yield f"day = {self.budget_day}" if self.budget_day else "# day = 10.0"
        yield ""
        yield "# Highest effective price in dollars per GPU-hour, by GPU; a job's own max_price goes before it."
        yield "[ceilings]"
        yield from (f"{_key(gpu)} = {price}" for gpu, price in self.ceilings.items())
        if not self.ceilings:
            yield "# H100 = 2.60"
        if self.bucket:
            yield ""
            yield "# The bucket that checkpoints, logs and results pass through; its rights: docs/stores.md."
            yield "[store]"
            yield f"url = {quoted(self.bucket)}"
            if self.endpoint_url:
                yield f"endpoint_url = {quoted(self.endpoint_url)}"
            if self.region:
                yield f"region = {quoted(self.region)}"
            if STORE_ACCESS in self.keys:
                yield f"access_key = {references[STORE_ACCESS]}"
                yield f"secret_key = {references[STORE_SECRET]}"
        for name, title in self.markets.items():
            yield ""
            yield f"# {title}"
            yield f"[providers.{_key(name)}]"
            if name in self.keys:
                yield f"api_key = {references[name]}"


def require_figures(draft: ConfigDraft) -> None:
    """Raise `SetupRefused` for an amount that is no plain figure, which would change the meaning of the file."""
    for amount in (*draft.ceilings.values(), *((draft.budget_day,) if draft.budget_day else ())):
        if not _FIGURE.fullmatch(amount):
            raise SetupRefused(f"{amount!r} is no amount of dollars", hint="write it like 2.60")


def quoted(text: str) -> str:
    """Return the text as TOML writes it."""
    return json.dumps(text, ensure_ascii=False)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quoted(name)


# Live checks of what was answered: the draft read as a configuration, each market's key, and the bucket.


CHECK_DEADLINE_S: Final = 60.0
_VARIABLE: Final = "SPOTD_INIT_KEY"
_PROBE: Final = b"spotd"


class _Quiet:
    """A logger without output: what is found out is the answer."""

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


class DraftChecks:
    """Checks of one draft; secrets stay in memory.

    Args:
        environ: variables that go over the configuration, as they do for the daemon.
    """

    def __init__(self, draft: ConfigDraft, environ: Mapping[str, str]) -> None:
        self._draft = draft
        self._environ = environ
        self._plugins = InstalledPlugins()
        self._clock = SystemClock()
        self._redactor = Redactor()

    def plugin(self, name: str) -> ProviderPlugin:
        """Return the plugin of a market.

        Raises:
            SetupRefused: there is none of this name, or what it needs is not installed.
        """
        try:
            return self._plugins.load(name)
        except BadValue as exc:
            raise SetupRefused(str(exc), hint=exc.hint) from exc

    def is_local(self, name: str) -> bool:
        """Whether the market's machines see this computer's files, so that it needs no key and no bucket."""
        plugin = self.plugin(name)
        return plugin.traits(plugin.settings_model()).hosts_share_filesystem

    def secret(self, source: KeySource) -> str:
        """Return the secret from where it is.

        Raises:
            SetupRefused: it is not there.
        """
        if source.kind == "typed":
            return source.value
        try:
            ref = CredentialRef.model_validate({source.kind: source.value})
            return resolve_credential(ref, environ=self._environ).get_secret_value()
        except BadValue as exc:
            raise SetupRefused(str(exc), hint="check the path, or the name, of what you wrote") from exc
        except ValueError:
            raise SetupRefused("env: takes the name of a variable, and file: a path") from None

    def config(self) -> Config:
        """Return the draft as the daemon would read it.

        Raises:
            SetupRefused: it cannot be used, with the first reason.
        """
        names = {name: f"{_VARIABLE}_{number}" for number, name in enumerate(self._draft.keys)}
        references = {name: f'{{ env = "{variable}" }}' for name, variable in names.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.toml"
            path.write_text(self._draft.text(references), encoding="utf-8")
            try:
                return load(path, environ=self._with_secrets(), plugins=self._plugins).config
            except FileProblems as exc:
                problem = exc.problems[0]
                raise SetupRefused(f"{problem.key}: {problem.message}", hint=problem.hint) from exc

    def _with_secrets(self) -> dict[str, str]:
        given = {f"{_VARIABLE}_{n}": self.secret(source) for n, source in enumerate(self._draft.keys.values())}
        self._redactor.register(given.values())
        # Variables about the bucket wait until there is one.
        early = "" if self._draft.bucket else "SPOTD_STORE__"
        kept = {name: value for name, value in self._environ.items() if not (early and name.startswith(early))}
        return {**kept, **given}

    def market(self, name: str) -> Sequence[CheckLine]:
        """Ask the market itself whether the key works, and return what else it found.

        Raises:
            SetupRefused: the key is wrong, or nothing answers.
        """
        config = self.config()
        one = next(one for one in config.providers if one.name == name)
        settings = provider_settings(one, config, self._with_secrets())
        if settings.last_error:
            raise SetupRefused(settings.last_error)
        found = anyio.run(self._lines, one.plugin, settings.settings, settings.credential)
        # What a server answers may repeat what it was sent.
        lines = [replace(line, detail=self._redactor.clean(line.detail)) for line in found]
        if not lines[0].ok:
            title, detail = one.plugin.title, lines[0].detail
            raise SetupRefused(detail if title in detail else f"{title}: {detail}", hint=lines[0].hint)
        return lines

    async def _lines(self, plugin: ProviderPlugin, settings: Any, credential: str | None) -> Sequence[CheckLine]:
        try:
            with anyio.fail_after(CHECK_DEADLINE_S):
                async with self._opened(plugin, settings, credential) as provider:
                    lines = await provider.check()
        except ProviderError as exc:
            return [CheckLine(name="key", ok=False, detail=str(exc) or type(exc).__name__)]
        except TimeoutError:
            return [CheckLine(name="key", ok=False, detail=f"no answer within {CHECK_DEADLINE_S:.0f} s")]
        return lines or [CheckLine(name="key", ok=True, detail="the plugin checks nothing")]

    @asynccontextmanager
    async def _opened(self, plugin: ProviderPlugin, settings: Any, credential: str | None) -> AsyncIterator[Provider]:
        with tempfile.TemporaryDirectory() as folder:
            services = Services(
                install=InstallId("init"),
                clock=self._clock,
                rng=Random(),
                log=_Quiet(),
                state_dir=Path(folder),
                credential=credential,
            )
            async with plugin.open(settings, services) as provider:
                yield guarded(provider, clock=self._clock, log=_Quiet())

    def past_week(self) -> PastWeek:
        """Return what a GPU-hour cost in the last week, by the records of the markets that were chosen."""
        config, secrets = self.config(), self._with_secrets()
        markets = {}
        for one in config.providers:
            settings = provider_settings(one, config, secrets)
            if not settings.last_error and not self.is_local(one.name):
                opened = self._opened(one.plugin, settings.settings, settings.credential)
                markets[settings.name] = (opened, settings.fee_ppm)
        with tempfile.TemporaryDirectory() as folder:
            found = anyio.run(past_week, markets, Path(folder), self._clock.now())
        return replace(found, notes=tuple(self._redactor.clean(note) for note in found.notes))

    def bucket(self) -> str:
        """Write, read and delete an object, and see that hosts can be permitted to write; return what was found.

        Raises:
            SetupRefused: one of these is not possible.
        """
        with tempfile.TemporaryDirectory() as folder:
            place, opened, _ = open_store(self.config(), Path(folder), self._with_secrets())
            try:
                return _exercise(opened)
            except StoreError as exc:
                hint = "docs/stores.md lists the rights that its key needs, and which stores can be used"
                raise SetupRefused(self._redactor.clean(str(exc)), hint=hint) from exc
            except Exception as exc:
                # boto3 raises what it likes for an address or a key that it cannot understand.
                raise SetupRefused(f"{place} cannot be used: {type(exc).__name__}") from exc


def _exercise(opened: Callable[[], ObjectStore]) -> str:
    objects = opened()
    key = f"doctor/init-{uuid.uuid4().hex}"
    objects.put(key, _PROBE)
    try:
        if objects.get(key, bytes_max=64) != _PROBE:
            raise StoreError("what was written to the bucket is not what is read from it")
    finally:
        objects.delete([key])
    objects.grant_upload("doctor/", expires=datetime.now(UTC) + timedelta(minutes=1), size_max=1024)
    return "written, read and deleted; hosts can be permitted to write"


# Writes the configuration and the files of its keys: all of them or none, and never over what is there.


def write_setup(config: Path, text: str, keys: Mapping[Path, str], *, others_read: bool) -> None:
    """Write everything.

    Args:
        others_read: whether the configuration, which names keys and holds none, may be read by a service's own user.

    Raises:
        SetupRefused: one of the files is there already, or cannot be written; nothing was left behind.
    """
    made: list[Path] = []
    folders: list[Path] = []
    at = config
    with _without_interrupts():
        try:
            for at in (config, *keys):
                folders += _folders(at.parent, 0o755 if others_read and at is config else 0o700)
            for at, secret in keys.items():
                create_whole(at, f"{secret}\n", mode=0o600)
                made.append(at)
            at = config
            create_whole(config, text, mode=0o644 if others_read else 0o600)
        except OSError as exc:
            for path in made:
                path.unlink(missing_ok=True)
            for folder in reversed(folders):
                folder.rmdir()
            reason = "exists already" if isinstance(exc, FileExistsError) else f"cannot be written: {exc.strerror}"
            raise SetupRefused(f"{at} {reason}; nothing was changed", hint="move it, or name another --config") from exc


def _folders(folder: Path, mode: int) -> list[Path]:
    """Make the folder and those above it that are missing; return them, the outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=mode)
    return missing[::-1]


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until the block is done, which takes milliseconds."""
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

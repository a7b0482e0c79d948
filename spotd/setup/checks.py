"""Live checks of what was answered: the draft read as a configuration, each market's key, and the bucket."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio

from spotd.config.credentials import CredentialRef, resolve_credential
from spotd.config.load import load
from spotd.config.model import Config
from spotd.config.plugins import InstalledPlugins, Plugins
from spotd.daemon.clock import SystemClock
from spotd.daemon.log import Redactor
from spotd.daemon.market.guarded import guarded
from spotd.service.configuration import open_store, provider_settings
from spotd.setup import SetupRefused
from spotd.setup.draft import ConfigDraft, KeySource
from spotd_jobs.objects.api import ObjectStore, StoreError
from spotd_jobs.spec.problems import BadValue, FileProblems
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Clock, ProviderPlugin, Services
from spotd_providers.contract.values import CheckLine, InstallId

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

    def __init__(
        self,
        draft: ConfigDraft,
        environ: Mapping[str, str],
        *,
        plugins: Plugins | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._draft = draft
        self._environ = environ
        self._plugins = plugins or InstalledPlugins()
        self._clock = clock or SystemClock()
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
        with tempfile.TemporaryDirectory() as folder:
            services = Services(
                install=InstallId("init"),
                clock=self._clock,
                rng=Random(),
                log=_Quiet(),
                state_dir=Path(folder),
                credential=credential,
            )
            try:
                with anyio.fail_after(CHECK_DEADLINE_S):
                    async with plugin.open(settings, services) as provider:
                        lines = await guarded(provider, clock=self._clock, log=_Quiet()).check()
            except ProviderError as exc:
                return [CheckLine(name="key", ok=False, detail=str(exc) or type(exc).__name__)]
            except TimeoutError:
                return [CheckLine(name="key", ok=False, detail=f"no answer within {CHECK_DEADLINE_S:.0f} s")]
            return lines or [CheckLine(name="key", ok=True, detail="the plugin checks nothing")]

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

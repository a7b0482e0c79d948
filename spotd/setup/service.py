"""Installs, compares and removes the systemd unit of this installation."""

from __future__ import annotations

import difflib
import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from spotd import paths
from spotd.config.credentials import CredentialRef
from spotd.config.load import Loaded, load, secrets_of
from spotd.paths import replace_whole
from spotd.setup import SetupRefused

# The text of the systemd unit, from the templates in `systemd/` and what this computer needs.


UNIT_NAME: Final = "spotd.service"
MARK: Final = "# Written by `spotd install-service`"
_TEMPLATES: Final = {True: "spotd.service", False: "spotd-user.service"}
_PLAIN: Final = re.compile(r"[A-Za-z0-9/._@+:,=-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What the unit depends on.

    Attributes:
        command: the program with its own arguments, before `run`.
        config: a configuration that is not where the service would search for it.
        writable: folders that a user's service may write to; a system service has only its own.
        credentials: the file of each secret, by the name that the configuration gives it.
        environment: variables without which the service would search elsewhere than this shell.
    """

    system: bool
    command: Sequence[str]
    config: Path | None = None
    writable: Sequence[Path] = ()
    credentials: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def unit_text(plan: UnitPlan) -> str:
    """Return the whole unit.

    Raises:
        SetupRefused: a path in it cannot be written in a unit.
    """
    scope = "" if plan.system else " --user"
    lines = [
        f"{MARK}, which compares and asks before it writes again. Changes of yours belong in an",
        f"# override: systemctl{scope} edit spotd",
        "",
    ]
    body = _template(plan.system).splitlines()
    begin = body.index("[Unit]")
    for line in body[begin:]:
        key = line.partition("=")[0]
        if key == "ExecStart":
            lines += _start_lines(plan)
        elif key == "ReadWritePaths":
            lines += [f"ReadWritePaths={_word(str(path))}" for path in plan.writable]
        elif key != "#LoadCredential":
            lines.append(line)
    return "\n".join(lines) + "\n"


def _start_lines(plan: UnitPlan) -> Iterator[str]:
    words = [*plan.command, "run", *(() if plan.config is None else ("--config", str(plan.config)))]
    # In this one line a dollar begins a variable, so two are one.
    yield "ExecStart=" + " ".join(_word(word).replace("$", "$$") for word in words)
    for name, value in sorted(plan.environment.items()):
        yield f"Environment={_word(f'{name}={value}')}"
    for name, path in sorted(plan.credentials.items()):
        # The rest of the line is the path as it stands, blanks included; only a per cent has a meaning of its own.
        yield f"LoadCredential={name}:{_printable(str(path)).replace('%', '%%')}"


def _word(text: str) -> str:
    """Return the text as one word of a unit: what has a meaning there is quoted."""
    text = _printable(text).replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    if not text.isprintable():
        raise SetupRefused(f"{text!r} cannot be written in a unit", hint="move it to a path without line breaks")
    return text


def _template(system: bool) -> str:  # noqa: FBT001 - the one key of the table above
    name = _TEMPLATES[system]
    packaged = Path(str(files("spotd.setup"))) / "units" / name
    checkout = Path(__file__).resolve().parents[2] / "systemd" / name
    for path in (packaged, checkout):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise SetupRefused(f"{name} is missing from this installation", hint="reinstall spotd")


# Where the installed program is, and whether a service can reach it.


_HIDDEN_FROM_ALL: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - places that are refused, not used
_HIDDEN_FROM_SYSTEM: Final = (Path("/home"), Path("/root"), Path("/run/user"))


def installed_command() -> tuple[str, ...]:
    """Return the command that starts this very installation: in a venv, of pipx, of uv, or of the user's site."""
    beside = Path(sys.executable).parent
    folders = [beside, Path(sysconfig.get_path("scripts")), Path(sysconfig.get_path("scripts", "posix_user"))]
    for folder in folders:
        if (folder / "spotd").is_file():
            return (str(folder / "spotd"),)
    # -P: a file called spotd.py in the folder that the service starts in is not this program.
    return (sys.executable, "-P", "-m", "spotd")


def folders_in_use(command: Sequence[str]) -> tuple[Path, ...]:
    """Return every folder that the program is read from, its interpreter's own included."""
    found = (Path(command[0]).parent, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2])
    return tuple(dict.fromkeys(path for one in found for path in (one, one.resolve())))


def require_reachable(folders: Sequence[Path], *, system: bool) -> None:
    """Raise `SetupRefused` if the unit could not see the program, which its sandbox or a mode hides."""
    hidden = (*_HIDDEN_FROM_ALL, *(_HIDDEN_FROM_SYSTEM if system else ()))
    for folder in folders:
        if any(folder.is_relative_to(place) for place in hidden):
            way_out = "for one user, leave out --system; for all: pipx install --global spotd, or a venv in /opt"
            raise SetupRefused(
                f"the service could not see its own program: {folder} is hidden from it",
                hint=way_out if system else "install spotd somewhere else, for instance with pipx",
            )
        if system and (closed := _closed_to_others(folder)) is not None:
            raise SetupRefused(
                f"the service runs as a user of its own, which may not enter {closed}", hint=f"chmod o+rx {closed}"
            )
        if system and (loose := changeable_by_others(folder)) is not None:
            raise SetupRefused(
                f"the service is given root's keys, and others than root may change its program by {loose}",
                hint=f"chown -R root: {loose}; chmod -R go-w {loose}",
            )


def _closed_to_others(folder: Path) -> Path | None:
    for path in (*reversed(folder.parents), folder):
        try:
            if not path.stat().st_mode & stat.S_IXOTH:
                return path
        except OSError:
            return path
    return None


def changeable_by_others(folder: Path) -> Path | None:
    """Return the folder, or the one above it, that others than root may write to; None where only root may."""
    for path in (folder, *folder.parents):
        found = path.stat()
        if found.st_uid != 0 or (found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX):
            return path
    return None


SYSTEM_STATE: Final = Path("/var/lib/spotd")
_CALL_S: Final = 120.0
"""Above TimeoutStartSec of the unit: a start returns when the daemon is ready."""


class UnitStanding(Enum):
    """What the file of the unit is, compared with what would be written."""

    ABSENT = auto()
    SAME = auto()
    DIFFERENT = auto()


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return 1, str(exc)
    return done.returncode, (done.stderr or done.stdout).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSystem:
    """The computer, as far as a service depends on it. Tests give their own."""

    root: Path = Path("/")
    uid: int = field(default_factory=os.geteuid)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    command: tuple[str, ...] = field(default_factory=installed_command)
    folders: tuple[Path, ...] | None = None
    run: Callable[[Sequence[str]], tuple[int, str]] = _run

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs this computer, which is more than that it is installed."""
        return (self.root / "run/systemd/system").is_dir()

    @property
    def lingers(self) -> bool:
        """Whether this user's services go on without a session of theirs."""
        name = self.environ.get("USER") or self.environ.get("LOGNAME") or ""
        return bool(name) and (self.root / "var/lib/systemd/linger" / name).exists()


class ServiceInstaller:
    """The unit of one installation: of this user, or of the whole computer."""

    def __init__(self, *, system: bool, config: Path | None, host: HostSystem) -> None:
        self._system = system
        self._host = host
        # Variables of this shell that go over the configuration will not be there when the service starts.
        kept = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
        self._environ = {} if system else {k: host.environ[k] for k in kept if k in host.environ}
        self._usual = host.root / paths.SYSTEM_CONFIG.relative_to("/") if system else paths.user_config(self._environ)
        self._config = (config or self._config_in_force()).absolute()
        self.path = self._unit_folder() / UNIT_NAME

    def _config_in_force(self) -> Path:
        named = "" if self._system else self._host.environ.get("SPOTD_CONFIG", "")
        return Path(named) if named else self._usual

    def _unit_folder(self) -> Path:
        if self._system:
            return self._host.root / "etc/systemd/system"
        return paths.user_config(self._environ).parents[1] / "systemd" / "user"

    @property
    def journal(self) -> str:
        """The command that shows the service's log."""
        return f"journalctl {'' if self._system else '--user '}-u spotd -n 50"

    def loaded(self) -> Loaded | None:
        """Return the configuration that the service will have; `None` while there is none yet.

        Raises:
            ConfigError: it cannot be used.
        """
        if not self._config.exists() and self._config == self._usual:
            return None
        return load(self._config, environ=self._environ)

    def text(self, loaded: Loaded | None, credentials: Mapping[str, Path]) -> str:
        """Return the unit.

        Args:
            credentials: files of secrets by name, where they do not lie in `keys` beside the configuration.

        Raises:
            SetupRefused: the service could not run as it would be written.
        """
        folders = self._host.folders
        require_reachable(folders_in_use(self._host.command) if folders is None else folders, system=self._system)
        state = paths.state_dir(self._environ)
        given = {k: v for k, v in self._environ.items() if k.startswith("XDG_") and v.startswith("/")}
        return unit_text(
            UnitPlan(
                system=self._system,
                command=self._host.command,
                config=None if self._config == self._usual else self._config,
                writable=() if self._system else (state, *_other_folders(loaded)),
                credentials=self._credentials(loaded, credentials),
                environment=given,
            )
        )

    def _credentials(self, loaded: Loaded | None, given: Mapping[str, Path]) -> dict[str, Path]:
        names = {one.credential for _, one in _references(loaded) if one.credential is not None}
        if unknown := sorted(set(given) - names):
            hint = f'write it into {self._config} like api_key = {{ credential = "{unknown[0]}" }}'
            raise SetupRefused(f"the configuration names no credential {unknown[0]!r}", hint=hint)
        found = {}
        for name in sorted(names):
            path = given.get(name, self._config.parent / "keys" / name).expanduser().absolute()
            if not path.is_file():
                hint = f"put the key there with mode 0600, or name its file: --credential {name}=/path/to/the/key"
                raise SetupRefused(f"the file of the credential {name!r} is missing: {path}", hint=hint)
            found[name] = path
        return found

    def warnings(self, loaded: Loaded | None) -> tuple[str, ...]:
        """Return what the service will miss of what this shell has, a sentence each."""
        if loaded is None:
            return ()
        found = []
        for where, one in _references(loaded):
            key = ".".join(where)
            way_out = f'{where[-1]} = {{ credential = "{_name_of(where)}" }}'
            if one.env is not None:
                found.append(f"{key}: the service does not have the variable {one.env} of your shell; write {way_out}")
            elif self._system and one.file is not None:
                found.append(f"{key}: the service may not read {one.file}; write {way_out}")
        if self._system and not _others_may_read(self._config):
            found.append(f"the service runs as a user of its own and may not read {self._config}; chmod 644 it")
        if self._system and (others := _other_folders(loaded)):
            found.append(f"the service may write to {SYSTEM_STATE} only, not to {others[0]}")
        return tuple(found)

    def standing(self, text: str) -> tuple[UnitStanding, str]:
        """Return how the file of the unit compares with this text, and the difference.

        Raises:
            SetupRefused: the file is none that may be replaced.
        """
        if self.path.is_symlink():
            hint = f"systemctl {'' if self._system else '--user '}unmask spotd, or remove the link"
            raise SetupRefused(f"{self.path} is a link (to {self.path.readlink()})", hint=hint)
        try:
            before = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return UnitStanding.ABSENT, ""
        except UnicodeDecodeError:
            before = ""
        if before == text:
            return UnitStanding.SAME, ""
        lines = difflib.unified_diff(
            before.splitlines(), text.splitlines(), str(self.path), "what would be written", lineterm=""
        )
        return UnitStanding.DIFFERENT, "\n".join(lines)

    def require_possible(self) -> None:
        """Raise `SetupRefused` where no unit can be installed."""
        if not self._host.has_systemd:
            raise SetupRefused(
                "systemd does not run this computer, so there is nothing to install a service in",
                hint="spotd run keeps it in the foreground; docs/how-to/service.md has an example for launchd",
            )
        if self._system and self._host.uid != 0:
            again = " ".join([*self._host.command, "install-service", "--system"])
            raise SetupRefused(
                "a service of the whole computer is installed by root",
                hint=f"sudo {again}, or without --system for a service of this user",
            )

    def install(self, text: str, *, start: bool) -> None:
        """Write the unit, have it read, and start it now and at every boot.

        Raises:
            SetupRefused: systemd refused, with its reason. OSError: the file cannot be written.
        """
        if not self._system:
            paths.state_dir(self._environ).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(self.path, text, mode=0o644)
        self.call("daemon-reload")
        if start:
            self.call("enable", UNIT_NAME)
            self.call("restart", UNIT_NAME)

    def uninstall(self) -> None:
        """Stop the service and remove its unit; state, configuration and keys stay.

        Raises:
            SetupRefused: systemd refused. OSError: the file cannot be removed.
        """
        self.call("disable", "--now", UNIT_NAME)
        self.path.unlink(missing_ok=True)
        self.call("daemon-reload")

    def is_active(self) -> bool:
        """Whether the service runs, and systemd has read its unit since it was last written."""
        if self._host.run(self._systemctl("is-active", "--quiet", UNIT_NAME))[0] != 0:
            return False
        return self._host.run(self._systemctl("show", "--value", "-p", "NeedDaemonReload", UNIT_NAME))[1] != "yes"

    def call(self, *arguments: str) -> None:
        """Call systemctl.

        Raises:
            SetupRefused: it failed, with what it printed.
        """
        code, said = self._host.run(self._systemctl(*arguments))
        if code == 0:
            return
        hint = self.journal
        if "connect to bus" in said or "XDG_RUNTIME_DIR" in said:
            hint = "log in as this user itself, not by su or sudo, so that its own systemd runs"
        raise SetupRefused(f"systemctl {' '.join(arguments)} failed: {said or f'exit code {code}'}", hint=hint)

    def _systemctl(self, *arguments: str) -> list[str]:
        return ["systemctl", *(() if self._system else ("--user",)), *arguments]


def _references(loaded: Loaded | None) -> list[tuple[tuple[str, ...], CredentialRef]]:
    found = () if loaded is None else secrets_of(loaded.config)
    return [(where, one) for where, one in found if isinstance(one, CredentialRef)]


def _name_of(where: Sequence[str]) -> str:
    return where[1] if where[-1] == "api_key" else "-".join(where)


def _other_folders(loaded: Loaded | None) -> tuple[Path, ...]:
    """Return the folders outside the state folder that the configuration has the daemon write to."""
    if loaded is None:
        return ()
    found = []
    state, store = loaded.config.daemon.state, loaded.config.store.url
    if "://" in state:
        found.append(Path(unquote(urlsplit(state).path)[1:]).parent)
    if store.startswith("file://"):
        found.append(Path(unquote(urlsplit(store).path)))
    return tuple(found)


def _others_may_read(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False

"""`spotctl init`: a few questions, each answer checked where it counts, then a configuration and its key files."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click
from click.shell_completion import get_completion_class

from spotd import paths
from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.setup import SetupRefused
from spotd.setup.draft import (
    ConfigDraft,
    KeySource,
    names_key_place,
    quoted,
    read_key_source,
    require_figures,
    write_setup,
)
from spotd_providers.kit.boundary import install_command

if TYPE_CHECKING:
    from spotd.setup.draft import DraftChecks


T = TypeVar("T")

_USUAL_MARKET: Final = "local"
_USUAL_BUDGET: Final = "10"
_KEY_HOW: Final = "paste it (not shown), or file:/path or env:NAME"


@click.command()
@click.option("--market", "markets", multiple=True, metavar="NAME", help="A market to rent in; may be repeated.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME=PLACE",
    help="Where a key is: vast=file:/path or vast=env:NAME; of the bucket: store-access=... and store-secret=...",
)
@click.option("--bucket", metavar="URL", help="s3://bucket/prefix, for the checkpoints of rented machines.")
@click.option("--endpoint-url", metavar="URL", help="Where a bucket that is not AWS's is reached.")
@click.option("--region", help="Region of the bucket.")
@click.option("--ceiling", "ceilings", multiple=True, metavar="GPU=USD", help="Highest $ per GPU-hour; repeatable.")
@click.option("--budget-day", metavar="USD", help="Most dollars from midnight to midnight UTC.")
@click.option("--config", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: this user's.")
@click.option("--system", is_flag=True, help="For a service of the whole computer: /etc/spotd, as root.")
@click.option("--no-check", is_flag=True, help="Believe keys and bucket without trying them.")
def init(
    *,
    markets: Sequence[str],
    keys: Sequence[str],
    bucket: str | None,
    endpoint_url: str | None,
    region: str | None,
    ceilings: Sequence[str],
    budget_day: str | None,
    path: Path | None,
    system: bool,
    no_check: bool,
) -> None:
    """Set spotd up: a few questions, keys and bucket tried live, then a commented configuration.

    Nothing that exists is overwritten, no key is ever shown, and until the last answer nothing is written. Without a
    terminal every answer comes from an option.
    """
    target = (path or (paths.SYSTEM_CONFIG if system else paths.config_candidates(os.environ)[0])).absolute()
    if target.exists():
        raise CommandFailed(
            f"{target} exists and stays as it is",
            hint="edit it (spotd config check, spotd config example), or name another --config",
        )
    from spotd.setup.draft import DraftChecks

    draft = ConfigDraft()
    questions = _Questions(draft, DraftChecks(draft, os.environ), _key_places(keys), live=not no_check)
    questions.ask_markets(",".join(markets) or None)
    questions.ask_bucket(bucket, endpoint_url, region)
    questions.ask_ceilings(",".join(ceilings) or None)
    questions.ask_budget(budget_day)
    _write(target, draft, questions.checks, system=system)


class _Questions:
    """The questions in their order; an answer that is wrong is asked for again, with the reason."""

    def __init__(self, draft: ConfigDraft, checks: DraftChecks, keys: dict[str, str], *, live: bool) -> None:
        self.checks = checks
        self._draft = draft
        self._keys = keys
        self._live = live
        self._has_real = False

    def ask_markets(self, given: str | None) -> None:
        question = (
            f"Where to rent: local (this computer, free), vast, runpod, aws, lambda; with commas [{_USUAL_MARKET}]"
        )
        names = self._answer("--market", given, question, self._market_names, usual=_USUAL_MARKET)
        unused = sorted(set(self._keys) - {*names, "store-access", "store-secret"})
        if unused:
            raise CommandFailed(
                f"--key {unused[0]}: no such market is chosen",
                hint=f"add it to --market, or leave out --key {unused[0]}=",
            )
        for name in names:
            plugin = self.checks.plugin(name)
            self._draft.markets[name] = plugin.title
            if self.checks.is_local(name):
                continue
            self._has_real = True
            usual = None if plugin.needs_credential else ""
            question = f"Key of {plugin.title}: {_KEY_HOW}" + ("" if usual is None else " [as its own tools have it]")
            about = f"--key {name}=file:/path"
            read = partial(self._key, name)
            self._answer("--key", self._keys.get(name), question, read, usual=usual, hidden=True, about=about)

    def _market_names(self, text: str) -> list[str]:
        names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if any(not self.checks.is_local(name) for name in names) and find_spec("boto3") is None:
            raise SetupRefused(
                "a rented machine needs a bucket for its checkpoints, and the library for buckets is not installed",
                hint=install_command("s3"),
            )
        if not names:
            raise SetupRefused("no market is named")
        return names

    def _key(self, name: str, text: str) -> None:
        if text:
            self._draft.keys[name] = self._source(text)
        try:
            self._check_market(name)
        except BaseException:
            self._draft.keys.pop(name, None)
            raise

    def _check_market(self, name: str) -> None:
        if not self._live:
            self.checks.config()
            return
        stderr.note(f"asking {self._draft.markets[name]} ...")
        for line in self.checks.market(name):
            if line.ok and not line.hint:
                stderr.note(f"  {line.name}: {line.detail}")
            else:
                stderr.warning(f"{line.name}: {line.detail}" + (f" ({line.hint})" if line.hint else ""))

    def _source(self, text: str) -> KeySource:
        source = read_key_source(text)
        self.checks.secret(source)
        return source

    def ask_bucket(self, url: str | None, endpoint_url: str | None, region: str | None) -> None:
        """Ask for the bucket where a market needs one, as often as it takes one that works."""
        if not self._has_real and url is None:
            return None
        while True:
            self._answer("--bucket", url, "Bucket for checkpoints, like s3://my-bucket/spotd", self._bucket_url)
            self._draft.endpoint_url = self._optional("--endpoint-url", endpoint_url, "Its address [AWS]")
            self._draft.region = self._optional("--region", region, "Its region [the usual one]")
            self._bucket_key("store-access", "Id of its access key")
            if "store-access" in self._draft.keys:
                self._bucket_key("store-secret", "Secret of its access key")
            try:
                return self._check_bucket()
            except SetupRefused as exc:
                if url is not None or "store-access" in self._keys or not stderr.can_ask():
                    raise CommandFailed(exc.message, hint=exc.hint) from exc
                stderr.error(exc.message, hint=exc.hint)

    def _bucket_url(self, text: str) -> None:
        if not text.startswith("s3://"):
            raise SetupRefused("this names no bucket", hint="write it like s3://my-bucket/spotd")
        self._draft.bucket = text
        try:
            self.checks.config()
        except BaseException:
            self._draft.bucket = ""
            raise

    def _bucket_key(self, name: str, what: str) -> None:
        # A secret alone would not be a configuration yet, so it is tried with the bucket, not for itself.
        usual = "" if name == "store-access" else None
        how = " [as AWS's own tools have it]" if usual == "" else ""
        self._draft.keys.pop(name, None)

        def read(text: str) -> KeySource | None:
            return self._source(text) if text else None

        about = f"--key {name}=file:/path"
        question = f"{what}: {_KEY_HOW}{how}"
        source = self._answer("--key", self._keys.get(name), question, read, usual=usual, hidden=True, about=about)
        if source is not None:
            self._draft.keys[name] = source

    def _check_bucket(self) -> None:
        if not self._live:
            self.checks.config()
            return
        stderr.note("trying the bucket ...")
        stderr.note(f"  bucket: {self.checks.bucket()}")

    def ask_ceilings(self, given: str | None) -> None:
        if given is None and self._live and self._has_real and stderr.can_ask():
            self._show_past_prices()
        question = "Highest $ per GPU-hour, like H100=2.60,RTX_4090=0.40 [each job states its own]"
        self._answer("--ceiling", given, question, self._ceilings, usual="")

    def _show_past_prices(self) -> None:
        """Show what a ceiling can be chosen by; without it the question is the same."""
        stderr.note("asking for the prices of the last week, for a minute at most ...")
        try:
            found = self.checks.past_week()
        except SetupRefused as exc:
            return stderr.note(f"  no past prices: {exc.message}")
        for line in found.lines:
            stderr.note(f"  {line}")
        for note in found.notes or (() if found.lines else ("none of these markets states past prices",)):
            stderr.note(f"  {note}")
        return None

    def _ceilings(self, text: str) -> None:
        self._draft.ceilings = {gpu.strip(): usd.strip() for gpu, usd in _pairs(text.split(","), "--ceiling").items()}
        self._check_draft("ceilings", {})

    def ask_budget(self, given: str | None) -> None:
        question = f"Most dollars a day, from midnight to midnight UTC [{_USUAL_BUDGET}]"
        # A day's budget is no guess of ours where money is spent and no person confirms it.
        usual = _USUAL_BUDGET if stderr.can_ask() or not self._has_real else None
        self._answer("--budget-day", given, question, self._budget, usual=usual)

    def _budget(self, text: str) -> None:
        self._draft.budget_day = text
        self._check_draft("budget_day", "")

    def _check_draft(self, key: str, empty: object) -> None:
        """Have the draft read as a configuration; take the answer out again if it is refused."""
        try:
            require_figures(self._draft)
            self.checks.config()
        except SetupRefused:
            setattr(self._draft, key, empty)
            raise

    def _optional(self, option: str, given: str | None, question: str) -> str:
        return self._answer(option, given, question, str, usual="")

    def _answer(
        self,
        option: str,
        given: str | None,
        question: str,
        read: Callable[[str], T],
        *,
        usual: str | None = None,
        hidden: bool = False,
        about: str = "",
    ) -> T:
        """Return the answer of the option, else of the person, else the usual one.

        Raises:
            CommandFailed: the option's answer is wrong, or there is none and no terminal.
        """
        while True:
            text = given
            if text is None and stderr.can_ask():
                text = _prompt(question, hidden=hidden) or usual
            elif text is None:
                text = usual
            if text is None and not stderr.can_ask():
                raise CommandFailed(
                    f"{question.partition(':')[0].partition(' [')[0]} is missing, and there is no terminal to ask at",
                    hint=about or f"{option} ...",
                )
            if text is None:
                stderr.error("an answer is needed here", hint="Ctrl-C ends this without having written anything")
                continue
            try:
                return read(text)
            except SetupRefused as exc:
                if given is not None or not stderr.can_ask():
                    raise CommandFailed(f"{option}: {exc.message}", hint=exc.hint) from exc
                stderr.error(exc.message, hint=exc.hint)


def _prompt(question: str, *, hidden: bool) -> str:
    """Ask once; a hidden answer is not shown. The end of input ends the command."""
    if hidden:
        try:
            return getpass.getpass(f"{question}: ").strip()
        except EOFError:
            raise click.Abort from None
    sys.stderr.write(f"{question}: ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise click.Abort
    return answer.strip()


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Return NAME=VALUE as a table; what is wrong is not repeated, since it may be a key."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.strip() and not (equals and name.strip() and value.strip()):
            message = "is NAME=PLACE, like vast=file:/path" if option == "--key" else f"{word.strip()!r} is no GPU=USD"
            if option == "--key":
                raise CommandFailed(
                    f"{option} {message}", hint="write --key MARKET=env:NAME or --key MARKET=file:/path"
                )
            raise SetupRefused(message, hint="write it like H100=2.60")
        if word.strip():
            found[name.strip()] = value
    return found


def _key_places(words: Sequence[str]) -> dict[str, str]:
    """Return where each key is kept.

    Raises:
        CommandFailed: one is the key itself, which the list of processes and the shell's history would show to others.
    """
    found = _pairs(words, "--key")
    for name, text in found.items():
        if not names_key_place(text):
            raise CommandFailed(
                f"--key {name}: a key is not taken from the command line, where other users and the history see it",
                hint=f"--key {name}=file:/path or --key {name}=env:NAME; a terminal is asked without an echo",
            )
    return found


def _write(target: Path, draft: ConfigDraft, checks: DraftChecks, *, system: bool) -> None:
    folder = target.parent / "keys"
    references, files = {}, {}
    for name, source in draft.keys.items():
        place: tuple[str, str] = (source.kind, source.value)
        if source.kind == "typed" or system:
            files[folder / name] = checks.secret(source)
            place = ("credential", name) if system else ("file", str(folder / name))
        references[name] = f"{{ {place[0]} = {quoted(place[1])} }}"
    try:
        write_setup(target, draft.text(references), files, others_read=system)
    except SetupRefused as exc:
        raise CommandFailed(exc.message, code=ExitCode.LOCAL_IO, hint=exc.hint) from exc
    for path in (target, *files):
        stdout.line(str(path))
    flag = " --system" if system else ""
    stderr.note(f"written. Next: spotd install-service{flag} (or spotd run), then spotctl doctor")


# `spotctl completion`: the script by which a shell asks `spotctl` what could come next.


_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes commands, options and names of jobs in a shell.

    \b
    bash: echo 'eval "$(spotctl completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(spotctl completion zsh)"' >> ~/.zshrc
    fish: spotctl completion fish > ~/.config/fish/completions/spotctl.fish
    """
    kind = get_completion_class(shell)
    if kind is None:  # every shell of the choice has one
        raise click.UsageError(f"there is no completion for {shell}")
    made = kind(ctx.find_root().command, {}, "spotctl", "_SPOTCTL_COMPLETE")
    # Not source(): that of bash starts a bash to ask for its version, and writes its doubts to the terminal.
    stdout.write(made.source_template % made.source_vars())

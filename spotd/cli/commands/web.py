"""`spotctl web`: the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import require_extra
from spotd.client.daemon import Daemon
from spotd.client.errors import DaemonUnreachable

PORT: Final = 8420
TOKEN_BYTES_MAX: Final = 4096


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes a free one.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="Ask for the token in this file.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="A further host name that leads here. Repeatable.")
def web(*, host: str, port: int, token_file: Path | None, names: tuple[str, ...]) -> None:
    """Serve the dashboard: what runs where and why, what it costs, and what waits.

    It listens on this computer only. At any other address, and with --name, it asks for a token: that of --token-file,
    else one that is made now and shown once.
    """
    require_extra("web", "nicegui", "the dashboard needs nicegui")
    from spotd.web.guard import Place
    from spotd.web.sessions import new_token

    place = Place(host=host, names=frozenset(name.lower() for name in names))
    token = None if token_file is None else _token_of(token_file)
    if token is None and place.needs_token:
        token = new_token()
        stderr.note(f"the token, shown this once: {token}")
    from spotd.web.main import listen, serve

    try:
        bound = listen(host, port)
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise CommandFailed(
            f"cannot listen on {host} port {port}: {reason}", code=ExitCode.LOCAL_IO, hint="spotctl web --port 0"
        ) from exc
    daemon = Daemon()
    try:
        daemon.status()
    except DaemonUnreachable as exc:
        stderr.warning(f"{exc.message}; the dashboard waits for it")
    shown = f"[{host}]" if ":" in host else host
    stdout.line(f"http://{shown}:{bound.getsockname()[1]}/")
    stderr.note("Ctrl-C ends the dashboard; the daemon and its jobs go on")
    serve(bound, daemon, place, token)


def _token_of(path: Path) -> str:
    """Return the token in a file.

    Raises:
        CommandFailed: it is missing, others may read it, or it is too short.
    """
    from spotd.web.sessions import TOKEN_LENGTH_MIN

    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX).decode("utf-8").strip()
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise CommandFailed(f"the token's file {path} cannot be read: {reason}", code=ExitCode.LOCAL_IO) from exc
    if mode & 0o077:
        raise CommandFailed(f"others may read the token's file {path}", hint=f"chmod 600 {path}")
    if len(text) < TOKEN_LENGTH_MIN or not text.isprintable():
        raise CommandFailed(
            f"the token in {path} is not one line of {TOKEN_LENGTH_MIN} characters or more",
            hint=f"head -c 24 /dev/urandom | base64 > {path}",
        )
    return text

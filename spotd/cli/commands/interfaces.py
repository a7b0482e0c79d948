"""The commands that start another way to use spotd: the dashboard, the live view, tools for agents, a shell, ports."""

from __future__ import annotations

import errno
import os
import queue
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from spotd import paths
from spotd.cli import stderr, stdout
from spotd.cli.commands.hosts import host_name, known_hosts_file, pinned_keys
from spotd.cli.entry import CommandFailed, ExitCode, of_state
from spotd.cli.inputs.options import job_argument, require_extra
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonRefused, DaemonUnreachable
from spotd.shell_address import PORT_MAX, fault_of
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_duration

if TYPE_CHECKING:
    from spotd.api.schemas.jobs import ShellResponse

# `spotctl web`: the dashboard.


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
    from spotd.web.guard import Place, new_token

    place = Place(host=host, names=frozenset(name.lower() for name in names))
    token = None if token_file is None else _token_of(token_file)
    shown = ""
    if token is None and place.needs_token:
        token = shown = new_token()
    from spotd.web.main import listen, serve

    try:
        bound = listen(host, port)
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        is_of_port = isinstance(exc, OSError) and exc.errno in {errno.EADDRINUSE, errno.EACCES}
        hint = "spotctl web --port 0" if is_of_port else "give --host an address of this computer, say 127.0.0.1"
        raise CommandFailed(
            f"cannot listen on {host} port {port}: {reason}", code=ExitCode.LOCAL_IO, hint=hint
        ) from exc
    if shown:
        stderr.note(f"the token, shown this once: {shown}")
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
    from spotd.web.guard import TOKEN_LENGTH_MIN

    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX).decode("utf-8").strip()
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise CommandFailed(
            f"the token's file {path} cannot be read: {reason}", code=ExitCode.LOCAL_IO, hint="check its path and mode"
        ) from exc
    if mode & 0o077:
        raise CommandFailed(f"others may read the token's file {path}", hint=f"chmod 600 {path}")
    if len(text) < TOKEN_LENGTH_MIN or not text.isprintable():
        raise CommandFailed(
            f"the token in {path} is not one line of {TOKEN_LENGTH_MIN} characters or more",
            hint=f"head -c 24 /dev/urandom | base64 > {path}",
        )
    return text


# `top`: a live view of the daemon on a terminal.


@click.command()
def top() -> None:
    """Jobs, machines, market and events, live. Keys cancel a job, open its log and change its ceiling; ? lists them.

    The daemon may go and come back meanwhile. Its jobs go on when you leave.
    """
    way_round = ", or use spotctl ls and spotctl events -f"
    require_extra("tui", "textual", "this view needs textual", way_round=way_round)
    if not (stdout.is_terminal() and stderr.can_ask()):
        raise CommandFailed("this view needs a terminal", hint="spotctl ls")
    if os.environ.get("TERM") == "dumb":
        raise CommandFailed("this terminal cannot move its cursor (TERM=dumb)", hint="spotctl ls")
    from spotd.top.app import Top

    Top(Daemon()).run()


# `spotctl mcp`: tools for an agent.


@click.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    metavar="DIR",
    help="Folder below which jobs may have their workdirs; the current one unless given.",
)
def mcp(*, root: Path) -> None:
    """Serve tools to an agent over stdin and stdout (Model Context Protocol): watch jobs, and queue some.

    Agents queue jobs only within [mcp] job_budget and day_budget of the daemon's config, and cancel only what they
    queued.
    """
    require_extra("mcp", "mcp", "agents need the mcp package")
    from spotd.agents import make_server  # loads the whole protocol

    make_server(Daemon(), root).run("stdio")


# `spotctl ssh`: a shell on a job's machine, by the ssh of this computer and a key of the provider's account.


CHECK_EVERY_S: Final = 5.0
"""Between two checks whether the job still has the machine."""
_OPTIONS = (
    "GlobalKnownHostsFile=/dev/null",
    # Whatever the person's own configuration says for every host: the machine may be an untrusted host's.
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    # A ticket that is delegated, and a password that is typed, are the host's from then on. Only a key is shown to it.
    "PreferredAuthentications=publickey",
    "GSSAPIAuthentication=no",
    "GSSAPIDelegateCredentials=no",
    "PasswordAuthentication=no",
    "KbdInteractiveAuthentication=no",
    "HostbasedAuthentication=no",
    # What else a host could have this computer take over: further keys of its own, a network device.
    "UpdateHostKeys=no",
    "Tunnel=no",
    "ControlPath=none",
)


@click.command()
@job_argument
@click.option("--print", "only_print", is_flag=True, help="Print the command instead of running it.")
def ssh(*, ref: str, only_print: bool) -> None:
    """Open a shell on a job's machine, where its provider gives one.

    It needs a public key in the provider's account; spotd puts none on the machine. The machine is untrusted: do not
    type there what its owner must not see.
    """
    where, known_hosts = _door(ref)
    if where["host"]:
        _become(_command(where, known_hosts, "ClearAllForwardings=yes"), ref, only_print=only_print)
    elif only_print:
        stdout.line(shlex.join(where["command"]))
    else:
        _require_program(where["command"][0])
        stderr.note(f"{ref}: {shlex.join(where['command'])}")
        os.execvp(where["command"][0], where["command"])  # noqa: S606 - a list of arguments, each checked above


@click.command()
@job_argument
@click.argument("ports", nargs=-1, required=True, metavar="PORT[:LOCAL]...")
@click.option("-i", "--identity", type=click.Path(path_type=Path, exists=True), metavar="FILE", help="Private key.")
@click.option("--for", "most", default="12h", show_default=True, metavar="DURATION", help="End it after this.")
@click.option("--print", "only_print", is_flag=True, help="Print the command of ssh instead of running it.")
def forward(*, ref: str, ports: tuple[str, ...], identity: Path | None, most: str, only_print: bool) -> None:
    """Reach PORT of a job's machine at 127.0.0.1:LOCAL, say 8888 of Jupyter.

    Only this computer may connect. It ends with Ctrl-C, and when the job leaves the machine: with 0 if it succeeded, 1
    if it failed, 5 if it goes on elsewhere.

    On own hosts, Slurm and Kubernetes the daemon leads there, and you need no key. Elsewhere ssh does; its own
    configuration is not read, since it could forward other ports: it uses your agent, your default keys or --identity.
    """
    pairs = [_forwarding(port) for port in ports]
    until = time.monotonic() + _seconds(most)
    where: ShellResponse | None = None
    known_hosts = Path()
    try:
        where, known_hosts = _door(ref)
    except DaemonRefused as exc:
        if exc.code != "conflict":  # that it gives no shell says nothing of its ports
            raise
    if where is not None and where["ports"] == "none":
        raise CommandFailed(where["no_ports"], hint=f"spotctl ssh {ref}")
    if where is not None and (where["ports"] == "ssh" or (identity is not None and not where["no_ports"])):
        _forward_by_ssh(ref, where, known_hosts, pairs, identity, until, only_print=only_print)
        return
    if only_print or identity is not None:
        raise CommandFailed(
            "the daemon itself leads to this machine, and ssh has no part in it", hint=f"spotctl forward {ref} PORT"
        )
    _forward_by_daemon(ref, pairs, until)


def _forward_by_ssh(
    ref: str,
    where: ShellResponse,
    known_hosts: Path,
    pairs: list[tuple[int, int]],
    identity: Path | None,
    until: float,
    *,
    only_print: bool,
) -> None:
    flags = [word for there, here in pairs for word in ("-L", f"127.0.0.1:{here}:127.0.0.1:{there}")]
    flags += [] if identity is None else ["-i", str(identity)]
    command = _command(where, known_hosts, "ExitOnForwardFailure=yes")
    command = [command[0], "-N", "-F", "none", *flags, *command[1:]]
    if only_print:
        stdout.line(shlex.join(command))
        return
    _prepare(command, ref)
    for _, here in pairs:
        listen(here).close()  # its own words for a port that is taken name no way out
    stderr.note(f"Ctrl-C ends it: {words_of(pairs)}")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as ssh_:
        try:
            while (code := _wait(ssh_)) is None:
                if time.monotonic() > until:
                    stderr.note("the time of --for is over")
                    return
                now = Daemon().job(ref)["job"]
                if now["attempt"] != where["attempt"] or now["state"] in FINAL:
                    if failure := left_machine(Daemon(), ref, "the job has left this machine"):
                        raise failure
                    return
        except DaemonUnreachable as exc:
            words = f"{exc.message}, so nothing says whether the job still runs there"
            raise CommandFailed(words, code=ExitCode.UNREACHABLE, hint=exc.hint) from exc
        finally:
            ssh_.terminate()
    if code:
        raise CommandFailed(f"ssh ended with {code}", code=ExitCode.UNREACHABLE, hint=f"spotctl show {ref}")


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(CHECK_EVERY_S)
    except subprocess.TimeoutExpired:
        return None


def _forward_by_daemon(ref: str, pairs: list[tuple[int, int]], until: float) -> None:
    listeners = {there: listen(here) for there, here in pairs}
    said: queue.Queue[Opened | str | ClientError] = queue.Queue()
    daemon = Daemon()
    try:
        carry(daemon, ref, listeners, said)
        waiting = set(listeners)
        while (left := until - time.monotonic()) > 0:
            try:
                one = said.get(timeout=min(left, 60.0))
            except queue.Empty:
                continue
            if isinstance(one, ClientError):
                raise one
            if isinstance(one, str):
                if failure := left_machine(daemon, ref, one):
                    raise failure
                stderr.note(f"{ref} has ended: SUCCEEDED")
                return
            waiting.discard(one.port)
            if not waiting:
                stderr.note(f"Ctrl-C ends it: {words_of(pairs)}")
        stderr.note("the time of --for is over")
    finally:
        for listener in listeners.values():
            listener.close()


def _seconds(text: str) -> float:
    try:
        return parse_duration(text).total_seconds()
    except BadValue as exc:
        raise CommandFailed(f"--for: {exc}", hint='write it as "90m" or "12h"') from exc


def _forwarding(text: str) -> tuple[int, int]:
    """Return the port there, and the one here."""
    parts = text.split(":")
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 6]
    if len(numbers) != len(parts) or len(parts) > 2 or not all(1 <= number <= PORT_MAX for number in numbers):
        raise CommandFailed(f"{text!r} is no port", hint="write 6006, or 6006:7007 to have it at 7007 here")
    return numbers[0], numbers[-1]


def _door(ref: str) -> tuple[ShellResponse, Path]:
    """Return where the job's machine gives a shell, and the file that holds its key."""
    where = Daemon().shell(ref)
    if fault := fault_of(where["host"], where["port"], where["user"], where.get("command", [])):
        raise CommandFailed(
            f"the machine's address cannot be used: {fault}", code=ExitCode.UNREACHABLE, hint=f"spotctl why {ref}"
        )
    pinned = known_hosts_file()
    name = host_name(where["host"], where["port"])
    if any(row.host == name for row in pinned_keys(pinned)):
        return where, pinned
    return where, paths.state_dir(os.environ) / "known_hosts"


def _become(command: list[str], ref: str, *, only_print: bool) -> None:
    if only_print:
        stdout.line(shlex.join(command))
        return
    _prepare(command, ref)
    os.execvp("ssh", command)  # noqa: S606 - a list of arguments, each checked above


def _prepare(command: list[str], ref: str) -> None:
    _require_program("ssh")
    paths.state_dir(os.environ).mkdir(mode=0o700, parents=True, exist_ok=True)
    whose = "your own host" if "StrictHostKeyChecking=yes" in command else "an untrusted host"
    stderr.note(f"{ref} is on {whose}: {command[command.index('-l') + 1]}@{command[command.index('--') + 1]}")


def _require_program(name: str) -> None:
    if shutil.which(name) is None:
        package = "openssh-client" if name == "ssh" else name
        raise CommandFailed(f"{name} is not installed here", code=ExitCode.LOCAL_IO, hint=f"apt install {package}")


def _command(where: ShellResponse, known_hosts: Path, *more: str) -> list[str]:
    # A file name in an option of ssh is cut at blanks, and a per cent begins a token.
    file = str(known_hosts).replace("%", "%%").replace('"', '\\"')
    if known_hosts == known_hosts_file():
        trust = ["StrictHostKeyChecking=yes"]
    else:
        # The first key of a rented machine is accepted and kept; another one later is refused. It is named by the
        # attempt, since another machine may answer at the same address tomorrow.
        trust = ["StrictHostKeyChecking=accept-new", f"HostKeyAlias=spotd-{where['job_id']}-{where['attempt']}"]
    flags = [word for option in (*trust, *_OPTIONS, *more, f'UserKnownHostsFile="{file}"') for word in ("-o", option)]
    there = ["-p", str(where["port"]), "-l", str(where["user"]), "--", str(where["host"])]
    leads_on = where.get("command", [])
    return ["ssh", *(["-t"] if leads_on else []), *flags, *there, *([shlex.join(leads_on)] if leads_on else [])]


# Ports of a job's machine at this computer: loopback only, for as long as the job has the machine.


CONNECTIONS_MAX: Final = 64
"""At a time, of one port."""
CONNECT_S: Final = 30.0
PIECE: Final = 64 * 1024
FINAL: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


def listen(port: int) -> socket.socket:
    """Listen on a port of this computer's loopback address.

    Raises:
        CommandFailed: it is taken.
    """
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as exc:
        is_taken = exc.errno == errno.EADDRINUSE
        reason = "another program listens there" if is_taken else exc.strerror or type(exc).__name__
        raise CommandFailed(
            f"port {port} of this computer cannot be used: {reason}",
            code=ExitCode.LOCAL_IO,
            hint="choose another one here: spotctl forward JOB PORT:LOCAL",
        ) from exc


@dataclass(frozen=True, slots=True)
class Opened:
    """A port that is reached now."""

    port: int


def carry(
    daemon: Daemon, ref: str, listeners: Mapping[int, socket.socket], said: queue.Queue[Opened | str | ClientError]
) -> None:
    """Lead to each of these ports of the machine; what becomes of each is put into `said`."""
    for port, listener in listeners.items():
        threading.Thread(
            target=_follow, args=(daemon, ref, port, listener, said), daemon=True, name=f"port {port}"
        ).start()


def _follow(
    daemon: Daemon, ref: str, port: int, listener: socket.socket, said: queue.Queue[Opened | str | ClientError]
) -> None:
    try:
        for record in daemon.port(ref, port):
            if record["kind"] == "open":
                said.put(Opened(port))
                where = (listener, record["socket"])
                threading.Thread(target=_accept, args=where, daemon=True, name=f"accept {port}").start()
            else:
                said.put(record["text"])
                return
        said.put("the daemon stopped")
    except ClientError as exc:
        said.put(exc)


def _accept(listener: socket.socket, path: str) -> None:
    free = threading.BoundedSemaphore(CONNECTIONS_MAX)
    while True:
        free.acquire()
        try:
            near, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_connect, args=(near, path, free), daemon=True, name="forwarded").start()


def _connect(near: socket.socket, path: str, free: threading.BoundedSemaphore) -> None:
    with suppress(OSError), near, socket.socket(socket.AF_UNIX) as far:
        far.settimeout(CONNECT_S)
        far.connect(path)
        far.settimeout(None)
        back = threading.Thread(target=_copy, args=(far, near), daemon=True, name="forwarded back")
        back.start()
        _copy(near, far)
        back.join()
    free.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source has no more, and say so to the target."""
    with suppress(OSError):
        while data := source.recv(PIECE):
            target.sendall(data)
    # Of a connection that broke the other half would wait for ever.
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def left_machine(daemon: Daemon, ref: str, words: str) -> CommandFailed | None:
    """Return what ends a forwarding whose job has left the machine; `None` where it succeeded."""
    state = str(daemon.job(ref)["job"]["state"])
    if state not in FINAL:
        return CommandFailed(f"{ref}: {words} ({state})", code=ExitCode.UNREACHABLE, hint=f"spotctl why {ref}")
    code = of_state(state)
    if code is ExitCode.OK:
        return None
    return CommandFailed(f"{ref} has ended: {state}", code=code, hint=f"spotctl show {ref}")


def words_of(ports: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"http://127.0.0.1:{local}" for _, local in ports)

"""`spotctl ssh`: a shell on a job's machine, by the ssh of this computer and a key of the provider's account."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd import paths
from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import job_argument
from spotd.client.daemon import Daemon
from spotd.shell_address import fault_of

if TYPE_CHECKING:
    from spotd.api.schemas.jobs import ShellResponse

_OPTIONS = (
    # The first key of a machine is accepted and kept; another one later is refused. No machine knows another's.
    "StrictHostKeyChecking=accept-new",
    "GlobalKnownHostsFile=/dev/null",
    # Whatever the person's own configuration says for every host: the machine is an untrusted host's.
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
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
    where = Daemon().shell(ref)
    if fault := fault_of(where["host"], where["port"], where["user"]):
        raise CommandFailed(f"the machine's address cannot be used: {fault}", code=ExitCode.UNREACHABLE)
    known_hosts = paths.state_dir(os.environ) / "known_hosts"
    command = _command(where, known_hosts)
    if only_print:
        stdout.line(shlex.join(command))
        return
    if shutil.which("ssh") is None:
        raise CommandFailed("ssh is not installed here", code=ExitCode.LOCAL_IO, hint="apt install openssh-client")
    known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    stderr.note(f"attempt {where['attempt']} of {ref}, an untrusted host: {where['user']}@{where['host']}")
    os.execvp("ssh", command)  # noqa: S606 - a list of arguments, each checked above


def _command(where: ShellResponse, known_hosts: Path) -> list[str]:
    # A file name in an option of ssh is cut at blanks, and a per cent begins a token.
    file = str(known_hosts).replace("%", "%%").replace('"', '\\"')
    options = [
        *_OPTIONS,
        f'UserKnownHostsFile="{file}"',
        # By the attempt: another machine may answer at the same address tomorrow.
        f"HostKeyAlias=spotd-{where['job_id']}-{where['attempt']}",
    ]
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", *flags, "-p", str(where["port"]), "-l", str(where["user"]), "--", str(where["host"])]

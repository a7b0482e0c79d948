"""`spotctl ssh`: from a provider's answer to the arguments of ssh."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.market.guarded import guarded
from spotd.shell_address import fault_of
from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import Capability, InstanceRef, Power, ShellAddress
from tests.cases import every
from tests.fakes.ssh.sshd import SSHD, real_sshd
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.daemon.shop import Shop


class Hospitable(Shop):
    """A shop whose machines give a shell: `door` is what it answers, or what it raises."""

    door: Any = ShellAddress(host="203.0.113.5", port=30_022, user="root")
    power = Capability(available=True)

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, Power.SHELL: self.power}

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        if isinstance(self.door, Exception):
            raise self.door
        found: ShellAddress = self.door
        return found


@pytest.fixture
def shop(ctl: Ctl, tmp_path: Path) -> Hospitable:
    """The shop on whose machine `llama-lora` runs."""
    ctl.monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "my 50%d state"))
    made = Hospitable(ctl.rig.clock)
    entries: Any = ctl.place.handlers.context.providers
    name = ctl.rig.shop.name
    entries[name] = replace(entries[name], provider=guarded(made, clock=ctl.rig.clock, log=ctl.rig.log))
    ctl.place.write(worlds.running(), worlds.waiting())
    return made


def words(result: Any) -> list[str]:
    assert (result.code, result.err) == (0, "")
    return shlex.split(result.out)


@pytest.mark.process
def test_the_command_is_ssh_with_known_hosts_of_its_own(ctl: Ctl, shop: Hospitable, tmp_path: Path) -> None:
    command = words(ctl("ssh", "llama-lora", "--print"))
    assert command[0] == "ssh"
    assert command[-6:] == ["-p", "30022", "-l", "root", "--", "203.0.113.5"]
    assert "StrictHostKeyChecking=accept-new" in command
    assert f"HostKeyAlias=spotd-{worlds.RUNNING_ID}-1" in command
    asked = [command[0], "-G", "-F", "/dev/null", *command[1:]]
    real = subprocess.run(asked, capture_output=True, text=True, check=True)
    understood = dict(line.split(" ", 1) for line in real.stdout.splitlines() if " " in line)
    assert understood["userknownhostsfile"] == str(tmp_path / "my 50%d state" / "known_hosts")
    assert understood["forwardagent"] == "no"
    for shown_to_the_host in ("gssapidelegatecredentials", "passwordauthentication", "kbdinteractiveauthentication",
                              "hostbasedauthentication", "gssapiauthentication"):  # fmt: skip
        assert understood.get(shown_to_the_host, "no") == "no"
    assert "PreferredAuthentications=publickey" in command
    assert (understood["updatehostkeys"], understood["tunnel"]) == ("false", "false")
    assert understood["stricthostkeychecking"] == "accept-new"
    assert (understood["hostname"], understood["user"], understood["port"]) == ("203.0.113.5", "root", "30022")


def test_without_print_this_process_becomes_ssh(ctl: Ctl, shop: Hospitable) -> None:
    became: list[Any] = []
    ctl.monkeypatch.setattr("os.execvp", lambda *arguments: became.append(arguments))
    ctl.monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    result = ctl("ssh", "llama-lora")
    assert became[0][0] == "ssh"
    assert became[0][1] == words(ctl("ssh", "llama-lora", "--print"))
    assert "an untrusted host" in result.err
    ctl.monkeypatch.setattr("shutil.which", lambda name: None)
    assert ctl("ssh", "llama-lora").code == 74


HOSTILE = [
    pytest.param("-oProxyCommand=touch owned", 22, "root", id="an option for a host"),
    pytest.param("host", 22, "-oProxyCommand=x", id="an option for a user"),
    pytest.param("host;id", 22, "root", id="a command"),
    pytest.param("host\n", 22, "root", id="a line"),
    pytest.param("a b", 22, "root", id="a blank"),
    pytest.param("root@host", 22, "root", id="a user in the host"),
    pytest.param("fe80::1%eth0", 22, "root", id="a token"),
    pytest.param("%h", 22, "root", id="another token"),
    pytest.param("", 22, "root", id="nothing"),
    pytest.param("a" * 64, 22, "root", id="a label too long"),
    pytest.param(".".join(["a" * 60] * 5), 22, "root", id="a name too long"),
    pytest.param("host", 0, "root", id="no port"),
    pytest.param("host", 65_536, "root", id="a port too high"),
    pytest.param("host", -1, "root", id="a port below"),
    pytest.param("host", True, "root", id="a port that is none"),
    pytest.param("host", 22.0, "root", id="half a port"),
    pytest.param("host", "22 -oProxyCommand=x", "root", id="a text for a port"),
    pytest.param("host", 22, "", id="no user"),
    pytest.param("host", 22, "r$(id)", id="a command for a user"),
    pytest.param("host", 22, "x" * 200, id="a user too long"),
    pytest.param(None, None, None, id="null"),
    pytest.param("hôst", 22, "root", id="no ASCII"),
]


@pytest.mark.parametrize(("host", "port", "user"), HOSTILE)
def test_an_address_that_ssh_would_act_on_is_refused_twice(
    ctl: Ctl, shop: Hospitable, host: Any, port: Any, user: Any
) -> None:
    assert fault_of(host, port, user)
    shop.door = ShellAddress(host=host, port=port, user=user)
    result = ctl("ssh", "llama-lora", "--print")
    assert (result.code, result.out) == (5, "")
    assert "the plugin's answer cannot be used" in result.err
    ctl.place.answers("ports.address", {"job_id": "x", "attempt": 1, "host": host, "port": port, "user": user})
    result = ctl("ssh", "llama-lora", "--print")
    assert (result.code, result.out) == (5, "")
    assert "the machine's address cannot be used" in result.err


@every("host", ["h", "ssh.runpod.io", "203.0.113.5", "2001:db8::1", "a-b.example"])
def test_ordinary_addresses_are_taken(host: str) -> None:
    assert fault_of(host, 22, "7h9k2m4n6p-64411eb2") == ""


def test_where_there_is_no_shell_a_sentence_says_why(ctl: Ctl, shop: Hospitable) -> None:
    assert "has no machine now" in ctl("ssh", "prep").err
    assert ctl("ssh", "prep").code == 2
    shop.door = Unavailable("pod 7 does not run yet")
    result = ctl("ssh", "llama-lora")
    assert (result.code, "pod 7 does not run yet" in result.err) == (5, True)
    shop.power = Capability(available=False, reason="machines of this shop have no door")
    result = ctl("ssh", "llama-lora")
    assert result.code == 2
    assert result.err == "error: machines of this shop have no door\nhint: spotctl logs -f llama-lora\n"
    assert ctl("ssh", "nothing").code == 6


def test_a_provider_that_declares_nothing_gives_no_shell(ctl: Ctl) -> None:
    ctl.place.write(worlds.running())
    result = ctl("ssh", "llama-lora")
    assert result.code == 2
    assert "gives no shell" in result.err


# `spotctl forward`: a port of the machine at this computer.


@pytest.mark.process
def test_a_port_is_forwarded_to_this_computer_alone(ctl: Ctl, shop: Hospitable, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    command = words(ctl("forward", "llama-lora", "6006", "8888:9999", "-i", str(key), "--print"))
    assert command[:4] == ["ssh", "-N", "-F", "none"]
    assert command[4:8] == ["-L", "127.0.0.1:6006:127.0.0.1:6006", "-L", "127.0.0.1:9999:127.0.0.1:8888"]
    assert command[8:10] == ["-i", str(key)]
    assert "ClearAllForwardings=yes" not in command
    assert "ExitOnForwardFailure=yes" in command


@pytest.mark.parametrize("port", ["0", "65536", "-1", "6006:", "a", "6006:x", "1:2:3", "¹", "6006 -o x", "1" * 400])
def test_what_is_no_port_is_refused(port: str, ctl: Ctl, shop: Hospitable) -> None:
    result = ctl("forward", "llama-lora", "--print", "--", port)
    assert (result.code, result.out) == (2, "")


@pytest.mark.process
@pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed")
def test_a_page_of_the_job_is_read_through_a_real_sshd(ctl: Ctl, shop: Hospitable, tmp_path: Path) -> None:
    state = tmp_path / "my 50%d state"
    identity = tmp_path / "identity"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
    page = socket.create_server(("127.0.0.1", 0))
    with real_sshd(tmp_path / "sshd") as sshd, page, socket.create_server(("127.0.0.1", 0)) as taken:
        sshd.admit(identity.with_suffix(".pub").read_text())
        assert ctl("hosts", "add", "127.0.0.1", "--port", str(sshd.port), "--yes").code == 0
        shop.door = ShellAddress(host="127.0.0.1", port=sshd.port, user=sshd.user)
        local = taken.getsockname()[1]
        taken.close()
        ports = f"{page.getsockname()[1]}:{local}"
        command = words(ctl("forward", "llama-lora", ports, "-i", str(identity), "--print"))
        assert "StrictHostKeyChecking=yes" in command, "the pinned key counts, not the first one that is shown"
        shell = words(ctl("ssh", "llama-lora", "--print"))
        with (tmp_path / "log").open("w") as log:
            tunnel = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            page.settimeout(60)
            got = _read_through(local, page, tunnel, tmp_path / "log")
        finally:
            tunnel.terminate()
            tunnel.wait(20)
        assert got == b"loss 0.1"
        (state / "providers" / "ssh" / "known_hosts").write_text("")
        assert "StrictHostKeyChecking=yes" not in words(ctl("ssh", "llama-lora", "--print"))
        attempted = [shell[0], "-i", str(identity), *shell[1:], "true"]
        done = subprocess.run(attempted, capture_output=True, text=True, check=False)
        assert "Host key verification failed" in done.stderr, "a key that is pinned no more is not trusted"


def _read_through(local: int, page: socket.socket, tunnel: subprocess.Popen[bytes], log: Path) -> bytes:
    for _ in range(600):
        assert tunnel.poll() is None, log.read_text()
        try:
            client = socket.create_connection(("127.0.0.1", local), timeout=10)
            break
        except OSError:
            time.sleep(0.05)
    else:
        raise AssertionError(log.read_text())
    with client:
        there, _ = page.accept()
        with there:
            there.sendall(b"loss 0.1")
        return client.recv(100)

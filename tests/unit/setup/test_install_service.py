"""`spotd install-service`, on a computer that is a folder and whose systemctl is a list of calls."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotd.cli.client import spotctl as client_group
from spotd.cli.daemon import spotd as daemon_group
from spotd.cli.entry import run
from spotd.setup import SetupRefused
from spotd.setup.service import (
    HostSystem,
    ServiceInstaller,
    UnitPlan,
    changeable_by_others,
    installed_command,
    require_reachable,
    unit_text,
)
from tests.cases import every

PROGRAM = "/opt/spotd/bin/spotd"


@dataclass
class Computer:
    """A folder for /, and the calls of systemctl; `fails` are those it refuses, with what it prints."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    uid: int = 1000
    systemd: bool = True
    command: tuple[str, ...] = (PROGRAM,)
    environ: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environ |= {"HOME": str(self.root / "home/ann"), "USER": "ann"}
        self.monkeypatch.setattr("spotd.setup.service.HostSystem", self.host)
        self.monkeypatch.setenv("SPOTD_SOCKET", str(self.root / "no.sock"))
        self.monkeypatch.setattr("spotd.paths.SYSTEM_SOCKET", self.root / "no.sock")

    def host(self) -> HostSystem:
        if self.systemd:
            (self.root / "run/systemd/system").mkdir(parents=True, exist_ok=True)
        return HostSystem(
            root=self.root, uid=self.uid, environ=self.environ, command=self.command, folders=(), run=self._call
        )

    def _call(self, command: Sequence[str]) -> tuple[int, str]:
        words = " ".join(command)
        self.calls.append(words)
        said = next((said for call, said in self.fails.items() if call in words), None)
        return (0, "") if said is None else (1, said)

    def __call__(self, *arguments: str) -> int:
        return run(daemon_group, "spotd", ["install-service", *arguments])

    @property
    def unit(self) -> Path:
        return self.root / "home/ann/.config/systemd/user/spotd.service"

    @property
    def system_unit(self) -> Path:
        return self.root / "etc/systemd/system/spotd.service"

    def configure(self, text: str, *, system: bool = False) -> Path:
        place = self.root / ("etc/spotd" if system else "home/ann/.config/spotd")
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.toml").write_text(text)
        (place / "config.toml").chmod(0o644)
        return place / "config.toml"


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Computer:
    return Computer(tmp_path, monkeypatch)


def lines(path: Path, key: str) -> list[str]:
    return [line.partition("=")[2] for line in path.read_text().splitlines() if line.startswith(f"{key}=")]


def test_a_user_gets_a_unit_that_starts_this_very_program(computer: Computer) -> None:
    assert computer() == 0
    assert lines(computer.unit, "ExecStart") == [f"{PROGRAM} run"]
    state = computer.root / "home/ann/.local/state/spotd"
    assert lines(computer.unit, "ReadWritePaths") == [str(state)]
    assert state.stat().st_mode & 0o777 == 0o700, "systemd would refuse to start without it"
    assert computer.unit.stat().st_mode & 0o777 == 0o644
    assert computer.calls == [
        "systemctl --user daemon-reload",
        "systemctl --user enable spotd.service",
        "systemctl --user restart spotd.service",
    ]


def test_root_gets_the_unit_of_the_whole_computer_with_its_keys(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.uid = 0
    config = computer.configure('[providers.vast]\napi_key = { credential = "vast" }\n', system=True)
    (config.parent / "keys").mkdir()
    (config.parent / "keys/vast").write_text("a-secret-key")
    assert computer() == 0
    assert lines(computer.system_unit, "LoadCredential") == [f"vast:{config.parent}/keys/vast"]
    assert lines(computer.system_unit, "DynamicUser") == ["yes"]
    assert computer.calls[0] == "systemctl daemon-reload"
    said = capsys.readouterr()
    assert "SPOTD_SOCKET=/run/spotd/spotd.sock" in said.err
    assert "a-secret-key" not in said.out + said.err + computer.system_unit.read_text()


def test_what_init_writes_for_the_computer_is_what_its_service_takes(computer: Computer) -> None:
    computer.uid = 0
    etc = computer.root / "etc/spotd"
    computer.monkeypatch.setattr("spotd.paths.SYSTEM_CONFIG", etc / "config.toml")
    key = computer.root / "key"
    key.write_text("a-key-of-runpod")
    options = ["--market", "runpod", "--bucket", "s3://abc", "--budget-day", "1", "--no-check"]
    for name in ("runpod", "store-access", "store-secret"):
        options += ["--key", f"{name}=file:{key}"]
    assert run(client_group, "spotctl", ["init", "--system", *options]) == 0
    assert computer("--config", str(etc / "config.toml")) == 0
    names = ("runpod", "store-access", "store-secret")
    assert lines(computer.system_unit, "LoadCredential") == [f"{name}:{etc}/keys/{name}" for name in names]


def test_the_same_again_changes_nothing(computer: Computer) -> None:
    computer()
    before = computer.unit.stat()
    computer.calls.clear()
    assert computer() == 0
    assert computer.unit.stat() == before
    assert [call.split()[2] for call in computer.calls] == ["is-active", "show"]


def test_a_unit_that_differs_is_shown_and_kept_unless_forced(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.unit.parent.mkdir(parents=True)
    computer.unit.write_text("[Service]\nExecStart=/old/spotd run\n\x1b[2J")
    assert computer() == 2
    said = capsys.readouterr().err
    assert "-ExecStart=/old/spotd run" in said
    assert f"+ExecStart={PROGRAM} run" in said
    assert "\x1b" not in said
    assert computer.unit.read_text().startswith("[Service]\nExecStart=/old")
    assert computer.calls == []
    assert computer("--force") == 0
    assert lines(computer.unit, "ExecStart") == [f"{PROGRAM} run"]


def test_a_dry_run_prints_the_unit_even_where_there_is_no_systemd(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.systemd = False
    assert computer("--dry-run") == 0
    assert f"ExecStart={PROGRAM} run\n" in capsys.readouterr().out
    assert not computer.unit.exists()
    assert computer.calls == []


def test_what_cannot_be_is_refused_in_a_sentence(computer: Computer, capsys: pytest.CaptureFixture[str]) -> None:
    assert computer("--system") == 2
    assert f"sudo {PROGRAM} install-service --system" in capsys.readouterr().err
    computer.systemd = False
    shutil.rmtree(computer.root / "run")
    assert computer() == 2
    assert "systemd does not run this computer" in capsys.readouterr().err
    assert computer.calls == []


def test_a_masked_unit_is_not_written_through_its_link(computer: Computer, capsys: pytest.CaptureFixture[str]) -> None:
    computer.unit.parent.mkdir(parents=True)
    computer.unit.symlink_to("/dev/null")
    assert computer("--force") == 2
    assert "unmask spotd" in capsys.readouterr().err


def test_a_configuration_that_is_wrong_is_refused_with_its_line(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.configure("[daemon]\npoll_evry = '60s'\n")
    assert computer() == 2
    assert "poll_evry" in capsys.readouterr().err
    assert not computer.unit.exists()


def test_a_credential_without_its_file_is_refused(computer: Computer, capsys: pytest.CaptureFixture[str]) -> None:
    config = computer.configure('[providers.vast]\napi_key = { credential = "vast" }\n')
    assert computer() == 2
    assert f"is missing: {config.parent}/keys/vast" in capsys.readouterr().err
    key = computer.root / "elsewhere of mine"
    key.write_text("k")
    assert computer("--credential", f"vast={key}") == 0
    assert lines(computer.unit, "LoadCredential") == [f"vast:{key}"]
    assert computer("--credential", f"vats={key}", "--force") == 2
    assert computer("--credential", "vast") == 2


def test_variables_of_the_shell_that_the_service_lacks_are_named(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.configure('[providers.vast]\napi_key = { env = "VAST_API_KEY" }\n')
    assert computer() == 0
    said = capsys.readouterr().err
    assert "VAST_API_KEY of your shell" in said
    assert '{ credential = "vast" }' in said


def test_what_another_shell_would_search_elsewhere_is_written_down(computer: Computer) -> None:
    computer.environ |= {"XDG_STATE_HOME": "/data/my state", "XDG_CONFIG_HOME": str(computer.root / "conf")}
    other = computer.root / "other.toml"
    other.write_text(f'[store]\nurl = "file://{computer.root}/store"\n')
    computer.environ["SPOTD_CONFIG"] = str(other)
    installer = ServiceInstaller(system=False, config=None, host=computer.host())
    text = installer.text(installer.loaded(), {})
    assert 'Environment="XDG_STATE_HOME=/data/my state"' in text
    assert f"{PROGRAM} run --config {other}\n" in text
    assert 'ReadWritePaths="/data/my state/spotd"\n' in text
    assert f"ReadWritePaths={computer.root}/store\n" in text
    assert installer.path == computer.root / "conf/systemd/user/spotd.service"


def test_what_systemctl_refuses_is_repeated_with_a_way_out(
    computer: Computer, capsys: pytest.CaptureFixture[str]
) -> None:
    computer.fails["daemon-reload"] = "Failed to connect to bus: No medium found"
    assert computer() == 2
    said = capsys.readouterr().err
    assert "No medium found" in said
    assert "log in as this user itself" in said
    computer.fails = {"NeedDaemonReload": "yes", "restart": "Job for spotd.service failed"}
    assert computer() == 2
    assert "journalctl --user -u spotd" in capsys.readouterr().err


def test_uninstall_leaves_state_and_configuration(computer: Computer, capsys: pytest.CaptureFixture[str]) -> None:
    config = computer.configure("[daemon]\n")
    computer()
    computer.calls.clear()
    assert computer("--uninstall", "--dry-run") == 0
    assert computer.unit.exists()
    assert computer("--uninstall") == 0
    assert not computer.unit.exists()
    assert config.exists()
    assert computer.calls == ["systemctl --user disable --now spotd.service", "systemctl --user daemon-reload"]
    assert computer("--uninstall") == 0
    assert "is not there" in capsys.readouterr().out


def test_uninstall_leaves_no_machine_behind_unasked(computer: Computer, capsys: pytest.CaptureFixture[str]) -> None:
    computer()
    computer.monkeypatch.setattr("spotd.client.daemon.Daemon.status", lambda self: {"status": {"machines": 2}})
    assert computer("--uninstall") == 2
    assert "2 machines would be left without spotd" in capsys.readouterr().err
    assert computer.unit.exists()
    assert computer("--uninstall", "--force") == 0
    assert not computer.unit.exists()


@every(
    ("word", "spelled"),
    [
        pytest.param("/a b/spotd", '"/a b/spotd" run', id="blank"),
        pytest.param("/50%/spotd", '"/50%%/spotd" run', id="per cent"),
        pytest.param("/$HOME/spotd", '"/$$HOME/spotd" run', id="dollar"),
        pytest.param('/"q"\\/spotd', '"/\\"q\\"\\\\/spotd" run', id="quotes"),
    ],
)
def test_a_path_keeps_its_meaning_in_the_unit(word: str, spelled: str) -> None:
    assert f"ExecStart={spelled}\n" in unit_text(UnitPlan(system=True, command=(word,)))


def test_a_path_with_a_line_break_is_refused() -> None:
    with pytest.raises(SetupRefused, match="cannot be written"):
        unit_text(UnitPlan(system=True, command=("/a\nExecStartPre=/bin/evil",)))


def test_a_program_that_the_sandbox_hides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupRefused, match="is hidden from it"):
        require_reachable([Path("/home/ann/.local/share/pipx/venvs/spotd/bin")], system=True)
    require_reachable([Path("/home/ann/.local/share/pipx/venvs/spotd/bin")], system=False)
    with pytest.raises(SetupRefused, match="is hidden from it"):
        require_reachable([Path("/tmp/venv/bin")], system=False)
    require_reachable([Path("/usr/bin")], system=True)


def test_a_program_that_others_may_change_is_given_no_keys_of_root(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    tmp_path.chmod(0o777)
    loose = tmp_path if (tmp_path / "venv").stat().st_uid == 0 else tmp_path / "venv"
    assert changeable_by_others(tmp_path / "venv") == loose
    assert changeable_by_others(Path("/usr/bin")) is None


def test_the_program_is_found_beside_its_interpreter() -> None:
    (program,) = installed_command()
    assert Path(program).name == "spotd"
    assert Path(program).is_file()


analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")


def written(folder: Path, *, system: bool) -> Path:
    """A unit with everything in it that the command may write."""
    key = folder / "a key"
    key.write_text("k")
    plan = UnitPlan(
        system=system, command=(shutil.which("true") or "/bin/true",), config=folder / "my config.toml",
        writable=(folder / "a b",), credentials={"vast": key, "store-secret_key": key},
        environment={"XDG_STATE_HOME": str(folder)},
    )  # fmt: skip
    unit = folder / "spotd.service"
    unit.write_text(unit_text(plan))
    return unit


@analyze
@pytest.mark.process
@pytest.mark.parametrize("system", [True, False], ids=["system", "user"])
def test_what_is_written_is_exposed_no_more_than_the_goal_and_known_to_systemd(tmp_path: Path, system: bool) -> None:
    unit = str(written(tmp_path, system=system))
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=15", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    command = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    odd = [line for line in done.stderr.splitlines() if not re.search("RestartSteps|RestartMaxDelaySec", line)]
    assert not [line for line in odd if "spotd.service" in line], done.stderr


def test_the_example_for_launchd_is_a_property_list_that_keeps_machines_alive() -> None:
    path = Path(__file__).parents[3] / "examples" / "launchd" / "spotd.plist"
    agent = plistlib.loads(path.read_bytes())
    assert agent["ProgramArguments"][1:] == ["run"]
    assert agent["KeepAlive"] is True
    assert agent["AbandonProcessGroup"] is True, "machines of the local market outlive the daemon"
    assert agent["Umask"] == 0o077
    assert agent["ExitTimeOut"] > 30

"""`spotctl init`, against fake markets and a small bucket that verifies every signature, all on loopback."""

from __future__ import annotations

import getpass
import io
import os
import pty
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from spotd import paths
from spotd.cli import stderr
from spotd.config.load import load
from spotd.daemon.clock import SystemClock
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.boundary import install_command
from spotd_providers.local.hosts.machines import REAL_TIME
from spotd_providers.testkit.serve import serving
from tests.fakes import honest_s3
from tests.fakes.aws import ACCESS_KEY, Ec2Api, Ec2Cloud
from tests.fakes.runpod import RunpodApi, RunpodCloud, some_gpus
from tests.fakes.vastai import VastApi, VastCloud, some_asks
from tests.fakes.vastai.quirks import Quirks
from tests.unit.api.command import Result, spotctl

SECRETS = ("vast-canary-key", "runpod-canary-key", honest_s3.SECRET)


class _Hasty(SystemClock):
    """Retries without their pauses."""

    async def sleep(self, duration: timedelta) -> None:
        await anyio.lowlevel.checkpoint()


@dataclass
class Person:
    """`spotctl init` with a person at the terminal; answers are typed in order, hidden ones are never echoed."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    typed: deque[str] = field(default_factory=deque)
    asked: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.home / ".config/spotd/config.toml"

    def file(self, name: str) -> Path:
        return self.config.parent / "keys" / name

    def __call__(self, *answers: str, options: tuple[str, ...] = ()) -> Result:
        self.typed = deque(answers)
        with self.monkeypatch.context() as patch:
            patch.setattr(stderr, "can_ask", lambda: True)
            patch.setattr(getpass, "getpass", self._hidden)
            patch.setattr("spotd.cli.commands.init.sys", _Console(self._shown))
            return self.alone(*options)

    def alone(self, *options: str) -> Result:
        """Without a terminal."""
        result = spotctl(self.monkeypatch, None, "init", *options)
        for secret in SECRETS:
            assert secret not in result.out + result.err + "".join(self.asked)
            if self.config.exists():
                assert secret not in self.config.read_text()
        return result

    def _hidden(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self._next()

    def _shown(self) -> str:
        return f"{self._next()}\n"

    def _next(self) -> str:
        answer = self.typed.popleft() if self.typed else "^C"
        if answer == "^C":
            raise KeyboardInterrupt
        return answer

    def left(self) -> list[str]:
        """Every file that was written."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file())


class _Console:
    """The parts of `sys` that a question needs."""

    def __init__(self, readline: Callable[[], str]) -> None:
        self.stderr = io.StringIO()
        self.stdin = type("Stdin", (), {"readline": staticmethod(readline)})


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    for name in os.environ:
        if name.startswith(("SPOTD_", "XDG_", "AWS_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("spotd.setup.draft.SystemClock", _Hasty)
    return Person(home, monkeypatch)


@pytest.fixture(scope="module")
def vast_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VastCloud]:
    free = Quirks(rate_limits=False)
    cloud = VastCloud(tmp_path_factory.mktemp("vast"), clock=REAL_TIME, api_key=SECRETS[0], quirks=free)
    cloud.stock(*some_asks())
    yield cloud
    cloud.shut_down()


@pytest.fixture(scope="module")
def vast_url(vast_cloud: VastCloud) -> Iterator[str]:
    with serving(VastApi(vast_cloud)) as served:
        yield served.url


@pytest.fixture
def vast(person: Person, vast_url: str) -> None:
    person.monkeypatch.setenv("SPOTD_PROVIDERS__VAST__BASE_URL", vast_url)


@pytest.fixture
def bucket(person: Person) -> Iterator[honest_s3.Honest]:
    with honest_s3.running() as server:
        person.monkeypatch.setenv("SPOTD_STORE__GRANTS", "sts")
        person.monkeypatch.setenv("SPOTD_STORE__GRANTS_ENDPOINT_URL", server.url)
        yield server


def test_by_default_the_local_market_is_set_up_without_a_key(person: Person) -> None:
    assert person("", "", "").code == 0
    loaded = load(person.config, environ={})
    assert [one.name for one in loaded.config.providers] == ["local"]
    assert loaded.config.budget.day == 10_000_000
    assert loaded.warnings == ()
    assert person.left() == [".config/spotd/config.toml"]


def test_a_market_with_its_key_and_bucket_is_tried_and_written(
    person: Person, vast: None, bucket: honest_s3.Honest
) -> None:
    result = person(
        "vast", SECRETS[0], f"s3://{honest_s3.BUCKET}/lab", bucket.url, "auto", honest_s3.KEY, honest_s3.SECRET,
        "RTX_4090=0.40, H100=2.60", "25",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "key: accepted" in result.err
    assert "hosts can be permitted to write" in result.err
    assert bucket.objects == {}, "what was tried is deleted again"
    loaded = load(person.config, environ={})
    assert loaded.warnings == ()
    assert loaded.config.budget.day == 25_000_000
    assert set(loaded.config.ceilings.values()) == {400_000, 2_600_000}
    assert person.file("vast").read_text() == f"{SECRETS[0]}\n"
    assert person.file("store-secret").read_text() == f"{honest_s3.SECRET}\n"
    assert {path.stat().st_mode & 0o777 for path in (person.config, *person.file("").iterdir())} == {0o600}
    assert person.file("").stat().st_mode & 0o777 == 0o700
    assert result.out.splitlines() == [
        str(path) for path in (person.config, *map(person.file, ("vast", "store-access", "store-secret")))
    ]


def test_each_wrong_answer_is_asked_for_again_with_its_reason(
    person: Person, vast: None, bucket: honest_s3.Honest
) -> None:
    result = person(
        "vats", "vast",                                     # no such market
        "wrong-key-that-is-long", "env:NOT_SET", "file:/no/such", "two words", "", SECRETS[0],
        "my bucket", "s3://UPPER", f"s3://{honest_s3.BUCKET}", bucket.url, "", honest_s3.KEY, "a-wrong-secret",
        f"s3://{honest_s3.BUCKET}/lab", bucket.url, "auto", honest_s3.KEY, honest_s3.SECRET,
        "H1000=2", "H100=NaN", "H100=1e308", "H100=2.60\nday = 9", "H100=2.60",
        "-5", "0", "lots", "25",
    )  # fmt: skip
    assert result.code == 0, result.err
    for reason in (
        'did you mean "vast"', "refused the API key", "NOT_SET is not set", "/no/such cannot be read", "holds blanks",
        "an answer is needed",        "names no bucket", "SignatureDoesNotMatch",
        "no GPU is known by this name", "'NaN' is no amount", "'1e308' is no amount",
        "'-5' is no amount", "must be above 0", "'lots' is no amount",
    ):  # fmt: skip
        assert reason in result.err
    assert load(person.config, environ={}).config.budget.day == 25_000_000


def test_a_bucket_that_may_only_be_read_is_refused(person: Person, bucket: honest_s3.Honest) -> None:
    bucket.keys[honest_s3.KEY].may = lambda action, _key: action in {"GetObject", "ListBucket"}
    result = person(
        "local", "", "", options=("--bucket", f"s3://{honest_s3.BUCKET}/lab", "--endpoint-url", bucket.url, "--region",
        "auto", "--key", f"store-access=file:{_key(person, honest_s3.KEY)}",
        "--key", f"store-secret=file:{_key(person, honest_s3.SECRET)}"),
    )  # fmt: skip
    assert result.code == 2
    assert "AccessDenied" in result.err or "may not" in result.err or "refused" in result.err, result.err
    assert "docs/stores.md" in result.err
    assert not person.config.exists()


def _key(person: Person, secret: str) -> Path:
    path = person.home / f"key-{len(secret)}"
    path.write_text(secret)
    path.chmod(0o600)
    return path


def test_a_dead_host_is_said_and_can_be_left_by_ctrl_c(person: Person) -> None:
    person.monkeypatch.setenv("SPOTD_PROVIDERS__VAST__BASE_URL", "http://127.0.0.1:9")
    result = person("vast", SECRETS[0], "^C")
    assert result.code == 130
    assert "error: vast.ai" in result.err
    assert person.left() == []


@pytest.mark.parametrize(
    ("past", "needs_machine", "shown"),
    [
        ({"H100 SXM": 1.72, "RTX 4090": 0.31}, False, "H100_SXM: half of the last week was under $2.064 (on demand)"),
        ({}, False, "none of these markets states past prices"),
        ({"H100 SXM": 1.72}, True, "vast states no past prices now"),
    ],
    ids=["a week, with the fee of 1.2", "none", "not for this account"],
)
def test_past_prices_are_shown_before_a_ceiling_is_asked_for(
    person: Person,
    vast: None,
    vast_cloud: VastCloud,
    bucket: honest_s3.Honest,
    past: dict[str, float],
    needs_machine: bool,
    shown: str,
) -> None:
    person.monkeypatch.setattr(vast_cloud, "past_usd", past)
    person.monkeypatch.setattr(vast_cloud, "quirks", replace(vast_cloud.quirks, metrics_need_machine=needs_machine))
    answers = ("vast", SECRETS[0], f"s3://{honest_s3.BUCKET}/lab", bucket.url, "auto", honest_s3.KEY, honest_s3.SECRET)
    result = person(*answers, "H100=2.60", "25")
    assert result.code == 0, result.err
    assert shown in result.err
    assert set(load(person.config, environ={}).config.ceilings.values()) == {2_600_000}


@pytest.mark.parametrize("answers", [0, 1, 2, 6, 7, 8])
def test_ctrl_c_at_any_question_leaves_nothing(
    person: Person, vast: None, bucket: honest_s3.Honest, answers: int
) -> None:
    given = [
        "vast", SECRETS[0], f"s3://{honest_s3.BUCKET}/lab", bucket.url, "auto", honest_s3.KEY, honest_s3.SECRET, "", "1"
    ]  # fmt: skip
    assert person(*given[:answers], "^C").code == 130
    assert person.left() == []


def test_what_exists_is_never_overwritten(person: Person, vast: None) -> None:
    person.config.parent.mkdir(parents=True)
    person.config.write_text("# mine\n")
    result = person()
    assert result.code == 2
    assert "stays as it is" in result.err
    assert person.config.read_text() == "# mine\n"
    person.config.unlink()
    person.file("").mkdir()
    person.file("vast").write_text("an older key")
    result = person("vast", SECRETS[0], "s3://abc", "", "", "", "", "1", options=("--no-check",))
    assert result.code == 74
    assert f"{person.file('vast')} exists already" in result.err
    assert person.file("vast").read_text() == "an older key"
    assert not person.config.exists()


def test_a_disk_that_is_full_leaves_nothing_half_written(person: Person) -> None:
    real = paths.create_whole

    def full(path: Path, text: str, *, mode: int) -> None:
        if path.name == "config.toml":
            raise OSError(28, "No space left on device", str(path))
        real(path, text, mode=mode)

    person.monkeypatch.setattr("spotd.setup.draft.create_whole", full)
    result = person("runpod", SECRETS[1], "s3://abc", "", "", "", "", "1", options=("--no-check",))
    assert result.code == 74
    assert "No space left" in result.err
    assert person.left() == []
    assert not person.config.parent.exists()


def test_without_a_terminal_every_answer_is_an_option(person: Person, vast: None, bucket: honest_s3.Honest) -> None:
    person.monkeypatch.setenv("MY_VAST", SECRETS[0])
    access, secret = _key(person, honest_s3.KEY), _key(person, honest_s3.SECRET)
    options = [
        "--market", "vast", "--market", "local", "--key", "vast=env:MY_VAST", "--bucket", f"s3://{honest_s3.BUCKET}",
        "--endpoint-url", bucket.url, "--region", "auto", "--key", f"store-access=file:{access}",
        "--key", f"store-secret=file:{secret}", "--ceiling", "H100=2.6", "--budget-day", "5",
    ]  # fmt: skip
    result = person.alone(*options)
    assert result.code == 0, result.err
    text = person.config.read_text()
    assert 'api_key = { env = "MY_VAST" }' in text
    assert f'secret_key = {{ file = "{secret}" }}' in text
    assert not person.file("").exists(), "what lies somewhere already is named there"
    assert load(person.config, environ={"MY_VAST": SECRETS[0]}).warnings == ()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--market", "vast"), "Key of vast.ai is missing"),
        (("--market", "vast", "--key", "vast=env:MY_VAST", "--no-check"), "Bucket for checkpoints"),
        (("--market", "vast", "--key", "vast=env:MY_VAST", "--bucket", "s3://abc", "--no-check"), "Most dollars"),
        (("--market", "vast", "--key", f"vast={SECRETS[0]}", "--no-check"), "not taken from the command line"),
        (("--market", "vast", "--key", "vast=file:", "--no-check"), "not taken from the command line"),
        (("--key", f"store-secret={SECRETS[0]}"), "not taken from the command line"),
        (("--key", "vast=env:X"), "no such market is chosen"),
        (("--key", SECRETS[0]), "NAME=PLACE"),
        (("--market", "vats"), 'did you mean "vast"'),
        (("--ceiling", "H100"), "GPU=USD"),
        (("--budget-day", "NaN"), "no amount of dollars"),
    ],
    ids=["key", "bucket", "budget", "typed key", "no file", "typed secret", "unused key", "bare key",
         "market", "ceiling", "amount"],
)  # fmt: skip
def test_an_option_that_is_missing_or_wrong_ends_it_with_a_sentence(
    person: Person, options: tuple[str, ...], reason: str
) -> None:
    person.monkeypatch.setenv("MY_VAST", SECRETS[0])
    result = person.alone(*options)
    assert result.code == 2
    assert reason in result.err
    assert not any(secret in result.err + result.out for secret in SECRETS)
    assert person.left() == []


def test_for_the_whole_computer_keys_become_credentials(person: Person) -> None:
    target = person.home / "etc/spotd/config.toml"
    person.monkeypatch.setattr("spotd.paths.SYSTEM_CONFIG", target)
    result = person("runpod", SECRETS[1], "s3://abc", "", "", "", "", "1", options=("--no-check", "--system"))
    assert result.code == 0, result.err
    assert 'api_key = { credential = "runpod" }' in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o644, "the service's own user reads it; it holds no key"
    assert (target.parent / "keys/runpod").stat().st_mode & 0o777 == 0o600
    assert "install-service --system" in result.err


def test_a_real_market_without_the_library_of_its_bucket_is_refused_at_once(person: Person) -> None:
    person.monkeypatch.setattr("spotd.cli.commands.init.find_spec", lambda name: None)
    result = person("vast", "local", "", "")
    assert result.code == 0
    assert install_command("s3") in result.err
    assert load(person.config, environ={}).config.providers[0].name == "local"


@pytest.mark.parametrize("ok", [True, False])
def test_a_server_that_repeats_the_key_does_not_get_it_shown(person: Person, ok: bool) -> None:
    async def lines(_self: object, _plugin: object, _settings: object, credential: str) -> list[CheckLine]:
        return [CheckLine(name="key", ok=ok, detail=f"key {credential} of ann")]

    person.monkeypatch.setattr("spotd.setup.draft.DraftChecks._lines", lines)
    result = person("runpod", SECRETS[1], "^C")
    assert "of ann" in result.err
    assert SECRETS[1] not in result.err


def test_runpod_is_asked_as_well(person: Person, tmp_path: Path) -> None:
    cloud = RunpodCloud(tmp_path / "runpod", clock=REAL_TIME)
    cloud.stock(*some_gpus())
    with serving(RunpodApi(cloud)) as served:
        person.monkeypatch.setenv("SPOTD_PROVIDERS__RUNPOD__BASE_URL", served.url)
        result = person("runpod", "wrong-key", cloud.api_key, "^C")
    cloud.shut_down()
    assert result.err.count("error: RunPod") == 1
    assert "can list pods" in result.err
    assert person.left() == []


@pytest.mark.process
def test_a_real_terminal_shows_no_key_that_is_typed(person: Person) -> None:
    environment = {"HOME": str(person.home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    answers = ["runpod", SECRETS[1], "s3://abc", "", "", "", "", "1"]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "spotd.cli.client", "init", "--no-check"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd="/",
                             start_new_session=True)  # fmt: skip
    os.close(theirs)
    shown = ""
    with child, os.fdopen(ours, "rb+", buffering=0) as screen:
        for answer in [*answers, None]:
            # A question ends in a colon and a blank; only then is the terminal ready for a hidden answer.
            while answer is None or not shown.endswith(": "):
                try:
                    shown += screen.read(1024).decode()
                except OSError:
                    break
            if answer is not None:
                screen.write(f"{answer}\n".encode())
                shown += "\n"
    assert child.returncode == 0, shown
    assert "Key of RunPod" in shown
    assert SECRETS[1] not in shown
    assert person.file("runpod").read_text() == f"{SECRETS[1]}\n"


@pytest.mark.long
def test_aws_is_asked_who_the_key_is(person: Person, tmp_path: Path) -> None:
    cloud = Ec2Cloud(tmp_path / "aws", clock=REAL_TIME)
    cloud.stock_usual()
    with serving(Ec2Api(cloud)) as served:
        person.monkeypatch.setenv("SPOTD_PROVIDERS__AWS__ENDPOINT_URL", served.url)
        person.monkeypatch.setenv("SPOTD_PROVIDERS__AWS__CONTAINER", "none")
        result = person("aws", "half-a-key", f"{ACCESS_KEY}:secret", "^C")
    cloud.shut_down()
    assert result.err.count("error:") == 1, result.err
    assert "key: arn:aws:" in result.err
    assert person.left() == []

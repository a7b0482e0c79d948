from __future__ import annotations

import hashlib
import json
import tarfile
import tomllib
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from spotd.api.responses import OverBudget
from spotd.cli.commands.submit import submit
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused
from spotd.store import JobView
from spotd_jobs.spec.keys import FLAGS
from tests.cases import every
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl

CODE = "code/"
JOB = """\
name = "llama-lora"
run = "python train.py"
image = "pytorch/pytorch:2.9.0"
[resources]
gpu = ["H100:1"]
disk = "100GB"
[price]
max_price = 2.40
[budget]
job = 120
"""


@pytest.fixture
def ctl(ctl: Ctl) -> Ctl:
    """`spotctl` against a daemon that knows one H100 for $2.31."""
    sold = replace(worlds.h100(), gpu="H100_SXM")
    ctl.rig.shop.offer_index = [sold]
    ctl.place.cycle()
    return ctl


def newest(ctl: Ctl) -> JobView:
    return ctl.rig.store.read(lambda reads: reads.jobs())[0]


def codes(ctl: Ctl) -> dict[str, bytes]:
    """What is stored as code, by its hash."""
    found = [info.key for info in ctl.rig.objects.list(CODE)]
    return {
        key.removeprefix(CODE).removesuffix(".tar.gz"): ctl.rig.objects.get(key, bytes_max=10_000_000) for key in found
    }


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.toml"
    path.write_text(JOB)
    return path


PLAN = """\
llama-lora: python train.py
  image   pytorch/pytorch:2.9.0
  code    none: nothing of this folder travels (--workdir . packs it)
  ceiling H100 $2.400 per GPU-hour
  budget  $120.00 for the whole job

WHERE      GPU     MARKET  GPU$/H   +DISK    +FEE  +TRAFFIC   =$/H  $/GPU-H    BID  CEILING  VERDICT
vast/4410  H100:1  spot     1.850  0.0417  0.3783    0.0400  2.310    2.310  2.400    2.400  ok

12 offers passed over: less disk than 100 GB
verdict: would start now on vast/4410
"""


def test_a_dry_run_prints_the_plan_as_data_and_queues_nothing(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    ctl.place.answers("submissions.plan", made_responses.plan())
    result = ctl("submit", "train.toml", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert result.out == PLAN
    assert sent == []


def test_a_dry_run_in_json_is_the_plan(ctl: Ctl, job_file: Path) -> None:
    body = json.loads(ctl("submit", "train.toml", "--dry-run", "-o", "json").out)
    assert (body["schema"], body["plan"]["verdict_kind"]) == (1, "placed")


def test_submit_shows_the_plan_then_prints_the_id_and_three_next_commands(ctl: Ctl, job_file: Path) -> None:
    plan = ctl("submit", "train.toml", "--dry-run").out
    result = ctl("submit", "train.toml")
    job = newest(ctl).id
    assert (result.code, result.out) == (0, f"{job}\n")
    assert result.err == plan + f"  spotctl why {job}\n  spotctl logs -f {job}\n  spotctl cancel {job}\n"


def test_a_job_can_begin_from_another_jobs_checkpoint(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    kept = worlds.stored_checkpoint(ctl.rig, "step-900", b"w" * 1_500_000, of="6k0other00")
    ctl.place.write(worlds.ended(name="before", ident="6k0other00", checkpoints=(kept,)))
    result = ctl("submit", "train.toml", "-y", "--resume-from", "before:step-900")
    assert result.code == 0
    assert "  resume  from step-900 (1.5 MB) of job 6k0other00\n" in result.err
    assert sent[0][0].resume_from == "before:step-900"


@pytest.mark.parametrize(("text", "code"), [("nobody", 6), (":step-900", 2), ("before:", 2)])
def test_what_names_no_checkpoint_is_refused_before_anything_is_queued(
    ctl: Ctl, job_file: Path, text: str, code: int
) -> None:
    sent = ctl.place.asked("submissions.submit")
    assert ctl("submit", "train.toml", "-y", "--resume-from", text).code == code
    assert sent == []


def test_detached_submit_prints_the_id_only(ctl: Ctl, job_file: Path) -> None:
    result = ctl("submit", "train.toml", "-d", "-o", "id")
    assert (result.out, result.err) == (f"{newest(ctl).id}\n", "")


def test_submit_json_is_the_job(ctl: Ctl, job_file: Path) -> None:
    body = json.loads(ctl("submit", "train.toml", "-y", "-o", "json").out)
    assert body["job"]["id"] == newest(ctl).id


def test_flags_override_the_file(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    flags = ["--gpu", "A100-80GB:2,H100", "--max-price", "19.20/h", "--budget", "50", "-e", "A=1", "--priority", "-5"]
    assert ctl("submit", "train.toml", *flags, "-y", "--", "python", "other.py", "--lr", "3e-4").code == 0
    draft = sent[0][0].draft
    assert draft.flags == {
        "resources": {"gpu": ["A100-80GB:2", "H100"]},
        "price": {"max_price": "19.20/h"},
        "budget": {"job": "50"},
        "env": {"A": "1"},
        "schedule": {"priority": -5},
        "run": ["python", "other.py", "--lr", "3e-4"],
    }
    assert draft.data["name"] == "llama-lora"
    assert (draft.source, draft.base_dir) == ("train.toml", str(job_file.parent))


def test_a_job_can_be_given_by_flags_alone_and_is_named_after_its_program(ctl: Ctl, job_file: Path) -> None:
    result = ctl("submit", "--gpu", "H100", "--image", "x", "--max-price", "2", "-y", "--", "python", "My Train.py")
    assert result.code == 0
    assert newest(ctl).name.startswith("my-train-")


def test_a_job_can_come_from_stdin(ctl: Ctl) -> None:
    sent = ctl.place.asked("submissions.submit")
    assert ctl("submit", "-", "-y", stdin=JOB).code == 0
    assert sent[0][0].draft.source == "stdin"


def test_the_workdir_is_packed_and_stored_once(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    code = job_file.parent / "code"
    (code / "data").mkdir(parents=True)
    (code / "train.py").write_text("print(1)")
    (code / "data" / "big").write_text("ignored")
    (code / ".gitignore").write_text("data/\n")
    assert ctl("submit", "train.toml", "--workdir", "code", "-y").code == 0
    assert ctl("submit", "train.toml", "--workdir", "code", "-y", "--name", "second").code == 0
    (first,), (second,) = sent
    assert first.code_sha256 == second.code_sha256
    ((sha256, data),) = codes(ctl).items()
    assert sha256 == first.code_sha256 == hashlib.sha256(data).hexdigest()
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        assert sorted(archive.getnames()) == [".gitignore", "train.py"]


def test_a_missing_workdir_is_named(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    result = ctl("submit", "train.toml", "--workdir", "nowhere", "-y")
    assert result.code == 2
    assert "nowhere does not exist" in result.err
    assert sent == []


def test_code_that_the_daemon_finds_too_large_is_refused_with_a_way_out(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    code = job_file.parent / "code"
    code.mkdir()
    # Not compressible, and above the test daemon's limit of a megabyte.
    (code / "blob").write_bytes(b"".join(hashlib.sha256(str(n).encode()).digest() for n in range(60_000)))
    result = ctl("submit", "train.toml", "--workdir", "code", "-y")
    assert result.code == 2
    assert "hint: list data and checkpoints in .gitignore" in result.err
    assert sent == []


def test_secrets_come_from_the_environment_and_are_never_shown(
    ctl: Ctl, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ctl.place.asked("submissions.submit")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-env")
    result = ctl("submit", "train.toml", "--secret", "WANDB_API_KEY", "-y")
    assert sent[0][0].secrets == {"WANDB_API_KEY": "hunter2-env"}
    assert "hunter2" not in result.out + result.err
    assert "hunter2" not in repr(sent[0][0])


def test_secrets_of_a_file_come_before_the_environment_and_only_named_ones_are_sent(
    ctl: Ctl, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ctl.place.asked("submissions.submit")
    monkeypatch.setenv("A", "from-env")
    file = job_file.parent / "secrets.env"
    file.write_text("# mine\nexport A='from file'\n\nB=\"b=b\"\nC=extra\n")
    file.chmod(0o600)
    result = ctl("submit", "train.toml", "--secret", "A", "--secret", "B", "--secret-file", "secrets.env", "-y")
    assert sent[0][0].secrets == {"A": "from file", "B": "b=b"}
    assert "not sent, since the job does not name them as secrets: C" in result.err


def test_a_secret_file_that_others_can_read_is_warned_about(ctl: Ctl, job_file: Path) -> None:
    file = job_file.parent / "secrets.env"
    file.write_text("A=1\n")
    file.chmod(0o644)
    assert "chmod 600" in ctl("submit", "train.toml", "--secret", "A", "--secret-file", "secrets.env", "-y").err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot be read: No such file or directory", id="missing"),
        pytest.param(b"A=1\nhunter2\n", ":2: not a line of the form NAME=value", id="no equals sign"),
        pytest.param(b"\xff\xfe", "is not UTF-8 text", id="binary"),
        pytest.param(b"B=1\n", "the secret A is not set", id="another name"),
        pytest.param(b"A=\n", "the secret A is empty", id="empty"),
        pytest.param(b"A=hunter2\0\n", "the secret A holds a NUL", id="NUL"),
    ],
)
def test_a_secret_without_a_value_stops_the_submission_without_showing_any(
    ctl: Ctl, job_file: Path, content: bytes | None, message: str
) -> None:
    sent = ctl.place.asked("submissions.submit")
    file = job_file.parent / "secrets.env"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    result = ctl("submit", "train.toml", "--secret", "A", "--secret-file", "secrets.env", "-y")
    assert result.code == 2
    assert message in result.err
    assert "hunter2" not in result.err
    assert sent == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--secret", "ABSENT"), "the secret ABSENT is not set"),
        (("--workdir", "nowhere"), "does not exist"),
        (("--workdir", "keys"), "what looks like keys"),
    ],
    ids=["secret", "no folder", "keys"],
)
def test_what_is_checked_here_is_checked_before_a_plan_is_asked_for(
    ctl: Ctl, job_file: Path, words: tuple[str, ...], message: str
) -> None:
    (job_file.parent / "keys").mkdir()
    (job_file.parent / "keys" / "id_rsa").write_text("hunter2")
    asked = ctl.place.asked("submissions.plan")
    result = ctl("submit", "train.toml", *words, "-y")
    assert (result.code, asked) == (2, [])
    assert message in result.err
    assert "VERDICT" not in result.err


def test_the_plan_says_where_the_image_is_not_used(ctl: Ctl, job_file: Path) -> None:
    assert "does not run the image" not in ctl("submit", "train.toml", "--dry-run").out
    policy = ctl.rig.policy.current
    plain = {name: replace(rules, runs_images=False) for name, rules in policy.providers.items()}
    ctl.rig.policy.reload(replace(policy, providers=plain))
    ctl.place.cycle()
    shown = " ".join(ctl("submit", "train.toml", "--dry-run").out.split())
    assert "is a process of this computer: it does not run the image pytorch/pytorch:2.9.0" in shown


def test_a_variable_that_is_not_utf8_is_not_sent(ctl: Ctl, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "hunter2\udcff")
    result = ctl("submit", "train.toml", "--secret", "A", "-y")
    assert result.code == 2
    assert "the secret A holds a NUL or bytes that are not UTF-8 text" in result.err
    assert "base64" in result.err
    assert "hunter2" not in result.err


def test_nothing_under_the_ceiling_is_exit_3_when_waiting_is_not_wanted(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    ctl.place.answers(
        "submissions.plan", made_responses.plan(fits=False, candidates=[made_responses.quote(effective_usd_gpu_h=2.61)])
    )
    result = ctl("submit", "train.toml", "-y", "--no-wait-price")
    assert (result.code, result.out) == (3, "")
    assert "error: nothing is under the ceiling now: the lowest is $2.610 per GPU-hour" in result.err
    assert sent == []


def test_a_job_waits_for_its_price_otherwise(ctl: Ctl, job_file: Path) -> None:
    ctl.place.answers("submissions.plan", made_responses.plan(fits=False))
    assert ctl("submit", "train.toml", "-y").code == 0


def test_a_budget_that_forbids_it_is_exit_4(ctl: Ctl, job_file: Path) -> None:
    ctl.place.answers("submissions.plan", OverBudget("the month's budget is spent", hint="raise [budget] month"))
    result = ctl("submit", "train.toml", "-y")
    assert (result.code, result.err) == (4, "error: the month's budget is spent\nhint: raise [budget] month\n")


def test_a_name_that_is_under_way_is_refused(ctl: Ctl, job_file: Path) -> None:
    ctl.place.write(worlds.running())
    result = ctl("submit", "train.toml", "-y")
    assert result.code == 2
    assert result.err.endswith(
        "error: a job named llama-lora is RUNNING already (6k0a1b2c3d)\n"
        "hint: wait for it, cancel it (spotctl cancel 6k0a1b2c3d), or give this one another name\n"
    )


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1), ("EXPIRED", 4)])
def test_waiting_shows_the_output_and_ends_as_the_job_does(ctl: Ctl, job_file: Path, state: str, code: int) -> None:
    ctl.place.streams(
        "logs.stream", [made_responses.log("step 1\n", cursor=1), made_responses.log(kind="end", cursor=2, state=state)]
    )
    result = ctl("submit", "train.toml", "-y", "--wait")
    assert result.code == code
    assert result.out == f"{newest(ctl).id}\nstep 1\n"


def test_waiting_in_json_prints_the_job_once_it_ended(ctl: Ctl, job_file: Path) -> None:
    ctl.place.streams(
        "logs.stream",
        [made_responses.log("step 1\n", cursor=1), made_responses.log(kind="end", cursor=2, state="SUCCEEDED")],
    )
    result = ctl("submit", "train.toml", "-y", "--wait", "-o", "json")
    assert json.loads(result.out)["job"]["name"] == "llama-lora"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            ('disk = "100GB"', 'dsk = "100GB"'),
            'error: train.toml:6: resources.dsk: unknown key\n  hint: did you mean "disk"?\n',
            id="unknown key",
        ),
        pytest.param(
            ("max_price = 2.40", 'max_price = "2.40 EUR"'),
            'error: train.toml:8: price.max_price: "2.40 EUR" is not a figure of money\n'
            '  hint: write dollars per GPU-hour like 2.40, or "19.20/h" for the whole machine\n',
            id="wrong unit",
        ),
        pytest.param(
            ("[price]", '[schedule]\ndeadline = "36"\n[price]'),
            'error: train.toml:8: schedule.deadline: "36" has no unit of time\n'
            '  hint: write deadline = "36h", or an instant with its zone: deadline = 2026-11-24T08:00:00+02:00\n',
            id="deadline without a unit",
        ),
        pytest.param(
            ("[price]", "[schedule]\ndeadline = 2026-11-30T00:00:00\n[price]"),
            'error: train.toml:8: schedule.deadline: "2026-11-30T00:00:00" has no time zone\n'
            '  hint: write deadline = "36h", or an instant with its zone: deadline = 2026-11-24T08:00:00+02:00\n',
            id="a date",
        ),
        pytest.param(
            ('gpu = ["H100:1"]', 'gpu = ["NOSUCH:1"]'),
            "error: train.toml:5: resources.gpu[0]: no GPU is known as 'NOSUCH'\n"
            "  hint: spotctl prices shows what is sold\n",
            id="found wrong by the daemon",
        ),
        pytest.param(
            ('name = "llama-lora"', "name = llama"),
            "error: train.toml:1: not valid TOML: Invalid value\n"
            '  hint: text needs quotes, as in name = "llama-lora"; a table starts with [name] on a line of its own\n',
            id="not TOML",
        ),
        pytest.param(
            ('name = "llama-lora"', 'name = "llama-lora"\nname = "again"'),
            "error: train.toml:2: not valid TOML: Cannot overwrite a value\n"
            "  hint: it stands twice: write each key once, and all keys of a [table] below one heading\n",
            id="a key twice",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_by_file_line_and_key(
    ctl: Ctl, job_file: Path, change: tuple[str, str], expected: str
) -> None:
    job_file.write_text(JOB.replace(*change))
    result = ctl("submit", "train.toml", "-y")
    assert (result.code, result.out, result.err) == (2, "", expected)


def test_every_mistake_is_named_at_once_each_at_its_place(ctl: Ctl, job_file: Path) -> None:
    job_file.write_text(JOB.replace("disk =", "dsk ="))
    result = ctl("submit", "train.toml", "--max-price", "cheap", "--every", "15", "-y")
    assert result.code == 2
    assert "error: train.toml:6: resources.dsk: unknown key" in result.err
    assert 'error: --max-price: "cheap" is not a figure of money' in result.err
    assert 'error: --every: "15" has no unit of time' in result.err


def test_what_flags_alone_do_not_say_is_asked_for_by_flag(ctl: Ctl) -> None:
    result = ctl("submit", "--gpu", "H100", "--", "python", "train.py")
    assert result.err == "error: --image: is missing\n  hint: give --image, or image in a job file\n"


@every(
    ("arguments", "message"),
    [
        (["submit"], "there is no job to submit"),
        (["submit", "nowhere.toml"], "nowhere.toml: no such file"),
        (["submit", "."], ".: this is a folder, not a file"),
        (["submit", "a.toml", "b.toml"], "got unexpected extra argument (b.toml)"),
        (["submit", "train.toml", "--"], "there is no command behind --"),
        (["submit", "train.toml", "--env", "NOEQUALS"], "--env 'NOEQUALS' is not of the form NAME=VALUE"),
        (["submit", "train.toml", "--wait", "-d"], "--wait and --detach exclude each other"),
        (["submit", "train.toml", "--cpus", "many"], "invalid value for '--cpus': 'many' is not a valid integer"),
        (["submit", "train.toml", "--bugdet", "3"], "spotctl submit has no option --bugdet"),
        (["submit", "train.toml", "--setup", "a\udcff"], "an argument holds bytes that are not UTF-8 text"),
        (["submit", "train.toml", "-y", "--secret", "1X"], '--secret: "1X" is not a name'),
        (["submit", "train.toml", "-y", "--gpu", "H100:99"], "--gpu: "),
        (["submit", "train.toml", "-y", "--name", "Bad Name"], "--name: "),
    ],
    ids=lambda value: " ".join(value[1:]).encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_exit_2_with_its_reason(
    ctl: Ctl, job_file: Path, arguments: list[str], message: str
) -> None:
    result = ctl(*arguments)
    assert (result.code, result.out) == (2, "")
    assert f"error: {message}" in result.err
    assert "Traceback" not in result.err


def test_a_daemon_that_is_away_does_not_hide_a_mistake_in_the_file(
    ctl: Ctl, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", str(job_file.parent / "no.sock"))
    job_file.write_text(JOB.replace("disk =", "dsk ="))
    assert ctl("submit", "train.toml", "-y").code == 2


def test_what_looks_like_a_key_is_sent_where_a_flag_includes_it(ctl: Ctl, job_file: Path) -> None:
    code = job_file.parent / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)")
    (code / ".env").write_text("A=1")
    refused = ctl("submit", "train.toml", "--workdir", "code", "-y")
    assert refused.code == 2
    assert "what looks like keys" in refused.err
    assert "--include .env" in refused.err
    assert ctl("submit", "train.toml", "--workdir", "code", "-y", "--include", ".env").code == 0
    ((_, data),) = codes(ctl).items()
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        assert ".env" in archive.getnames()


@pytest.mark.parametrize("name", [".env", ".ssh/id_rsa", ".aws/credentials", ".netrc"])
def test_a_dry_run_refuses_a_workdir_with_keys_in_the_words_of_the_submit(ctl: Ctl, job_file: Path, name: str) -> None:
    queued = ctl.place.asked("submissions.submit")
    code = job_file.parent / "code"
    (code / name).parent.mkdir(parents=True)
    (code / "train.py").write_text("print(1)")
    (code / name).write_text("A=1")
    tried = ctl("submit", "train.toml", "--workdir", "code", "--dry-run")
    sent = ctl("submit", "train.toml", "--workdir", "code", "-y")
    assert (tried.code, sent.code) == (2, 2)
    assert [line for line in tried.err.splitlines() if name in line]
    assert tried.err.splitlines() == sent.err.splitlines()[-len(tried.err.splitlines()) :]
    meant = ctl("submit", "train.toml", "--workdir", "code", "--include", name, "--dry-run")
    assert (meant.code, meant.err) == (0, "")
    assert codes(ctl) == {}
    assert queued == []


def test_each_flag_is_a_key_of_a_job_file_or_says_how_to_submit() -> None:
    about_submitting = {"file", "output", "env", "secret", "secret_file", "include", "resume_from", "dry_run"}
    about_submitting |= {"yes", "no_wait_price", "wait", "detach", "array", "preempt", "i_know", "no_reuse"}
    keys = {str(parameter.name).replace("__", ".") for parameter in submit.params} - about_submitting
    assert keys == set(FLAGS) - {"run", "env", "secrets", "schedule.preempt", "reuse"}


def test_a_wrong_flag_is_put_right_as_a_flag(ctl: Ctl, job_file: Path) -> None:
    result = ctl("submit", "train.toml", "--starts", "0", "-y")
    assert result.code == 2
    assert "--starts: 0 is not between 1 and 100" in result.err
    assert "write --starts 5" in result.err


def test_including_a_file_of_no_workdir_is_refused(ctl: Ctl, job_file: Path) -> None:
    sent = ctl.place.asked("submissions.submit")
    result = ctl("submit", "train.toml", "-y", "--include", ".env")
    assert result.code == 2
    assert "this job has none" in result.err
    assert sent == []


def test_a_spot_job_that_saves_nothing_and_outlasts_a_machine_needs_a_word_of_its_owner(
    ctl: Ctl, job_file: Path
) -> None:
    job_file.write_text(JOB + '[work]\ntime = "24h"\n')
    refused = ctl("submit", "train.toml", "-y")
    assert refused.code == 2
    assert "error: llama-lora would run 24.0 h on 1 x H100_SXM at local" in refused.err
    assert "a spot machine is preempted every 6.0 h in the mean" in refused.err
    assert "or --i-know to submit it all the same" in refused.err
    assert not ctl.rig.store.read(lambda reads: reads.jobs())
    assert ctl("submit", "train.toml", "-y", "--i-know").code == 0
    job_file.write_text(JOB.replace("llama-lora", "other") + '[work]\ntime = "24h"\n[checkpoint]\nevery = "15m"\n')
    assert ctl("submit", "train.toml", "-y").code == 0


def test_the_daemon_itself_refuses_a_spot_job_that_saves_nothing(ctl: Ctl, job_file: Path) -> None:
    draft = {"data": tomllib.loads(JOB + '[work]\ntime = "24h"\n'), "flags": {}, "source": "", "base_dir": ""}
    daemon = Daemon(ctl.place.socket)
    with pytest.raises(DaemonRefused, match=r"would run 24\.0 h"):
        daemon.submit(draft, code_sha256=None, secrets={})
    assert daemon.submit(draft, code_sha256=None, secrets={}, i_know=True)["job"]["name"] == "llama-lora"


def test_the_text_of_a_refusal_says_all_that_is_wrong_and_what_to_do(ctl: Ctl) -> None:
    draft = {
        "data": {"name": "x", "run": "true", "image": "i", "nmae": 1, "resources": {"gpu": ["H100:1"], "dsk": "1GB"}}
    }
    with pytest.raises(DaemonRefused) as caught:
        Daemon().plan(draft)
    text = str(caught.value)
    assert 'nmae: unknown key (did you mean "name"?)' in text
    assert 'resources.dsk: unknown key (did you mean "disk"?)' in text
    assert text.splitlines()[0] == caught.value.message

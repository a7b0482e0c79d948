"""Values of secrets lie in one private file per job and are known to the redactor."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from spotd.core.domain.intents import JobId
from spotd.daemon.commits import never
from spotd.daemon.grants.inputs import SecretFiles, SecretsMissing
from spotd.daemon.log import HIDDEN, Redactor

JOB = JobId("j1")


@pytest.fixture
def redactor() -> Redactor:
    return Redactor()


@pytest.fixture
def files(tmp_path: Path, redactor: Redactor) -> SecretFiles:
    return SecretFiles(tmp_path / "secrets", redactor, never)


def test_only_the_owner_can_read_what_was_written(files: SecretFiles, tmp_path: Path) -> None:
    files.write(JOB, {"TOKEN": "canary-value"})
    path = tmp_path / "secrets" / "j1.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert files.read(JOB, ["TOKEN"]) == {"TOKEN": "canary-value"}


def test_a_value_is_hidden_from_the_moment_it_is_known(files: SecretFiles, redactor: Redactor) -> None:
    files.write(JOB, {"TOKEN": "canary-value"})
    assert redactor.clean("is canary-value") == f"is {HIDDEN}"


def test_a_missing_value_is_named_and_none_is_shown(files: SecretFiles) -> None:
    files.write(JOB, {"TOKEN": "canary-value"})
    with pytest.raises(SecretsMissing, match="OTHER") as caught:
        files.read(JOB, ["OTHER", "TOKEN"])
    assert "canary-value" not in str(caught.value)


def test_a_job_without_secrets_has_no_file(files: SecretFiles, tmp_path: Path) -> None:
    files.write(JOB, {})
    assert not (tmp_path / "secrets").exists()
    assert files.read(JOB, []) == {}


def test_removed_values_are_gone_and_removing_again_is_fine(files: SecretFiles) -> None:
    files.write(JOB, {"TOKEN": "canary-value"})
    files.remove(JOB)
    files.remove(JOB)
    with pytest.raises(SecretsMissing):
        files.read(JOB, ["TOKEN"])


def test_values_that_a_crash_left_half_written_are_found_and_removed(files: SecretFiles, tmp_path: Path) -> None:
    assert files.jobs() == frozenset()
    files.write(JOB, {"TOKEN": "canary-value"})
    draft = tmp_path / "secrets" / "j2.draft"
    draft.write_text("canary-va")
    assert files.jobs() == {JOB, JobId("j2")}
    files.remove(JobId("j2"))
    assert not draft.exists()
    assert files.jobs() == {JOB}


def test_jobs_that_are_taken_back_with_the_same_values_share_them_on_the_disk(
    files: SecretFiles, tmp_path: Path
) -> None:
    files.prepare({JobId(f"j{number}"): {"TOKEN": "canary-value"} for number in range(3)} | {JobId("j3"): {}})
    assert files.jobs() == {JobId("j0"), JobId("j1"), JobId("j2")}
    assert (tmp_path / "secrets" / "j0.json").stat().st_nlink == 3


@pytest.mark.parametrize("links", [True, False], ids=["links", "a disk without links"])
def test_the_jobs_of_an_array_have_the_same_values(
    files: SecretFiles, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    def refused(_path: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    jobs = [JobId(f"j{number}") for number in range(3)]
    files.write_all(jobs, {"TOKEN": "canary-value"})
    files.remove(jobs[0])
    assert [files.read(job, ["TOKEN"]) for job in jobs[1:]] == [{"TOKEN": "canary-value"}] * 2

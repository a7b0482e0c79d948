"""The start script under real shells, and the bundle it fetches."""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spotd_jobs.start import ScriptTooLong, build_runner, start_script
from tests.cases import every
from tests.integration.runner.rig import Rig
from tests.integration.runner.servers import Answer, Request, Server

SHELLS = ["sh", "dash", "bash", "busybox sh", "ksh", "zsh"]
TOOLS = ("sh", "env", "cat", "mkdir", "echo", "sleep", "test", "true")


def run(
    script: str, folder: Path, *, shell: str = "sh", path: str | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    found = shutil.which(shell.split()[0])
    assert found is not None
    default = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [found, *shell.split()[1:], "-c", script],
        cwd=folder,
        env={"PATH": path or default, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_carries_a_job_from_file_urls(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed here")
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo $GREETING; env | grep -c GRANT_URL"])
        script = start_script(grant.grant_url, extra_env={"GREETING": "it's a $HOME `x`"})
        done = run(script, tmp_path / "machine", shell=shell)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (tmp_path / "machine").glob("spotd-*/done")] == ["done"]
        logs = [(rig.store.get(key) or b"").decode() for key in rig.store.keys(grant.upload.prefix + "log/")]
        assert "".join(logs).splitlines()[:2] == ["it's a $HOME `x`", "0"]


@pytest.mark.e2e
def test_the_script_fetches_over_http_and_tries_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/true"])
        failures = iter([503, 404])

        def answer(request: Request) -> Answer:
            status = next(failures, 200)
            data = rig.store.get(request.path.lstrip("/").split("?")[0])
            return Answer(status, data if status == 200 and data is not None else b"")

        with Server(answer) as server:
            runner = grant.runner.model_copy(update={"url": f"{server.url}/runner/runner.pyz?X-Amz-Signature=s3cret"})
            url = f"{server.url}/{grant.upload.prefix}grant.json?X-Amz-Signature=s3cret"
            rig.issue(grant.model_copy(update={"runner": runner, "grant_url": url}))
            done = run(start_script(url), tmp_path / "machine")
            assert done.returncode == 0, done.stderr
            assert "s3cret" not in done.stdout + done.stderr
            assert done.stderr.count("trying again") == 2


@pytest.mark.e2e
def test_a_runner_that_is_not_what_the_grant_names_is_not_run(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/true"])
        rig.store.path("runner/runner.pyz").write_bytes(b"print('evil')")
        script = start_script(grant.grant_url).replace("range(30)", "range(2)")
        done = run(script, tmp_path / "machine")
        assert done.returncode == 1
        assert "could not be fetched" in done.stderr
        assert "evil" not in done.stdout


@pytest.mark.e2e
def test_starting_twice_runs_the_job_once(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo ran"])
        script = start_script(grant.grant_url)
        for _ in range(2):
            assert run(script, tmp_path / "machine").returncode == 0
        assert len(rig.store.keys(grant.upload.prefix + "log/")) == 1


@pytest.mark.e2e
def test_two_attempts_in_one_folder_do_not_take_each_other_for_themselves(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        for attempt in (1, 2):
            grant = rig.grant(["/bin/sh", "-c", "echo ran"], attempt=attempt)
            assert run(start_script(grant.grant_url), tmp_path / "machine").returncode == 0
            assert len(rig.store.keys(grant.upload.prefix + "log/")) == 1


@pytest.mark.e2e
def test_a_working_directory_that_nobody_may_write_to_is_left_for_the_temporary_one(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo ran"])
        # Nobody may write below /proc, whoever runs this test.
        done = run(start_script(grant.grant_url), Path("/proc/self"), env={"TMPDIR": str(temporary)})
        assert done.returncode == 0, done.stderr
        assert len(list(temporary.glob("spotd-*/done"))) == 1


def bare_image(tmp_path: Path, *more: str) -> str:
    """A PATH that holds no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (*TOOLS, *more):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return str(folder)


def without_known_places(script: str) -> str:
    """The script as it would run where none of the usual absolute paths exist."""
    return "\n".join(line.replace("/usr/bin/python3", "/none").replace("/usr/local/bin/python3", "/none")
                     for line in script.split("\n"))  # fmt: skip


def test_an_image_without_python_says_so_on_both_streams(tmp_path: Path) -> None:
    done = run(without_known_places(start_script("file:///g")), tmp_path / "m", path=bare_image(tmp_path))
    assert done.returncode == 78
    assert done.stdout == done.stderr == "spotd: no Python 3.8 or later in this image\n"


@pytest.mark.parametrize("tool", ["curl", "wget"])
def test_an_image_without_python_reports_it_by_what_it_has(tool: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed here")
    with Server(lambda request: Answer(200)) as server:
        script = without_known_places(start_script("file:///g", report_url=f"{server.url}/no-python"))
        done = run(script, tmp_path / "m", path=bare_image(tmp_path, tool))
        assert done.returncode == 78
        (request,) = server.requests
        assert (request.method, request.path) == ("PUT", "/no-python")
        assert request.body.decode() == "spotd: no Python 3.8 or later in this image"


def test_a_python_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    path = bare_image(tmp_path)
    old = Path(path) / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run(without_known_places(start_script("file:///g")), tmp_path / "m", path=path)
    assert done.returncode == 78


def test_the_script_leaves_room_for_long_presigned_urls() -> None:
    assert len(start_script("https://bucket.example/" + "x" * 1500)) < 4096


def test_a_script_over_the_limit_is_refused_with_the_excess() -> None:
    with pytest.raises(ScriptTooLong, match="bytes over"):
        start_script("https://bucket.example/", 1000)


@every("env", [{"A B": "x"}, {"A": "x\ny"}, {"A": "\0"}, {"1A": "x"}])
def test_an_environment_that_a_shell_could_misread_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        start_script("file:///g", extra_env=env)


def test_the_bundle_is_the_same_bytes_each_time() -> None:
    first = build_runner()
    build_runner.cache_clear()
    assert build_runner() == first


def test_the_bundle_imports_nothing_but_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "spotd_jobs", "certifi"}
    with zipfile.ZipFile(io.BytesIO(build_runner())) as archive:
        for name in archive.namelist():
            for node in ast.walk(ast.parse(archive.read(name))):
                match node:
                    case ast.Import(names=names):
                        roots = {alias.name.split(".")[0] for alias in names}
                    case ast.ImportFrom(module=str(module)):
                        ours = ("spotd_jobs.runner", "spotd_jobs.wire")
                        assert not module.startswith("spotd_jobs") or module.startswith(ours), name
                        roots = {module.split(".")[0]}
                    case _:
                        continue
                assert roots <= allowed, name


def test_a_start_over_files_imports_no_network_library(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/true"])
        bundle = tmp_path / "runner.pyz"
        bundle.write_bytes(build_runner())
        done = subprocess.run(
            [sys.executable, "-ISX", "importtime", bundle, "--grant-url", grant.grant_url, "--home", tmp_path / "h"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        heavy = {"ssl", "urllib.request", "http.client", "email", "tarfile", "asyncio", "dataclasses", "inspect"}
        assert imported & heavy == set()
        assert "spotd_jobs.runner.attempt" in imported

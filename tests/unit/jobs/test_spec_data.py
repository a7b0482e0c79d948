"""The `[[data]]` tables of a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import DataMode, DataSource
from spotd_jobs.spec.parse import parse_job
from spotd_jobs.spec.problems import SpecError
from tests.cases import every

JOB: dict[str, Any] = {"name": "a", "run": "true", "image": "i", "resources": {"gpu": "H100"}}


def parsed(*tables: Any) -> tuple[DataSource, ...]:
    return parse_job({**JOB, "data": list(tables)}, "job").data


def test_a_dataset_is_named_and_has_a_place() -> None:
    assert parsed({"source": "data:set", "path": "data/set/"}) == (
        DataSource(source="set", path="data/set", mode=DataMode.COPY),
    )


def test_what_the_daemon_filled_in_survives_its_document_and_is_shown_as_a_file_has_it() -> None:
    spec = parse_job({**JOB, "data": [{"source": "set", "path": "d", "sha256": "ab" * 32}]}, "job")
    assert spec_from_json(spec_to_json(spec)) == spec
    assert parse_job(job_file(spec), "shown") == spec


def test_a_document_without_data_is_still_read() -> None:
    document = spec_to_json(parse_job(JOB, "job"))
    del document["data"]
    assert spec_from_json(document).data == ()


GOOD = {"source": "set", "path": "data"}
URL = {"source": "https://host/file.bin?download=1", "path": "data/file.bin", "sha256": "ab" * 32}


def test_a_url_with_its_hash_is_taken_as_it_is_written() -> None:
    (one,) = parsed(URL)
    assert (one.source, one.is_url, one.is_folder) == (URL["source"], True, False)


@every(
    "source", ["s3://bucket", "s3://bucket/a/b/", "hf://org/model", "hf://datasets/org/set@refs/pr/1", "hf://o/m@v1.0"]
)
def test_a_bucket_and_a_repository_are_taken_as_they_are_written(source: str) -> None:
    (one,) = parsed({**GOOD, "source": source})
    assert one.source == source
    assert one.is_listed
    assert one.is_elsewhere
    assert not one.is_url
    assert not one.is_folder


@every(
    ("table", "message"),
    [
        ({"source": "set"}, "is missing"),
        ({"path": "data"}, "is missing"),
        ({**GOOD, "path": "/data"}, "does not lie below"),
        ({**GOOD, "path": "a/../../b"}, "does not lie below"),
        ({**GOOD, "path": "."}, "does not lie below"),
        ({**GOOD, "path": "a//b"}, "does not lie below"),
        ({**GOOD, "path": ""}, "must not be empty"),
        ({**GOOD, "path": "a\nb"}, "cannot be seen"),
        ({**GOOD, "path": 7}, "must be text"),
        ({**GOOD, "source": "some/folder"}, "is not the name of a dataset"),
        ({**GOOD, "source": "s3://"}, "names no place in a bucket"),
        ({**GOOD, "source": "s3://Bucket/x"}, "names no place in a bucket"),
        ({**GOOD, "source": "s3://key:secret@bucket/x"}, "names no place in a bucket"),
        ({**GOOD, "source": "s3://bucket//x"}, "names no place in a bucket"),
        ({**GOOD, "source": "s3://bucket/a/../b"}, "names no place in a bucket"),
        ({**GOOD, "source": "s3://bucket/x?token=secret"}, "names no place in a bucket"),
        ({**GOOD, "source": "hf://model"}, "names no repository"),
        ({**GOOD, "source": "hf://spaces/org/app"}, "names no repository"),
        ({**GOOD, "source": "hf://org/model@"}, "names no repository"),
        ({**GOOD, "source": "hf://hf_secret@org/model"}, "names no repository"),
        ({**GOOD, "source": "hf://../model"}, "names no repository"),
        ({**GOOD, "source": "gs://bucket/prefix"}, "is not supported"),
        ({**GOOD, "source": "http://user:secret@host/x"}, "is not supported"),
        ({**GOOD, "source": "https://host/x"}, "is missing"),
        ({**URL, "source": "https://user:secret@host/x"}, "holds a password"),
        ({**URL, "source": "https://secret@host/x"}, "holds a password"),
        ({**URL, "source": "https://host/x?a=1&X-Amz-Signature=secret"}, "would be shown to every host"),
        ({**URL, "source": "https://host/x?access_token="}, "would be shown to every host"),
        ({**URL, "source": "https://host/"}, "names no file"),
        ({**URL, "source": "https://host/x#secret"}, "names no file"),
        ({**URL, "source": "https:///x"}, "is no URL"),
        ({**URL, "source": "https://host:99999/x"}, "is no URL"),
        ({**URL, "source": "https://[host/x"}, "is no URL"),
        ({**URL, "source": "https://host/a b"}, "is no URL"),
        ({**URL, "source": "https://höst/x"}, "is no URL"),
        ({**GOOD, "sha256": "AB" * 32}, "is not a SHA-256"),
        ({**GOOD, "mode": "stream"}, "has all of the data on its disk before"),
        ({**GOOD, "mode": "rsync"}, "must be one of copy"),
        ({**GOOD, "mode": ["stream"]}, "must be one of copy"),
        ({**GOOD, "pth": "x"}, "unknown key"),
        ("set", "must be a table"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(table: Any, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parsed(table)
    assert any(message in problem.message for problem in refused.value.problems)
    assert all(problem.key.startswith("data[0]") for problem in refused.value.problems)
    assert all(problem.hint for problem in refused.value.problems)
    assert "secret" not in str(refused.value.problems)


@every(
    ("source", "folder"),
    [("./set", "/jobs/set"), (".", "/jobs"), ("../set", "/set"), ("/data/set/", "/data/set"), ("set/", "/jobs/set")],
)
def test_a_folder_is_found_from_where_the_job_file_lies(source: str, folder: str) -> None:
    spec = parse_job({**JOB, "data": [{**GOOD, "source": source}]}, "job", base=Path("/jobs"))
    assert spec.data[0].source == folder
    assert spec.data[0].is_folder
    assert parse_job(job_file(spec), "shown", base=Path("/elsewhere")) == spec


def test_a_name_is_no_folder() -> None:
    assert not parsed(GOOD)[0].is_folder


@every(("one", "other"), [("a", "a"), ("a/b", "a"), ("a", "a/b/c")])
def test_two_datasets_cannot_share_a_folder(one: str, other: str) -> None:
    with pytest.raises(SpecError) as refused:
        parsed({"source": "x", "path": one}, {"source": "y", "path": other})
    assert "overlap" in refused.value.problems[0].message


def test_neither_a_single_table_nor_a_hundred_are_taken() -> None:
    with pytest.raises(SpecError):
        parse_job({**JOB, "data": GOOD}, "job")
    with pytest.raises(SpecError):
        parsed(*({"source": "s", "path": f"p{number}"} for number in range(100)))

"""From `[store]` in the config to the place of a bucket, its secrets kept out of everything that is shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from spotd.daemon.install import BadConfig
from spotd.daemon.policy import Settings
from spotd.service.main import load_settings
from spotd_jobs.objects.s3_client import S3Place

KEYS = 'access_key = { env = "KEY_ID" }\nsecret_key = { env = "KEY_SECRET" }\n'


def loaded(folder: Path, store: str, **environment: str) -> Settings:
    path = folder / "config.toml"
    path.write_text(f"[store]\n{store}")
    places = {"STATE_DIRECTORY": str(folder / "state"), "RUNTIME_DIRECTORY": str(folder / "run")}
    return load_settings(path, {**places, **environment})


def place_of(settings: Settings) -> S3Place:
    assert isinstance(settings.open_objects, partial)
    (place,) = settings.open_objects.args
    assert isinstance(place, S3Place)
    return place


@pytest.mark.parametrize(
    ("url", "prefix"),
    [("s3://bkt", ""), ("s3://bkt/", ""), ("s3://bkt/lab", "lab/"), ("s3://bkt/lab/two/", "lab/two/")],
)
def test_a_prefix_ends_in_a_slash_or_is_empty(tmp_path: Path, url: str, prefix: str) -> None:
    place = place_of(loaded(tmp_path, f'url = "{url}"'))
    assert (place.bucket, place.prefix) == ("bkt", prefix)
    assert place.access_key is None, "without keys boto3 looks for them itself"


def test_the_keys_come_from_where_the_config_says_and_are_never_shown(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f'url = "s3://bkt/lab"\n{KEYS}', KEY_ID="an-id", KEY_SECRET="hunter2-secret")
    assert (place_of(settings).access_key, place_of(settings).secret_key) == ("an-id", "hunter2-secret")
    assert "hunter2-secret" in settings.secrets, "the log redacts it"
    assert "hunter2" not in repr(settings)
    assert settings.store_place == "the bucket s3://bkt/lab/"


def test_a_key_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"store\.secret_key: the environment variable KEY_SECRET is not set"):
        loaded(tmp_path, f'url = "s3://bkt/lab"\n{KEYS}', KEY_ID="an-id")


@pytest.mark.parametrize("url", ["s3://b", "s3://UPPER/x", "s3://bkt/a//b", "s3://bkt/../x", "s3://bkt/a b"])
def test_what_cannot_be_a_bucket_or_a_prefix_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(BadConfig, match="names no bucket"):
        loaded(tmp_path, f'url = "{url}"')

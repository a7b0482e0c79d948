"""What `doctor` says of a bucket's own settings, read from a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.objects.api import Advice
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place
from tests.fakes.seaweed import BUCKET, CANARY, VERSIONED, Weed


@pytest.fixture
def bucket(weed: Weed) -> Iterator[Any]:
    owner = weed.owner()
    yield owner
    owner.delete_bucket_lifecycle(Bucket=BUCKET)
    owner.close()


def told(weed: Weed, bucket: str = BUCKET) -> list[Advice]:
    place = replace(weed.place("lab/"), bucket=bucket, access_key="owner", secret_key=f"owner-{CANARY}")
    return list(S3Store(place, findings=Findings()).advice())


def rows(weed: Weed, bucket: str = BUCKET) -> dict[str, bool]:
    return {row.name: row.ok and not row.hint for row in told(weed, bucket)}


def rule(prefix: str, **what: Any) -> dict[str, Any]:
    return {"ID": f"of-{prefix}", "Status": "Enabled", "Filter": {"Prefix": prefix}, **what}


def set_rules(bucket: Any, *rules: dict[str, Any], name: str = BUCKET) -> None:
    bucket.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": list(rules)})


def test_a_bucket_without_rules_is_told_of_unfinished_uploads(weed: Weed, bucket: Any) -> None:
    del bucket
    assert rows(weed) == {"unfinished uploads": False}


def test_a_rule_that_deletes_checkpoints_by_age_is_wrong(weed: Weed, bucket: Any) -> None:
    set_rules(bucket, rule("lab/jobs/", Expiration={"Days": 30}))
    assert rows(weed) == {"unfinished uploads": False, "expiry": False}


def test_a_rule_for_somebody_elses_objects_is_none_of_ours(weed: Weed, bucket: Any) -> None:
    set_rules(bucket, rule("other/", Expiration={"Days": 30}))
    assert rows(weed) == {"unfinished uploads": False}


def test_a_rule_that_aborts_unfinished_uploads_is_all_that_is_asked_for(weed: Weed, bucket: Any) -> None:
    set_rules(bucket, rule("", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 2}))
    assert rows(weed) == {"unfinished uploads": True}


def test_a_rule_about_part_of_our_objects_is_not_enough(weed: Weed, bucket: Any) -> None:
    for where in ({"Prefix": "lab/code/"}, {"Prefix": "other/"}):
        some = rule("", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 2})
        set_rules(bucket, {**some, "Filter": where})
        assert rows(weed) == {"unfinished uploads": False}


def test_a_bucket_that_keeps_every_version_for_ever_is_told_the_rule_that_ends_them(
    weed: Weed, bucket: Any, versioned: S3Place
) -> None:
    assert "old versions" not in rows(weed), "this one keeps none"
    try:
        (row,) = [row for row in told(weed, versioned.bucket) if row.name == "old versions"]
        assert row.ok, "it costs money, and loses nothing"
        assert "stays and is billed" in row.detail
        assert "NoncurrentVersionExpiration" in row.hint
        old = rule("", NoncurrentVersionExpiration={"NoncurrentDays": 7})
        set_rules(bucket, {**old, "Filter": {"Prefix": "other/"}}, name=VERSIONED)
        assert rows(weed, VERSIONED)["old versions"] is False
        set_rules(bucket, old, name=VERSIONED)
        (row,) = [row for row in told(weed, VERSIONED) if row.name == "old versions"]
        assert (row.detail, row.hint) == ("a lifecycle rule deletes them after 7 days", "")
    finally:
        bucket.delete_bucket_lifecycle(Bucket=VERSIONED)


def test_the_rule_in_the_documentation_is_all_that_a_bucket_with_versions_needs(
    weed: Weed, bucket: Any, versioned: S3Place
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "stores.md").read_text()
    written = json.loads(text.partition('```json\n{"Rules"')[2].partition("```")[0].join(('{"Rules"', "")))
    try:
        bucket.put_bucket_lifecycle_configuration(
            Bucket=VERSIONED, LifecycleConfiguration=json.loads(json.dumps(written).replace("PREFIX/", "lab/"))
        )
        assert rows(weed, versioned.bucket) == {"unfinished uploads": True, "old versions": True}
    finally:
        bucket.delete_bucket_lifecycle(Bucket=VERSIONED)

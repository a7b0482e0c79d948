"""What `doctor` says of a bucket's own settings, read from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from spotd_jobs.objects.probe import Findings
from spotd_jobs.objects.s3 import S3Store
from tests.seaweed import BUCKET, CANARY, Weed


@pytest.fixture
def bucket(weed: Weed) -> Iterator[Any]:
    owner = weed.owner()
    yield owner
    owner.delete_bucket_lifecycle(Bucket=BUCKET)
    owner.close()


def rows(weed: Weed) -> dict[str, bool]:
    place = replace(weed.place("lab/"), access_key="owner", secret_key=f"owner-{CANARY}")
    return {row.name: row.ok and not row.hint for row in S3Store(place, findings=Findings()).advice()}


def rule(prefix: str, **what: Any) -> dict[str, Any]:
    return {"ID": f"of-{prefix}", "Status": "Enabled", "Filter": {"Prefix": prefix}, **what}


def set_rules(bucket: Any, *rules: dict[str, Any]) -> None:
    bucket.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": list(rules)})


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

"""What tests of buckets share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.wire.client import web
from tests.fakes.botocore_models import parse_models_once
from tests.fakes.seaweed import VERSIONED, Weed


@pytest.fixture(scope="session", autouse=True)
def _models_parsed_once() -> Iterator[None]:
    """Most tests of buckets open several clients."""
    with parse_models_once():
        yield


@pytest.fixture(scope="session")
def findings(weed: Weed) -> Findings:
    return S3Store(weed.place("found/")).findings()


@pytest.fixture(scope="session")
def versioned(weed: Weed) -> Iterator[S3Place]:
    """A second bucket on the same server, set up to keep versions."""
    owner = weed.owner()
    owner.create_bucket(Bucket=VERSIONED)
    owner.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
    yield replace(weed.place("v/"), bucket=VERSIONED)
    owner.close()


@pytest.fixture(autouse=True)
def no_connection_outlives_a_test() -> Iterator[None]:
    yield
    web.drop_connections()

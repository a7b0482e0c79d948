"""The fixtures of the AWS adapter's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.botocore_models import parse_models_once


@pytest.fixture(scope="session", autouse=True)
def _models_parsed_once() -> Iterator[None]:
    """Each test opens a client, and the description of EC2 alone has megabytes."""
    with parse_models_once():
        yield

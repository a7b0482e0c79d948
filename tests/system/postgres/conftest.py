"""A real PostgreSQL for these tests, and an empty schema for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.system.engines import postgres

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Postgres]:
    reason = postgres.missing()
    if reason:
        pytest.skip(reason)
    with postgres.running() as server:
        yield server


@pytest.fixture
def url(server: postgres.Postgres) -> str:
    """Where the state of this test is to be."""
    return server.url(f"state_{next(_NUMBERS)}")

"""Requests drawn from the API's own description are answered as it says, and never by a defect."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd.api.app import api_routes, make_app
from spotd.api.openapi import document
from tests.unit.api import worlds
from tests.unit.daemon.rig import Rig

if TYPE_CHECKING:
    import schemathesis  # at run time only where it is used: its import costs every worker of the suite seconds

NEEDS_THE_LOOP: Final = "POST /v1/reconcile"
"""It waits for a cycle of the control loop, which is not running here."""
LABELS: Final = sorted({f"{route.method} {route.path}" for route in api_routes()} - {NEEDS_THE_LOOP})


class Answering:
    """The application over a state in memory: one job runs, one waits for its price, one failed."""

    def __init__(self, folder: Path) -> None:
        self.rig: Rig = worlds.still_rig(folder)
        self.failures: list[tuple[str, Exception]] = []
        self._closing = anyio.Event()
        self._closing.set()  # a stream that is followed ends at once
        for plan in (worlds.running(), worlds.ended(), worlds.waiting()):
            self.rig.store.tx(lambda tx, plan=plan: tx.commit(plan))  # type: ignore[misc]  # a lambda's default
        self.app = make_app(
            self.rig.handlers(),
            on_failure=lambda route, exc: self.failures.append((route, exc)),
            closing=self._closing,
            code_bytes_max=10_000,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.rig.control_loop.state is None:
            await self.rig.control_loop.adopt()
        await self.app(scope, receive, send)


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    served = Answering(tmp_path)
    yield served
    served.rig.store.close()


@cache
def _operations() -> dict[str, Any]:
    import schemathesis
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_dict(document(api_routes()))
    return {one.ok().label: one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)}


def cases(label: str) -> st.SearchStrategy[schemathesis.Case[Any]]:
    """Requests of an operation, valid ones and others; of those for a job, half are for one that exists."""
    from schemathesis import GenerationMode

    given_refs: list[dict[str, Any]] = [{}]
    if "{ref}" in label:
        given_refs.append({"path_parameters": {"ref": "llama-lora"}})
    return st.one_of(
        *(_operations()[label].as_strategy(mode, **refs) for mode in GenerationMode for refs in given_refs)
    )


def check(label: str, answering: Answering, examples: int) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    expected: list[Any] = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(case=cases(label))
    def every_request(case: schemathesis.Case[Any]) -> None:
        response = case.call(app=answering)
        assert answering.failures == []
        case.validate_response(response, checks=expected)

    every_request()


@pytest.mark.long
def test_some_requests_of_every_kind_are_answered_as_described(answering: Answering) -> None:
    """Of each operation a few, one behind the other in one state."""
    for label in LABELS:
        check(label, answering, 3)


@pytest.mark.system
@pytest.mark.parametrize("label", LABELS)
def test_many_requests_are_answered_as_described(label: str, answering: Answering) -> None:
    check(label, answering, 60)

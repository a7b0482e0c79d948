"""The description of the API is made of its routes, committed as it is made, and what the API answers.

With RECORD=1 in the environment the committed file is written anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints, is_typeddict

import jsonschema_rs
import pytest
from starlette.routing import Route

from spotd.api.app import api_routes
from spotd.api.openapi import document, document_bytes
from spotd.api.schemas import costs, jobs
from tests.cases import every
from tests.unit.api.place import Place, place

COMMITTED = Path(__file__).parents[3] / "docs" / "reference" / "openapi.json"
RECORDED = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
DOCUMENT = document(api_routes())


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    with place() as running:
        yield running


def closed(value: Any) -> Any:
    """The same schemas, in which each object excludes the keys that it does not name."""
    if isinstance(value, list):
        return [closed(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: closed(one) for key, one in value.items()}
    return {"additionalProperties": False, **found} if "properties" in value else found


def schema_of(method: str, path: str, status: int) -> Mapping[str, Any]:
    """The schema of an answer, or of one record of a stream, with everything that it refers to."""
    for template, operations in DOCUMENT["paths"].items():
        # The only path that another one's parameter could stand for has a name that no job has.
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path) and method.lower() in operations:
            answers = operations[method.lower()]["responses"]
            assert str(status) in answers, f"{method} {path} answers {status}, which is not described"
            answer = answers[str(status)]
            if "$ref" in answer:
                answer = DOCUMENT["components"]["responses"][str(status)]
            (content,) = answer["content"].values()
            found = content["schema"] if "schema" in content else content["itemSchema"]
            return {**found, "components": closed(DOCUMENT["components"])}
    raise AssertionError(f"{method} {path} is not described")


STATUSES = {"not_found": 404, "ambiguous": 409, "conflict": 409, "invalid": 422, "unavailable": 503}


@every("target", RECORDED)
def test_every_recorded_answer_is_what_the_description_says(target: str) -> None:
    method, _, address = target.partition(" ") if " " in target else ("GET", "", target)
    answer, path = RECORDED[target], address.split("?")[0]
    if isinstance(answer, list) and isinstance(answer[0], str):
        code, message, hint = answer
        error = {"code": code, "message": message, "hint": hint, "problems": []}
        jsonschema_rs.validate(dict(schema_of(method, path, STATUSES[code])), {"schema": 1, "error": error})
        return
    records = answer if isinstance(answer, list) else [answer]
    schema = dict(schema_of(method, path, 200))
    for record in records:
        known = {key: value for key, value in record.items() if key != "schema"} if len(records) > 1 else record
        jsonschema_rs.validate(schema, known)


def test_the_committed_description_is_the_one_that_is_made() -> None:
    if os.environ.get("RECORD"):
        COMMITTED.write_bytes(document_bytes(api_routes()))
    assert COMMITTED.read_bytes() == document_bytes(api_routes())


def test_the_served_description_is_the_committed_one(served: Place) -> None:
    from spotd.client.daemon import Daemon

    assert Daemon(served.socket)._transport.json_bytes("GET", "/v1/openapi.json") == COMMITTED.read_bytes()


def test_every_route_is_described_with_a_sentence(served: Place) -> None:
    routes = [(m, route.path) for route in served.app.routes if isinstance(route, Route) for m in route.methods or ()]
    described = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
    assert sorted(described) == sorted(one for one in routes if one[0] != "HEAD")
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            assert re.fullmatch(r"[A-Z].+\.", operation["summary"]), operation["operationId"]


def test_what_a_key_means_is_taken_from_the_docstring_of_its_class() -> None:
    detail = DOCUMENT["components"]["schemas"]["JobDetailResponse"]
    assert detail["properties"]["lost_s"]["description"] == "work and waiting lost to preemptions."
    assert detail["properties"]["set_aside"]["description"].endswith("described by its columns alone.")
    ranges = {one["name"]: one["schema"] for one in DOCUMENT["paths"]["/v1/jobs"]["get"]["parameters"]}
    assert ranges["limit"] == {"type": "integer", "minimum": 1, "maximum": 1_000_000}
    assert "WAITING_PRICE" in ranges["state"]["items"]["enum"]


def test_every_sum_says_whether_it_is_an_estimate() -> None:
    kinds = [kind for module in (costs, jobs) for kind in vars(module).values() if is_typeddict(kind)]
    sums = [kind for kind in kinds if "spent_usd" in get_type_hints(kind)]
    assert len(sums) >= 9
    assert all("estimated" in get_type_hints(kind) for kind in sums)

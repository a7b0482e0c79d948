"""The API described as OpenAPI 3.1, made of the route table and the types that it names.

Keys may be added to an answer, so that no object of an answer excludes others; a request excludes what is unknown.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from spotd.api import responses
from spotd.api.requests import QueryParameter, query_parameters
from spotd.api.routes import SHA256_PATTERN, ApiRoute
from spotd.api.schemas import SCHEMA
from spotd.api.schemas.answers import RefusedAnswer
from spotd.api.schemas.bodies import Answer

Json = dict[str, Any]
BYTES_TYPE: Final = "application/octet-stream"
ABOUT: Final = """The API of spotd, HTTP on a unix socket that only the daemon's own user may open, or by TCP
with the token of a user, whose role (view, submit, operate) must reach `x-right`.

Every answer holds `schema` (1) and `now` (the daemon's time) beside what is described here; every refusal is an
`error` with a code, a sentence and a hint. Instants are ISO 8601 in UTC; `_usd` is an amount in dollars, `_usd_h` per
hour for the whole machine, `_usd_gpu_h` per hour for one GPU; spans are seconds. A `ref` is the id of a job, a unique
prefix of one, or its name. A key may be added within one schema; none is removed or given another meaning."""
_SIMPLE: Final[Mapping[object, Json]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    Any: {},
}
_PATH: Final[Mapping[str, Json]] = {
    "ref": {"type": "string", "minLength": 1},
    "sha256": {"type": "string", "pattern": SHA256_PATTERN},
}
_ATTRIBUTES: Final = re.compile(r"^Attributes:\s*$", re.MULTILINE)


def document_bytes(routes: Iterable[ApiRoute]) -> bytes:
    """Return the description as it is served."""
    return (json.dumps(document(routes), indent=1) + "\n").encode()


def document(routes: Iterable[ApiRoute]) -> Json:
    """Return the description of what these routes serve."""
    schemas: dict[str, Json] = {}
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    responses = _refusals(schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "spotd", "version": str(SCHEMA), "description": ABOUT},
        "paths": paths,
        "components": {
            "responses": responses,
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: ApiRoute, schemas: dict[str, Json]) -> Json:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in _PATH.items()
        if f"{{{name}}}" in route.path
    ]
    if "query" in route.takes:
        known = query_parameters(route.takes["query"])
        words = _description(route.takes["query"])[1]
        parameters += [_query_parameter(one, words.get(name, "")) for name, one in known.items()]
    found: Json = {"operationId": route.name, "summary": route.about, "x-right": route.right.name.lower()}
    if parameters:
        found["parameters"] = parameters
    if "body" in route.takes:
        content = {responses.JSON_TYPE: {"schema": _schema(route.takes["body"], schemas, is_closed=True)}}
        found["requestBody"] = {"required": True, "content": content}
    elif "request" in route.takes:
        found["requestBody"] = {"required": True, "content": {BYTES_TYPE: {"schema": {"format": "binary"}}}}
    found["responses"] = {
        str(route.status): {"description": "the answer", "content": _answer(route.answer, schemas)},
        **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(_refusal_statuses(route))},
    }
    return found


def _refusal_statuses(route: ApiRoute) -> set[int]:
    """Return the status of each refusal that is possible: a job may be unknown, a body too long, the store away."""
    codes = {responses.RefusalCode.INVALID, responses.RefusalCode.UNAVAILABLE, *route.refuses}
    codes |= {responses.RefusalCode.UNAUTHORIZED, responses.RefusalCode.FORBIDDEN}
    if "ref" in route.takes:
        codes |= {responses.RefusalCode.NOT_FOUND, responses.RefusalCode.AMBIGUOUS}
    too_long = {responses.STATUS_OF_LONG_BODY} if {"body", "request"} & set(route.takes) else set()
    return {responses.STATUS_OF_DEFECT, *(responses.STATUS_OF_CODE[code] for code in codes), *too_long}


def _refusals(schemas: dict[str, Json]) -> dict[str, Json]:
    """Return what each status of a refusal means."""
    words: dict[int, list[str]] = {
        responses.STATUS_OF_DEFECT: [responses.INTERNAL],
        responses.STATUS_OF_LONG_BODY: [responses.RefusalCode.INVALID],
    }
    for code, status in responses.STATUS_OF_CODE.items():
        words.setdefault(status, []).append(code.value)
    content = {responses.JSON_TYPE: {"schema": _schema(RefusedAnswer, schemas)}}
    return {str(s): {"description": " or ".join(words[s]), "content": content} for s in sorted(words)}


def _query_parameter(parameter: QueryParameter, words: str) -> Json:
    schema: Json = {"type": "string"}
    if parameter.bounds is not None:
        schema = {"type": "integer", "minimum": parameter.bounds.least, "maximum": parameter.bounds.most}
    elif parameter.kind is bool:
        schema = {"type": "integer", "enum": [0, 1]}
    elif issubclass(parameter.kind, StrEnum):
        schema = {"type": "string", "enum": [str(one) for one in parameter.kind]}
    elif parameter.kind is datetime:
        schema = {"type": "string", "format": "date-time"}
    elif parameter.is_required:
        schema["minLength"] = 1
    if parameter.is_repeated:
        schema = {"type": "array", "items": schema}
    found: Json = {"name": parameter.name, "in": "query", "required": parameter.is_required, "schema": schema}
    return {**found, "description": words} if words else found


def _answer(answer: Any, schemas: dict[str, Json]) -> Json:
    """Return the content of an answer by its media type."""
    if answer is responses.ByteStream:
        return {BYTES_TYPE: {"schema": {"format": "binary"}}}
    if get_origin(answer) is responses.RecordStream:
        return {responses.NDJSON_TYPE: {"itemSchema": _schema(get_args(answer)[0], schemas)}}
    if answer in _SIMPLE or is_typeddict(answer) or get_origin(answer) in {Union, types.UnionType}:
        return {responses.JSON_TYPE: {"schema": _schema(answer, schemas)}}
    return {responses.JSON_TYPE: {"schema": {"type": "object"}}}


def _schema(kind: Any, schemas: dict[str, Json], *, is_closed: bool = False) -> Json:
    """Return the schema of a type; those of objects go to `schemas`, under the names of their classes."""
    if kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return _schema(arguments[0], schemas, is_closed=is_closed)
    if origin in {Union, types.UnionType}:
        return {"anyOf": [_schema(one, schemas, is_closed=is_closed) for one in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], schemas, is_closed=is_closed)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas, is_closed=is_closed)}
    if not is_typeddict(kind):
        raise TypeError(f"{kind!r} has no place in an answer or a request")
    if kind.__name__ not in schemas:
        schemas[kind.__name__] = {}  # so that a type may hold itself
        schemas[kind.__name__] = _object(kind, schemas, is_closed=is_closed)
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _object(kind: Any, schemas: dict[str, Json], *, is_closed: bool) -> Json:
    about, words = _description(kind)
    properties: dict[str, Json] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        schema = _schema(hint, schemas, is_closed=is_closed)
        properties[name] = {**schema, "description": words[name]} if name in words else schema
    always = set(kind.__required_keys__) | (set(Answer.__annotations__) & set(properties))
    found: Json = {"type": "object", "properties": properties}
    if always:
        found["required"] = [name for name in properties if name in always]
    if is_closed:
        found["additionalProperties"] = False
    return {**found, "description": about} if about else found


def _description(kind: type) -> tuple[str, Mapping[str, str]]:
    """Return what the docstring of a class says of it, and of each of its attributes."""
    text = "\n".join(line.strip() for line in (kind.__doc__ or "").splitlines())
    about, *rest = _ATTRIBUTES.split(text)
    words = {
        name: said
        for names, said in _entries("\n".join(rest).splitlines())
        for name in (one.strip() for one in names.split(","))
    }
    return " ".join(about.split()), words


def _entries(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the names and the words of each entry, `name, other: words`, which may go on in the next lines."""
    names, said = "", ""
    for line in lines:
        found = re.match(r"([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
        if found:
            if names:
                yield names, said
            names, said = found[1], found[2]
        elif line and names:
            said = f"{said} {line}"
    if names:
        yield names, said

"""Answers and refusals as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from spotd.api.errors import ApiRefusal, Invalid, RefusalCode
from spotd.api.schemas import SCHEMA
from spotd.api.schemas.envelope import ErrorResponse
from spotd_jobs.spec.problems import Problem

INTERNAL: Final = "internal"
JSON_TYPE: Final = "application/json"
STATUS_OF_LONG_BODY: Final = 413
STATUS_OF_DEFECT: Final = 500

STATUS_OF_CODE: Final[Mapping[RefusalCode, int]] = {
    RefusalCode.NOT_FOUND: 404,
    RefusalCode.AMBIGUOUS: 409,
    RefusalCode.INVALID: 422,
    RefusalCode.CONFLICT: 409,
    RefusalCode.BUDGET: 402,
    RefusalCode.UNAVAILABLE: 503,
}


class BodyTooLong(Invalid):
    """A body is beyond its limit."""


def dumps(body: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def json_response(body: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(dumps({"schema": SCHEMA, **body}), status_code=status, media_type=JSON_TYPE)


def error_body(
    code: str, message: str, *, hint: str = "", problems: tuple[Problem, ...] = ()
) -> dict[str, ErrorResponse]:
    return {
        "error": {
            "code": str(code),
            "message": message,
            "hint": hint,
            "problems": [{"key": p.key, "message": p.message, "hint": p.hint} for p in problems],
        }
    }


def refusal_body(refusal: ApiRefusal) -> dict[str, ErrorResponse]:
    return error_body(refusal.code, refusal.message, hint=refusal.hint, problems=refusal.problems)


def refusal_response(refusal: ApiRefusal) -> Response:
    status = STATUS_OF_LONG_BODY if isinstance(refusal, BodyTooLong) else STATUS_OF_CODE[refusal.code]
    return json_response(refusal_body(refusal), status=status)

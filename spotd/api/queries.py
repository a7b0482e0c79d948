"""The parameters of a query, read as the fields of a value, which alone state their names, bounds and defaults."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from starlette.requests import Request

from spotd.api.errors import Invalid
from spotd.api.timestamps import utc_instant

Parameters = Mapping[str, "QueryParameter"]
Q = TypeVar("Q")
_FLAGS: Final = {"0": False, "1": True}
_UNIONS: Final = (Union, types.UnionType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The bounds of a whole number."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """How a value that is none of an enum's is refused; the value follows these words."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """One parameter of a query.

    Attributes:
        kind: `str`, `int`, `bool`, `datetime` or a `StrEnum`.
        is_repeated: it may be given several times.
        refusal: the words for a value that is none of the enum's.
    """

    name: str
    kind: type
    is_required: bool
    is_repeated: bool
    bounds: Between | None
    refusal: str

    def value(self, text: str) -> object:
        """Return what this text means.

        Raises:
            Invalid: it means nothing here.
        """
        if self.bounds is not None:
            least, most = self.bounds.least, self.bounds.most
            if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= most:
                raise Invalid(f"the parameter {self.name} must be a whole number from {least} to {most}")
            return int(text)
        if self.kind is bool:
            if text not in _FLAGS:
                raise Invalid(f"the parameter {self.name} must be 0 or 1")
            return _FLAGS[text]
        if self.kind is datetime:
            try:
                return utc_instant(text)
            except (ValueError, OverflowError) as exc:
                raise Invalid(f"the parameter {self.name} must be an instant such as 2026-11-21T10:00:00Z") from exc
        if issubclass(self.kind, StrEnum) and text not in set(self.kind):
            raise Invalid(f"{self.refusal} {text!r}", hint=f"one of {', '.join(self.kind)}")
        return self.kind(text)


def read_query(request: Request, kind: type[Q]) -> Q:
    """Return the query of a request as this dataclass.

    Raises:
        Invalid: a parameter is unknown, missing, given twice, or means nothing.
    """
    hashable: Any = kind  # mypy does not take a type[Q] for one
    parameters = query_parameters(hashable)
    require_known(request, parameters)
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        texts = request.query_params.getlist(name)
        if parameter.is_required and not any(texts):
            raise Invalid(f"the parameter {name} is missing")
        if parameter.is_repeated:
            given[name] = tuple(dict.fromkeys(parameter.value(text) for text in texts))
        elif len(texts) > 1:
            raise Invalid(f"the parameter {name} is given twice")
        elif texts:
            given[name] = parameter.value(texts[0])
    return kind(**given)


def require_known(request: Request, known: Mapping[str, object]) -> None:
    """Require that the request has no other query parameters.

    Raises:
        Invalid: it has one.
    """
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"unknown parameter {name!r}")


@cache
def query_parameters(kind: Any) -> Parameters:
    """Return the parameters that the fields of a dataclass stand for, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: _parameter(field.name, hints[field.name], is_required=field.default is MISSING)
        for field in fields(kind)
    }


def _parameter(name: str, hint: Any, *, is_required: bool) -> QueryParameter:
    marks: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)
    is_repeated = get_origin(hint) is tuple
    kinds = get_args(hint) if is_repeated or get_origin(hint) in _UNIONS else (hint,)
    return QueryParameter(
        name=name,
        kind=kinds[0],
        is_required=is_required,
        is_repeated=is_repeated,
        bounds=next((mark for mark in marks if isinstance(mark, Between)), None),
        refusal=next((mark.words for mark in marks if isinstance(mark, OneOf)), ""),
    )

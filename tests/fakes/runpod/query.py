"""As much of GraphQL as clients of RunPod write: one operation, arguments, aliases, nested selections.

Clients spell their values out in the query or send them as variables; both come to the same here. An answer holds
what was selected and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fakes.runpod.refusal import GraphError

_TOKEN: Final = re.compile(r'\s*(?:,|#[^\n]*)*\s*("(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\$\w+|-?\d+(?:\.\d+)?|[{}()\[\]:!=])')


@dataclass(slots=True, kw_only=True)
class Selected:
    """One selected field."""

    name: str
    alias: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: list[Selected] = field(default_factory=list)


def parsed(text: str, variables: Mapping[str, Any]) -> tuple[str, list[Selected]]:
    """`query` or `mutation`, and the fields it asks for.

    Raises:
        GraphError: it cannot be read.
    """
    return _Reader(text, variables).operation()


def projected(value: Any, fields: list[Selected]) -> Any:
    """The value with the selected fields only; a field it does not have is an error, as the real one's schema says.

    Raises:
        GraphError: an unknown field.
    """
    if value is None or not fields:
        return value
    if isinstance(value, list):
        return [projected(item, fields) for item in value]
    answer = {}
    for one in fields:
        if one.name == "__typename":
            answer[one.alias] = value.get("__typename", "Object")
            continue
        if one.name not in value:
            raise GraphError(f'Cannot query field "{one.name}" on this type.', code="GRAPHQL_VALIDATION_FAILED")
        found = value[one.name]
        answer[one.alias] = projected(found(one.arguments) if callable(found) else found, one.fields)
    return answer


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        self._words: list[str] = []
        at = 0
        stripped = text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise GraphError("Syntax Error: Unexpected character.", code="GRAPHQL_PARSE_FAILED")
            self._words.append(match[1])
            at = match.end()
        self._at = 0
        self._variables = variables

    def operation(self) -> tuple[str, list[Selected]]:
        kind = "query"
        if self._peek() in ("query", "mutation"):
            kind = self._next()
            if self._peek() not in ("{", "("):
                self._next()
            if self._peek() == "(":
                while self._next() != ")":
                    pass
        return kind, self._selection()

    def _selection(self) -> list[Selected]:
        self._expect("{")
        found = []
        while self._peek() != "}":
            name = self._next()
            alias = name
            if self._peek() == ":":
                self._next()
                name = self._next()
            one = Selected(name=name, alias=alias)
            if self._peek() == "(":
                self._next()
                while self._peek() != ")":
                    argument = self._next()
                    self._expect(":")
                    one.arguments[argument] = self._value()
                self._next()
            if self._peek() == "{":
                one.fields = self._selection()
            found.append(one)
        self._next()
        return found

    def _value(self) -> Any:
        word = self._next()
        if word == "{":
            fields = {}
            while self._peek() != "}":
                name = self._next()
                self._expect(":")
                fields[name] = self._value()
            self._next()
            return fields
        if word == "[":
            items = []
            while self._peek() != "]":
                items.append(self._value())
            self._next()
            return items
        if word.startswith("$"):
            return self._variables.get(word[1:])
        if word in ("true", "false", "null") or word[0] in '"-0123456789':
            return json.loads(word)
        return word

    def _peek(self) -> str:
        if self._at >= len(self._words):
            raise GraphError("Syntax Error: Unexpected <EOF>.", code="GRAPHQL_PARSE_FAILED")
        return self._words[self._at]

    def _next(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def _expect(self, wanted: str) -> None:
        if self._next() != wanted:
            raise GraphError(f"Syntax Error: Expected {wanted}.", code="GRAPHQL_PARSE_FAILED")

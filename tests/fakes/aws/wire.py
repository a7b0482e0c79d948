"""EC2's Query protocol: flat form parameters in, XML with `<item>` lists out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

NAMESPACE: Final = "http://ec2.amazonaws.com/doc/2016-11-15/"
_REGION: Final = re.compile(r"Credential=([^/]+)/[0-9]+/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request")


class Refusal(Exception):
    """An error answer."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


class Params:
    """The flat parameters of one request."""

    def __init__(self, body: bytes) -> None:
        self._flat = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))

    def get(self, name: str, default: str = "") -> str:
        return self._flat.get(name, default)

    def flag(self, name: str) -> bool:
        return self.get(name) == "true"

    def many(self, name: str) -> list[str]:
        """`Name.1`, `Name.2`, ... in order."""
        found = []
        number = 1
        while (value := self._flat.get(f"{name}.{number}")) is not None:
            found.append(value)
            number += 1
        return found

    def filters(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        number = 1
        while name := self.get(f"Filter.{number}.Name"):
            found[name] = self.many(f"Filter.{number}.Value")
            number += 1
        return found

    def tags(self, resource: str) -> dict[str, str]:
        """What `TagSpecification` asks to put on one kind of resource."""
        number = 1
        while kind := self.get(f"TagSpecification.{number}.ResourceType"):
            if kind == resource:
                found: dict[str, str] = {}
                tag = 1
                while key := self.get(f"TagSpecification.{number}.Tag.{tag}.Key"):
                    found[key] = self.get(f"TagSpecification.{number}.Tag.{tag}.Value")
                    tag += 1
                return found
            number += 1
        return {}

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Everything that a client token pins."""
        return tuple(sorted((k, v) for k, v in self._flat.items() if k not in ("ClientToken", "DryRun")))


def signer(authorization: str) -> tuple[str, str, str]:
    """Access key, region and service of a signed request; empty texts for one that is not signed."""
    found = _REGION.search(authorization)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def instant(text: str) -> datetime | None:
    """An ISO 8601 instant of a request."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Refusal("InvalidParameterValue", "a time is not ISO 8601") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def iso(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def answer(action: str, fields: Mapping[str, Any], request_id: str) -> bytes:
    """The XML of a good answer."""
    inner = _element("requestId", request_id) + "".join(_element(name, value) for name, value in fields.items())
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{action}Response xmlns="{NAMESPACE}">{inner}</{action}Response>'
    return text.encode()


def error(refusal: Refusal, request_id: str) -> bytes:
    """The XML of a refusal."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{escape(refusal.code)}</Code>'
        f"<Message>{escape(refusal.message)}</Message></Error></Errors><RequestID>{request_id}</RequestID></Response>"
    ).encode()


def page(rows: Sequence[Any], params: Params, *, rows_max: int, last_token_empty: bool) -> tuple[list[Any], str | None]:
    """One page of rows, and the token of the next."""
    token = params.get("NextToken")
    if token and not token.removeprefix("t-").isdecimal():
        raise Refusal("InvalidParameterValue", "NextToken is not one of ours")
    start = int(token.removeprefix("t-")) if token else 0
    asked = int(params.get("MaxResults") or rows_max)
    end = start + max(1, min(asked, rows_max))
    more = f"t-{end}" if end < len(rows) else "" if last_token_empty else None
    return list(rows[start:end]), more


def _element(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return f"<{name}>{''.join(_element(key, inner) for key, inner in value.items())}</{name}>"
    if isinstance(value, list):
        return f"<{name}>{''.join(_element('item', inner) for inner in value)}</{name}>"
    if isinstance(value, bool):
        return f"<{name}>{'true' if value else 'false'}</{name}>"
    return f"<{name}>{escape(str(value))}</{name}>"

"""Plain HTTP requests to a fake, as a container or a stranger would send them."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """One answer; `json` is `None` where the body is no JSON."""

    status: int
    headers: dict[str, str]
    text: str
    json: Any


def ask(port: int, method: str, path: str, *, key: str | None = None, body: Any = None) -> Reply:
    """The answer of 127.0.0.1 to one request; redirects are not followed."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    try:
        decoded = json.loads(text)
    except ValueError:
        decoded = None
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, text, decoded)

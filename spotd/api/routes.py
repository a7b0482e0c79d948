"""The table of routes. What an endpoint takes and answers is its signature, from which the API's description is made.

An endpoint's parameters are, by name: those of the path; `query`, a dataclass of `spotd.api.requests`; `body`, an
object of `spotd.api.schemas.bodies`; and `request`, for a body that is a stream of bytes. It returns an object of
`spotd.api.schemas.answers`, or a response that is sent as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints

from starlette.requests import Request

from spotd.api.errors import RefusalCode
from spotd.api.parameters import read_json
from spotd.api.queries import read_query, require_known

_MARK: Final = "_spotd_route"
_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRoute:
    """One method of one path.

    Attributes:
        name: of the endpoint.
        about: what it does, in the words of its docstring.
        status: of an answer that is no refusal.
        takes: the types of its parameters by name.
        answer: the type of what it returns.
    """

    method: str
    path: str
    name: str
    about: str
    status: int
    refuses: frozenset[RefusalCode]
    takes: Mapping[str, Any]
    answer: Any

    async def arguments(self, request: Request) -> dict[str, Any]:
        """Return what the endpoint is called with.

        Raises:
            Invalid: the query or the body is none of this route.
        """
        given: dict[str, Any] = {name: value for name, value in request.path_params.items() if name in self.takes}
        if "query" in self.takes:
            given["query"] = read_query(request, self.takes["query"])
        else:
            require_known(request, {})
        if "body" in self.takes:
            given["body"] = await read_json(request, self.takes["body"])
        if "request" in self.takes:
            given["request"] = request
        return given


def serving(
    method: str, path: str, *, status: int = 200, refuses: Collection[RefusalCode] = ()
) -> Callable[[_Method], _Method]:
    """Make a method the endpoint of a route.

    Args:
        refuses: ways in which it refuses a request, but for those that its parameters bring with them.
    """

    def mark(endpoint: _Method) -> _Method:
        setattr(endpoint, _MARK, (method, path, status, frozenset(refuses)))
        return endpoint

    return mark


def routes_of(api: type) -> tuple[ApiRoute, ...]:
    """Return the routes of a class of endpoints, in their order."""
    found = []
    for name, endpoint in vars(api).items():
        if (mark := getattr(endpoint, _MARK, None)) is None:
            continue
        method, path, status, refuses = mark
        hints = get_type_hints(endpoint)
        answer = hints.pop("return")
        about = " ".join((endpoint.__doc__ or "").split())
        found.append(
            ApiRoute(
                method=method,
                path=path,
                name=name,
                about=about,
                status=status,
                refuses=refuses,
                takes=hints,
                answer=answer,
            )
        )
    return tuple(found)

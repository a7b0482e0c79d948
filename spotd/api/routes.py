"""The table of routes. What an endpoint takes and answers is its signature, from which the API's description is made.

An endpoint's parameters are, by name: those of the path; `query`, a dataclass of `spotd.api.requests`; `body`, an
object of `spotd.api.schemas.bodies`; and `request`, for a body that is a stream of bytes. It returns an object of
`spotd.api.schemas.answers`, or a response that is sent as it is.

Each route begins with the right that a caller needs, so that none can be without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, get_type_hints

from starlette.requests import Request

from spotd.api.requests import BudgetChange, FolderContent, JobDraft, read_query, require_known
from spotd.api.responses import BodyTooLong, Invalid, RefusalCode
from spotd.api.schemas.bodies import DraftBody, FolderBody
from spotd.core.domain.policy import Right
from spotd.shell_address import PORT_MAX
from spotd_jobs.spec.data import DATA_MAX
from spotd_jobs.spec.fields import shown
from spotd_jobs.spec.model import PriceLimit
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_money, parse_price
from spotd_jobs.wire.client.dataset import BYTES_MAX

# Bodies and text parameters of requests, checked before a handler sees them. All errors are `Invalid`.


BODY_BYTES_MAX: Final = 2 * 2**20
SECRET_BYTES_MAX: Final = 64 * 1024
SECRETS_BYTES_MAX: Final = 2**20
"""All of one job: Linux gives a program at most 2 MiB for its arguments and its environment together."""
CONFIG_CEILING: Final = "config"
CEILING_HINT: Final = "write 2.40 per GPU-hour, 19.20/h for the machine, or config for the ceiling of the config"
BUDGET_HINT: Final = "write +20 to add dollars, or 140 to set them"
NAME_LENGTH_MAX: Final = 1000
SECOND_MAX: Final = 253_402_300_799
"""The last of the year 9999, the last that an instant can name."""
PATH_LENGTH_MAX: Final = 8_192
"""Of the names of a file and a folder of the client, which are repeated with each problem."""
NUL_HINT: Final = "no environment variable can hold one; encode the value, for example with base64"
_SPAN: Final = re.compile(r"(\d{1,7})-(\d{1,7})", re.ASCII)
SHA256_PATTERN: Final = "^[0-9a-f]{64}$"


async def read_json(request: Request, kind: type) -> Mapping[str, Any]:
    """Return the body as an object with no keys but those of this type, all of its text valid Unicode."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES_MAX:
            raise BodyTooLong("the request is larger than 2 MiB", hint="a job file holds settings, not data")
    try:
        body = json.loads(bytes(raw))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError as exc:
        raise Invalid("the request holds bytes that are not text") from exc
    except ValueError as exc:
        raise Invalid("the request is not JSON") from exc
    except RecursionError as exc:
        raise Invalid("the request is nested too deeply") from exc
    if not isinstance(body, dict):
        raise Invalid("the request is not a JSON object")
    for key in body:
        if key not in kind.__annotations__:
            raise Invalid(f"the request holds the unknown key {shown(key)}")
    return body


def read_draft(body: Mapping[str, Any]) -> JobDraft:
    draft = body.get("draft")
    if not isinstance(draft, dict):
        raise Invalid("the request has no draft")
    unknown = set(draft) - set(DraftBody.__annotations__)
    if unknown:
        raise Invalid(f"the draft holds the unknown key {shown(min(unknown))}")
    data, flags = draft.get("data", {}), draft.get("flags", {})
    source, base_dir = draft.get("source", ""), draft.get("base_dir", "")
    if not isinstance(data, dict) or not isinstance(flags, dict):
        raise Invalid("data and flags of a draft are objects")
    for name, text in (("source", source), ("base_dir", base_dir)):
        if not isinstance(text, str) or len(text) > PATH_LENGTH_MAX:
            raise Invalid(f"{name} of a draft is text of at most {PATH_LENGTH_MAX:,} characters")
    folders = _read_folders(draft.get("folders", {}))
    return JobDraft(data=data, flags=flags, source=source, base_dir=base_dir, folders=folders)


def _read_folders(found: object) -> dict[str, FolderContent]:
    if not isinstance(found, dict) or len(found) > DATA_MAX:
        raise Invalid(f"folders of a draft is an object of at most {DATA_MAX} keys")
    folders: dict[str, FolderContent] = {}
    for path, content in found.items():
        if not isinstance(content, dict) or set(content) - set(FolderBody.__annotations__):
            raise Invalid("a folder of a draft has bytes, files and maybe sha256")
        size, files = content.get("bytes"), content.get("files")
        if type(size) is not int or type(files) is not int or not (0 <= size <= BYTES_MAX and 0 <= files <= BYTES_MAX):
            raise Invalid("bytes and files of a folder are whole numbers")
        sha256 = content.get("sha256")
        folders[path] = FolderContent(
            bytes=size, files=files, sha256=None if sha256 is None else read_sha256(str(sha256))
        )
    return folders


def read_budget_change(body: Mapping[str, Any]) -> BudgetChange:
    """`+20` adds dollars to a budget, `=140`, `140` and a number set it."""
    value = body.get("budget")
    is_added = isinstance(value, str) and value.startswith("+")
    figure = value[1:] if isinstance(value, str) and value[:1] in {"+", "="} else value
    try:
        amount = parse_money(figure)
    except BadValue as exc:
        raise Invalid(f"the budget {exc}", hint=exc.hint or BUDGET_HINT) from exc
    if amount == 0:
        raise Invalid("the budget must be above 0", hint=BUDGET_HINT)
    return BudgetChange(amount=amount, is_added=is_added)


def read_ceiling(body: Mapping[str, Any]) -> PriceLimit | None:
    """Return a price as a job file states it in `max_price`; `None` for `config`, the ceiling of the config."""
    value = body.get("ceiling")
    if value == CONFIG_CEILING:
        return None
    try:
        return parse_price(value)
    except BadValue as exc:
        raise Invalid(f"the ceiling {exc}", hint=CEILING_HINT) from exc


def read_flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise Invalid(f"{name} is true or false")
    return value


def read_name(body: Mapping[str, Any], key: str, refusal: str, *, hint: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_LENGTH_MAX:
        raise Invalid(refusal, hint=hint)
    return value


def read_import(body: Mapping[str, Any]) -> tuple[str, datetime, str]:
    """Return the provider, from when on, and where its pages go on."""
    name = read_name(body, "provider", "provider is the name of a provider", hint="spotctl providers lists them")
    second, after = body.get("since_s"), body.get("after", "")
    if type(second) is not int or not 0 <= second <= SECOND_MAX:
        raise Invalid("since_s is a Unix second")
    if not isinstance(after, str) or len(after) > NAME_LENGTH_MAX:
        raise Invalid("after is next of the answer before")
    return name, datetime.fromtimestamp(second, UTC), after


def read_channel(body: Mapping[str, Any]) -> str | None:
    """Return the name of a channel, `None` for all."""
    if body.get("channel") is None:
        return None
    return read_name(body, "channel", "channel is the name of a channel, or null", hint="spotctl doctor lists them")


def read_resume_from(body: Mapping[str, Any]) -> str:
    """`JOB` or `JOB:CHECKPOINT`, empty where nothing was given."""
    text = "" if body.get("resume_from") is None else body["resume_from"]
    if not isinstance(text, str) or text.startswith(":") or text.endswith(":"):
        raise Invalid("resume_from is JOB or JOB:CHECKPOINT", hint="spotctl checkpoints JOB lists them")
    return text


def read_secrets(body: Mapping[str, Any]) -> dict[str, str]:
    """Return values by name. No message here ever holds a value."""
    secrets = {} if body.get("secrets") is None else body["secrets"]
    if not isinstance(secrets, dict) or not all(isinstance(value, str) for value in secrets.values()):
        raise Invalid("secrets are an object of texts")
    for name, value in secrets.items():
        if len(value.encode()) > SECRET_BYTES_MAX:
            raise Invalid(f"the secret {name} is larger than 64 KiB")
        if "\0" in value:
            raise Invalid(f"the secret {name} holds a NUL character", hint=NUL_HINT)
    if sum(len(value.encode()) for value in secrets.values()) > SECRETS_BYTES_MAX:
        raise Invalid("the secrets are larger than 1 MiB together", hint="a program takes no larger environment")
    return secrets


def read_sha256(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(SHA256_PATTERN, value):
        raise Invalid("a code hash is 64 lower-case hexadecimal digits")
    return value


def read_port(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,4}", value) or int(value) > PORT_MAX:
        raise Invalid(f"a port is a number from 1 to {PORT_MAX}")
    return int(value)


def read_root(body: Mapping[str, Any]) -> str:
    """Return the text of the root of a dataset."""
    text = body.get("root")
    if not isinstance(text, str) or not text.isascii():
        raise Invalid("the request holds no list of the parts of a dataset")
    return text


def read_array(body: Mapping[str, Any]) -> str:
    """Return the indexes of an array; empty for one job."""
    text = "" if body.get("array") is None else body["array"]
    if not isinstance(text, str):
        raise Invalid("array is a text such as 0-15")
    return text


def read_names(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the checkpoints that are meant, at least one."""
    names = body.get("checkpoints")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise Invalid("checkpoints are a list of names, at least one")
    return tuple(dict.fromkeys(names))


def read_spans(text: str) -> tuple[tuple[int, int], ...]:
    """Return first and last of each span of a list of files."""
    spans = []
    for one in text.split(","):
        found = _SPAN.fullmatch(one)
        if found is None or int(found[1]) > int(found[2]):
            raise Invalid("the parameter files is a list of spans such as 0-17,20-20")
        spans.append((int(found[1]), int(found[2])))
    return tuple(spans)


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
        right: the least that a caller needs.
        is_of_own: who may not operate reaches jobs of one's own only.
    """

    method: str
    path: str
    name: str
    about: str
    status: int
    refuses: frozenset[RefusalCode]
    takes: Mapping[str, Any]
    answer: Any
    right: Right
    is_of_own: bool

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
    right: Right, method: str, path: str, *, own: bool = False, status: int = 200, refuses: Collection[RefusalCode] = ()
) -> Callable[[_Method], _Method]:
    """Make a method the endpoint of a route.

    Args:
        right: the least that a caller needs.
        own: the job is one that the caller queued, unless the caller may operate.
        refuses: ways in which it refuses a request, but for those that its parameters bring with them.
    """

    def mark(endpoint: _Method) -> _Method:
        setattr(endpoint, _MARK, (method, path, status, frozenset(refuses), right, own))
        return endpoint

    return mark


def routes_of(api: type) -> tuple[ApiRoute, ...]:
    """Return the routes of a class of endpoints, in their order."""
    found = []
    for name, endpoint in vars(api).items():
        if (mark := getattr(endpoint, _MARK, None)) is None:
            continue
        method, path, status, refuses, right, own = mark
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
                right=right,
                is_of_own=own,
            )
        )
    return tuple(found)

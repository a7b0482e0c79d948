"""The base of the fakes of plain REST clouds: their routes, refusals, common knobs, machines, and a bill in slots."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar
from uuid import UUID

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd_providers.contract.values import MICRO, MicroUsdPerHour, cost
from spotd_providers.local.hosts import HostClock, HostMachineState, Segment, read_ledger, segments
from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.cloud import NOTHING, POWERED_OFF, FakeApi, FakeCloud, path_with_shutdown

MONTH_HOURS: Final = 730
_MINUTE: Final = timedelta(minutes=1)
_ALL: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[[Request, dict[str, Any]], Any]


def usd(amount: float) -> MicroUsdPerHour:
    """So many dollars per hour."""
    return MicroUsdPerHour(round(amount * MICRO))


class RestRefusal(Exception):
    """Another answer than the one asked for; each cloud writes it in its own form."""

    def __init__(
        self, status: int, message: str, *, code: str = "", headers: Mapping[str, str] | None = None, detail: Any = None
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.message, self.code = status, message, code
        self.headers, self.detail = dict(headers or {}), detail


@dataclass(slots=True, kw_only=True)
class RestQuirks:
    """Knobs that every REST fake has; change one while the fake runs and the next request sees it.

    Attributes:
        boot: from the order to the machine that runs.
        list_lag: so long a new machine is missing from lists; `show_lag` from its own route.
        ending: so long a machine that its owner ends is shown as ending.
        lingers: so long a machine that has ended is shown on its own route; in lists only if `lists_ended`.
        hidden: ids that the list leaves out; `edit_row` and `edit_offer` replace fields of a row, or the whole row.
        refusals: what every call of a kind is refused with; `fail_after_launch` is the next launch's answer, although
            the machine was ordered.
        undead: so many calls of the end a machine launched from now on survives, each answered as done.
        quota_gpus: most GPUs at once. `requests_per_minute`: more are answered 429.
        slot: what runs is billed in whole slots, each when it begins.
        bills_ending: a machine is billed until it has ended, not until its end was asked for.
    """

    boot: timedelta = timedelta(minutes=3)
    list_lag: timedelta = timedelta(0)
    show_lag: timedelta = timedelta(0)
    ending: timedelta = timedelta(minutes=1)
    lingers: timedelta = timedelta(minutes=30)
    lists_ended: bool = False
    hidden: set[str] = field(default_factory=set)
    edit_row: dict[str, Any] = field(default_factory=dict)
    edit_offer: dict[str, Any] = field(default_factory=dict)
    refusals: dict[Call, RestRefusal] = field(default_factory=dict)
    fail_after_launch: RestRefusal | None = None
    undead: int = 0
    quota_gpus: int | None = None
    requests_per_minute: int | None = None
    retry_after_s: int | None = None
    slot: timedelta = timedelta(seconds=1)
    bills_ending: bool = False


@dataclass(slots=True, kw_only=True)
class RestMachine:
    """One machine, from its order to oblivion.

    Attributes:
        label: the key it carries; `None` for none.
        price: what it costs per hour while it runs, without volumes that are billed on their own.
        script: what its first boot runs; a machine that is not ours runs nothing.
        ended_at: since when it no longer exists: it can neither run nor bill.
        boot_no: raised by what makes a boot under way void.
    """

    machine_id: str
    label: str | None
    status: str
    launched_at: datetime
    price: MicroUsdPerHour
    gpus: int
    is_spot: bool = False
    script: str | None = None
    ended_at: datetime | None = None
    is_ours: bool = True
    vanished: bool = False
    deaths_left: int = 0
    boot_no: int = 0

    @property
    def exists(self) -> bool:
        return self.ended_at is None


Q = TypeVar("Q", bound=RestQuirks)
M = TypeVar("M", bound=RestMachine)
R = TypeVar("R", bound="RestCloud[Any, Any]")


class RestCloud(FakeCloud, Generic[Q, M]):
    """One account at a fake REST cloud."""

    def __init__(self, root: Path, *, clock: HostClock, quirks: Q) -> None:
        super().__init__(root, clock=clock, path=path_with_shutdown(root))
        self.quirks = quirks
        self.rented: dict[str, M] = {}
        self._ids = count(0x5D0C)

    def uuid(self) -> str:
        """A new id, the same in every run."""
        return str(UUID(int=next(self._ids) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128, version=4))

    def known(self, machine_id: str) -> M | None:
        """The machine behind its own route, if it is shown there."""
        machine = self.rented.get(machine_id)
        return machine if machine and self._is_shown(machine, self.quirks.show_lag) else None

    def listed(self) -> list[M]:
        """The machines of a list, oldest first."""
        lag, hidden = self.quirks.list_lag, self.quirks.hidden
        return [one for one in self.rented.values() if self._is_shown(one, lag) and one.machine_id not in hidden]

    def vanish(self, machine_id: str) -> None:
        """The machine has ended and no route knows it any longer."""
        with self.lock:
            self.rented[machine_id].vanished = True
            self._end(self.rented[machine_id], self.clock.now(), "vanished")

    def rename(self, machine_id: str, status: str) -> None:
        """The machine has this status, whatever it does."""
        with self.lock:
            self.rented[machine_id].status = status

    def billed(self, machine_id: str, until: datetime | None = None) -> int:
        """Micro-dollars of one machine or volume."""
        spans = segments(read_ledger(self.ledger_path))
        return slot_cost([one for one in spans if one.machine_id == machine_id], self.quirks.slot, self._until(until))

    def spent_usd(self) -> float:
        """Sum of the bills, $."""
        spans: dict[str, list[Segment]] = {}
        for span in segments(read_ledger(self.ledger_path)):
            spans.setdefault(span.machine_id, []).append(span)
        return sum(slot_cost(own, self.quirks.slot, self.clock.now()) for own in spans.values()) / MICRO

    def require_quota(self, gpus: int) -> None:
        """
        Raises:
            RestRefusal: so many GPUs more are too many.
        """
        used = sum(one.gpus for one in self.rented.values() if one.exists)
        if self.quirks.quota_gpus is not None and used + gpus > self.quirks.quota_gpus:
            raise RestRefusal(403, "GPU quota exceeded: the limit of your account is reached", code="forbidden_action")

    def _keep(self, machine: M, *, bills_now: bool, storage: MicroUsdPerHour = NOTHING) -> M:
        """Keep a new machine in the books."""
        machine.deaths_left = self.quirks.undead
        self.rented[machine.machine_id] = machine
        compute = machine.price if bills_now else NOTHING
        label, at = machine.label or "", machine.launched_at
        self.ledger.open(machine.machine_id, label, at=at, compute=compute, storage=storage)
        return machine

    def _raise_after_launch(self) -> None:
        refusal, self.quirks.fail_after_launch = self.quirks.fail_after_launch, None
        if refusal is not None:
            raise refusal

    def _later(self, machine: M, after: timedelta, happens: Callable[[M, datetime], None], *, since: datetime) -> None:
        """Let it happen to the machine, unless it ends or is booted anew before."""
        boot_no = machine.boot_no

        def due(at: datetime) -> None:
            if machine.exists and machine.boot_no == boot_no:
                happens(machine, at)

        self.at(since + after, due)

    def _run(self, machine: M, at: datetime) -> None:
        """Bill the machine from now on, and run its script if this is its first boot."""
        self.ledger.price(machine.machine_id, at=at, compute=machine.price)
        if machine.script is not None and machine.is_ours and machine.machine_id not in self.machines.ids():
            self.machines.start(machine.machine_id, machine.script)

    def _end(self, machine: M, at: datetime, note: str) -> None:
        """End the machine and its bill, once."""
        self.machines.kill(machine.machine_id)
        if machine.exists:
            machine.ended_at = at
            machine.boot_no += 1
            self.ledger.end(machine.machine_id, at=at, note=note)

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for machine in list(self.rented.values()):
            if not machine.exists or machine.machine_id not in known:
                continue
            status = self.machines.status(machine.machine_id)
            off = self.machines.home(machine.machine_id) / POWERED_OFF
            if off.exists():
                off.unlink()
                self.machines.kill(machine.machine_id)
                self._power_off(machine, status.ended_at or now)
            elif status.state is HostMachineState.LOST:
                self._lose(machine, status.ended_at or now)

    @abstractmethod
    def _power_off(self, machine: M, at: datetime) -> None:
        """The machine was shut down from inside."""

    def _lose(self, machine: M, at: datetime) -> None:
        """The processes of the machine were killed with their host; by default the cloud does not see that."""

    def _is_shown(self, machine: M, lag: timedelta) -> bool:
        now = self.clock.now()
        if machine.vanished or now < machine.launched_at + lag:
            return False
        return machine.ended_at is None or now < machine.ended_at + self.quirks.lingers

    def _until(self, until: datetime | None) -> datetime:
        return until or self.clock.now()


def slot_cost(spans: Sequence[Segment], slot: timedelta, now: datetime) -> int:
    """Micro-dollars of one machine: storage as it lies, and each unbroken run in whole slots, one at least."""
    total, began = 0, None
    for span, following in zip(spans, [*spans[1:], None], strict=True):
        end = min(span.end or now, now)
        if span.start > now:
            break
        total += cost(span.storage, end - span.start)
        if not span.compute:
            continue
        began = span.start if began is None else began
        if following is None or not following.compute or following.start > end or end == now:
            end, began = began + max(1, -((began - end) // slot)) * slot, None
        total += cost(span.compute, end - span.start)
    return total


class RestApi(FakeApi[R]):
    """The ASGI application of a fake REST cloud."""

    base_path: ClassVar[str]

    def __init__(self, cloud: R) -> None:
        self._recent: list[datetime] = []
        super().__init__(cloud)

    @staticmethod
    @abstractmethod
    def classify(request: RecordedRequest) -> Call:
        """What a request is for."""

    @abstractmethod
    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers by path below the base path and by method; what one returns is sent as JSON, but for a response."""

    @abstractmethod
    def _authenticate(self, request: Request) -> None:
        """
        Raises:
            RestRefusal: the request may not be made.
        """

    @abstractmethod
    def _refused(self, refusal: RestRefusal) -> Response:
        """The refusal as this cloud says it."""

    def _built(self) -> Starlette:
        paths = [
            Route(self.base_path + path, self.endpoint(partial(self._answer, methods)), methods=_ALL)
            for path, methods in self._routes().items()
        ]
        rest = Route("/{rest:path}", self.endpoint(partial(self._answer, None)), methods=_ALL)
        return Starlette(routes=[*paths, rest])

    def _answer(self, methods: Mapping[str, Handler] | None, request: Request, content: bytes) -> Response:
        try:
            self._authenticate(request)
            self._admit(request)
            if methods is None or request.method not in methods:
                raise RestRefusal(404 if methods is None else 405, "Not found", code="not_found")
            answer = methods[request.method](request, _decoded(content))
        except RestRefusal as refusal:
            return self._refused(refusal)
        return answer if isinstance(answer, Response) else as_json(answer)

    def _admit(self, request: Request) -> None:
        """
        Raises:
            RestRefusal: too many requests, or a refusal was ordered for this kind of call.
        """
        now, quirks = self.cloud.clock.now(), self.cloud.quirks
        self._recent = [one for one in self._recent if one > now - _MINUTE]
        if quirks.requests_per_minute is not None and len(self._recent) >= quirks.requests_per_minute:
            headers = {} if quirks.retry_after_s is None else {"retry-after": str(quirks.retry_after_s)}
            raise RestRefusal(429, "Too many requests", headers=headers)
        self._recent.append(now)
        path = request.url.path
        call = self.classify(RecordedRequest(method=request.method, path=path, query="", headers={}, body=b""))
        if call in quirks.refusals:
            raise quirks.refusals[call]


def as_json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status_code=status, headers=dict(headers or {}), media_type="application/json")


def edited(row: dict[str, Any], edit: Any) -> Any:
    """The row with the fields of an edit, or the edit if that is no object."""
    return {**row, **edit} if isinstance(edit, dict) else edit


def bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind == "Bearer" else ""


def is_text(value: Any, chars_max: int = 255) -> bool:
    return isinstance(value, str) and 0 < len(value) <= chars_max


def is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content or b"{}", parse_constant=_no_constant)
    except ValueError:
        raise RestRefusal(400, "The body is no JSON", code="invalid_request") from None
    if not isinstance(body, dict):
        raise RestRefusal(400, "The body is no JSON object", code="invalid_request")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)

"""The handlers of the API: each answers requests of one kind from the running daemon.

Handlers return the responses of `spotd.api.schemas`, JSON-ready, and raise only `ApiRefusal` leaves for what they
expect. The iterators that `stream`, `verify`, `content` and `contents` return are stepped from one task after another
and closed when the reader goes: a generator behind them must not yield inside a task group or a cancel scope.

A job reference (`ref`) is an id, a name or a unique prefix of an id; `job_refs.resolve` is the one rule for it.
"""

from __future__ import annotations

from spotd.api.handlers.adoption import AdoptionHandlers
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.data import DataHandlers
from spotd.api.handlers.doctor import DoctorHandlers, NotificationHandlers
from spotd.api.handlers.files import CheckpointHandlers, FileHandlers
from spotd.api.handlers.health import HealthHandlers, HostHandlers
from spotd.api.handlers.jobs import JobHandlers
from spotd.api.handlers.logs import EventHandlers, LogHandlers
from spotd.api.handlers.ports import PortHandlers
from spotd.api.handlers.prices import ImportHandlers, PriceHandlers
from spotd.api.handlers.receipts import LedgerHandlers, ReceiptHandlers
from spotd.api.handlers.submissions import AmendmentHandlers, ArrayHandlers, SubmissionHandlers

__all__ = ["HandlerContext", "Handlers"]


class Handlers:
    """All handlers of one daemon, by kind."""

    def __init__(self, context: HandlerContext) -> None:
        self.context = context
        self.jobs = JobHandlers(context)
        self.arrays = ArrayHandlers(context, self.jobs)
        self.submissions = SubmissionHandlers(context, self.jobs)
        self.amendments = AmendmentHandlers(context, self.jobs)
        self.checkpoints = CheckpointHandlers(context)
        self.data = DataHandlers(context)
        self.files = FileHandlers(context)
        self.logs = LogHandlers(context)
        self.ports = PortHandlers(context)
        self.events = EventHandlers(context)
        self.receipts = ReceiptHandlers(context)
        self.ledger = LedgerHandlers(context)
        self.prices = PriceHandlers(context)
        self.imports = ImportHandlers(context)
        self.adoption = AdoptionHandlers(context)
        self.health = HealthHandlers(context)
        self.hosts = HostHandlers(context)
        self.notifications = NotificationHandlers(context)
        self.doctor = DoctorHandlers(context)

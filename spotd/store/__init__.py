"""The state database: the only place where rows exist. Everything that leaves it is a core value or a view."""

from spotd.store.engine import (
    StateError,
    StateUnavailable,
    StoreCorrupt,
    StoreInUse,
    StoreOtherSchema,
    StorePoint,
    StoreTooNew,
    StoreUnsupported,
)
from spotd.store.queries import Reads
from spotd.store.store import Folding, Store, Tx
from spotd.store.views import AttemptView, CostGroup, CostGrouping, EventView, JobView, MachineView, Totals

__all__ = [
    "AttemptView",
    "CostGroup",
    "CostGrouping",
    "EventView",
    "Folding",
    "JobView",
    "MachineView",
    "Reads",
    "StateError",
    "StateUnavailable",
    "Store",
    "StoreCorrupt",
    "StoreInUse",
    "StoreOtherSchema",
    "StorePoint",
    "StoreTooNew",
    "StoreUnsupported",
    "Totals",
    "Tx",
]

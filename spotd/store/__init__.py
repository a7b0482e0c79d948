"""The state database: the only place where rows exist. Everything that leaves it is a core value or a view."""

from spotd.store.encryption import EncryptedSecrets, NotDecrypted, SecretsKey, SecretsKeys
from spotd.store.engine import StorePoint
from spotd.store.moving import FORMER_PLACES, move_state
from spotd.store.place import (
    POSTGRES,
    Leader,
    LeadershipLost,
    StateError,
    StateUnavailable,
    StoreCorrupt,
    StoreInUse,
    StoreMoved,
    StoreOtherSchema,
    StoreTooNew,
    StoreUnsupported,
    parse_place,
)
from spotd.store.queries import Reads
from spotd.store.store import Folding, Store, Tx
from spotd.store.views import AttemptView, CostGroup, CostGrouping, EventView, JobView, MachineView, Totals

__all__ = [
    "FORMER_PLACES",
    "POSTGRES",
    "AttemptView",
    "CostGroup",
    "CostGrouping",
    "EncryptedSecrets",
    "EventView",
    "Folding",
    "JobView",
    "Leader",
    "LeadershipLost",
    "MachineView",
    "NotDecrypted",
    "Reads",
    "SecretsKey",
    "SecretsKeys",
    "StateError",
    "StateUnavailable",
    "Store",
    "StoreCorrupt",
    "StoreInUse",
    "StoreMoved",
    "StoreOtherSchema",
    "StorePoint",
    "StoreTooNew",
    "StoreUnsupported",
    "Totals",
    "Tx",
    "move_state",
    "parse_place",
]

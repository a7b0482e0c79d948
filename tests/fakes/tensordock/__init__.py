"""A TensorDock (API v2) on loopback, with virtual machines that run what cloud-init is given.

cloud = TensorDockCloud(root, clock=clock)
cloud.stock(*some_nodes())
with serving(Faults(TensorDockApi(cloud), classify=TensorDockApi.classify)) as served:
    settings = TensorDockSettings(base_url=served.url + TensorDockApi.base_path)     # cloud.token

Methods: `stock`, `sell_out`, `set_price`, `fail_next_boot`, `stop` (by nobody), `vanish`, `rename`, `add_foreign`;
`billed` and `spent_usd` are the bill. The knobs are those of `RestQuirks` and `TensorDockQuirks`. What the cloud holds
is in `rented`, `nodes` and `secrets`. The old platform (v0), and with it bids, is left out.
"""

from tests.fakes.tensordock.app import TensorDockApi
from tests.fakes.tensordock.cloud import (
    TensorDockCloud,
    TensorDockNode,
    TensorDockQuirks,
    TensorDockVm,
    some_nodes,
)

__all__ = ["TensorDockApi", "TensorDockCloud", "TensorDockNode", "TensorDockQuirks", "TensorDockVm", "some_nodes"]

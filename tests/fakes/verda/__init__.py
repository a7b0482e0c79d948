"""A Verda on loopback: instances, volumes, start scripts and tokens, with machines that run their scripts.

cloud = VerdaCloud(root, clock=clock)
cloud.stock(*some_types())
with serving(Faults(VerdaApi(cloud), classify=VerdaApi.classify)) as served:
    settings = VerdaSettings(base_url=served.url + VerdaApi.base_path)     # cloud.client_id, cloud.client_secret

Methods: `stock`, `sell_out`, `set_price`, `fail_next_boot`, `preempt`, `vanish`, `rename` (another status),
`add_foreign`, `break_auth`, `revoke_tokens`; `billed` and `spent_usd` are the bill, `balance` what is left of the
deposit. The knobs are those of `RestQuirks` and `VerdaQuirks`. What the cloud holds is in `rented`, `volumes`,
`scripts` and `types`.
"""

from tests.fakes.verda.app import VerdaApi
from tests.fakes.verda.cloud import VerdaCloud, VerdaInstance
from tests.fakes.verda.records import JUPYTER_TOKEN, VerdaQuirks, VerdaType, some_types

__all__ = ["JUPYTER_TOKEN", "VerdaApi", "VerdaCloud", "VerdaInstance", "VerdaQuirks", "VerdaType", "some_types"]

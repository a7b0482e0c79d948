"""A Prime Intellect on loopback: configurations of many clouds, pods that run a template's start command, a wallet.

cloud = PrimeCloud(root, clock=clock)
cloud.stock(*some_configurations())
with serving(Faults(PrimeApi(cloud), classify=PrimeApi.classify)) as served:
    settings = PrimeSettings(base_url=served.url + PrimeApi.base_path)     # cloud.api_key

A pod of `custom_template` runs the start command of `templates[customTemplateId]` with its `envVars`; any other pod
waits for a login: `run_there` is what arrives by SSH, and `ssh_address` says where each pod's SSH server is.

Methods: `stock`, `sell_out`, `set_price`, `rename_cloud_ids`, `fail_next_boot`, `preempt`, `vanish`, `rename`,
`add_foreign`; `billed` and `spent_usd` are the bill, `balance` what is left in the wallet. The knobs are those of
`RestQuirks` and `PrimeQuirks`. What the cloud holds is in `rented`, `configurations` and `templates`.
"""

from tests.fakes.primeintellect.app import PrimeApi
from tests.fakes.primeintellect.cloud import (
    JUPYTER_PASSWORD,
    PrimeCloud,
    PrimeConfiguration,
    PrimePod,
    PrimeQuirks,
    some_configurations,
)

__all__ = [
    "JUPYTER_PASSWORD",
    "PrimeApi",
    "PrimeCloud",
    "PrimeConfiguration",
    "PrimePod",
    "PrimeQuirks",
    "some_configurations",
]

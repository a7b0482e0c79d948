"""An OpenStack cloud on loopback: one project in two regions, with servers that run their user data.

cloud = OpenstackCloud(root, clock=clock)
cloud.stock(*some_flavors())
with serving(Faults(OpenstackApi(cloud), classify=OpenstackApi.classify)) as served:
    auth_url = served.url + "/identity/v3"     # cloud.credential_id and cloud.secret

Written from Nova's own sources and the services' API references, without any adapter. Methods: `stock`, `sell_out`,
`fail_next_boot`, `preempt`, `fail`, `lock_server`, `vanish`, `rename`, `add_foreign`, `add_image`,
`replace_image`, `add_network`, `add_volume`, `break_auth`, `revoke_tokens`; `billed` and `spent_usd` are the bill. The
knobs are those of `RestQuirks` and `OpenstackQuirks`; what the cloud holds is in `rented`, `volumes` and `images`.
"""

from tests.fakes.openstack.app import OpenstackApi
from tests.fakes.openstack.cloud import OpenstackCloud
from tests.fakes.openstack.compute import ADMIN_PASSWORD
from tests.fakes.openstack.records import REGIONS, OpenstackQuirks, refusal, some_flavors

__all__ = [
    "ADMIN_PASSWORD",
    "REGIONS",
    "OpenstackApi",
    "OpenstackCloud",
    "OpenstackQuirks",
    "refusal",
    "some_flavors",
]

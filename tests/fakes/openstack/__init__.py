"""An OpenStack cloud on loopback: Keystone, Nova, Glance, Neutron and Cinder, with servers that run their user data.

cloud = OpenstackCloud(root, clock=clock)
cloud.stock(*some_flavors())
with serving(Faults(OpenstackApi(cloud), classify=OpenstackApi.classify)) as served:
    settings = OpenstackSettings(base_url=served.url + "/v3")     # cloud.credential_id, cloud.secret

Methods: `stock`, `sell_out`, `preempt`, `vanish`, `rename` (another status), `fail`, `lock_server`, `add_foreign`,
`break_auth`, `revoke_tokens`. The knobs are those of `RestQuirks` and `OpenstackQuirks`. What the cloud holds is in
`rented`, `volumes`, `images`, `networks` and `flavors`.
"""

from tests.fakes.openstack.app import OpenstackApi
from tests.fakes.openstack.cloud import OpenstackCloud, OpenstackServer
from tests.fakes.openstack.records import ADMIN_PASSWORD, Flavor, OpenstackQuirks, refusal, some_flavors

__all__ = [
    "ADMIN_PASSWORD",
    "Flavor",
    "OpenstackApi",
    "OpenstackCloud",
    "OpenstackQuirks",
    "OpenstackServer",
    "refusal",
    "some_flavors",
]

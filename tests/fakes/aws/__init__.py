"""An EC2 on loopback: the Query protocol, a spot market per zone, interruptions, and instances that are processes.

cloud = Ec2Cloud(root, clock=clock)
cloud.stock_usual()
with serving(Ec2Api(cloud)) as served:
    settings = AwsSettings(endpoint_url=served.url, container="none")

Every answer is made to be parsed by botocore's own models. One endpoint serves all regions, as the region is part of
the signature; STS, SSM and Service Quotas answer at the same place.
"""

from tests.fakes.aws.app import Ec2Api, classify
from tests.fakes.aws.catalog import KINDS, PLAIN_KIND, ZONES, Kind, Zone
from tests.fakes.aws.cloud import ACCESS_KEY, Ec2Cloud
from tests.fakes.aws.quirks import Quirks
from tests.fakes.aws.records import FakeInstance, Phase
from tests.fakes.ticking import ticking

__all__ = [
    "ACCESS_KEY",
    "KINDS",
    "PLAIN_KIND",
    "ZONES",
    "Ec2Api",
    "Ec2Cloud",
    "FakeInstance",
    "Kind",
    "Phase",
    "Quirks",
    "Zone",
    "classify",
    "ticking",
]

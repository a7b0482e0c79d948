"""A vast.ai on loopback: its HTTP API, its bid market and its oddities, with hosts that are processes of this computer.

cloud = VastCloud(root, clock=clock)
cloud.stock(*some_asks())
with serving(VastApi(cloud)) as served:
    settings = VastSettings(base_url=served.url)
"""

from tests.fakes.ticking import ticking
from tests.fakes.vastai.app import VastApi, classify
from tests.fakes.vastai.asks import Ask, some_asks
from tests.fakes.vastai.cloud import ACCOUNT_KEY, VastCloud
from tests.fakes.vastai.contracts import Contract, Failure, Phase
from tests.fakes.vastai.quirks import Quirks

__all__ = [
    "ACCOUNT_KEY",
    "Ask",
    "Contract",
    "Failure",
    "Phase",
    "Quirks",
    "VastApi",
    "VastCloud",
    "classify",
    "some_asks",
    "ticking",
]

"""A RunPod on loopback: REST v2 and its oddities, with pods that are processes of this computer.

cloud = RunpodCloud(root, clock=clock)
cloud.stock(*some_gpus())
with serving(RunpodApi(cloud)) as served:
    settings = RunpodSettings(base_url=served.url)
"""

from tests.fakes.runpod.app import RunpodApi, classify
from tests.fakes.runpod.cloud import ACCOUNT_KEY, RunpodCloud
from tests.fakes.runpod.gpus import Gpu, some_gpus
from tests.fakes.runpod.pods import Failure, Phase, Pod
from tests.fakes.runpod.quirks import Quirks
from tests.fakes.ticking import ticking

__all__ = [
    "ACCOUNT_KEY",
    "Failure",
    "Gpu",
    "Phase",
    "Pod",
    "Quirks",
    "RunpodApi",
    "RunpodCloud",
    "classify",
    "some_gpus",
    "ticking",
]

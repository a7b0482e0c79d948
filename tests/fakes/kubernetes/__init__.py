"""A Kubernetes cluster on loopback: the part of its API that a place to run needs, with pods that run as processes.

    cloud = KubeCloud(root, clock=clock)
    cloud.add_node("n1", gpus=8)
    faults = Faults(KubeApi(cloud), classify=classify)

The Job controller, the scheduler, the kubelets and the garbage collector are played, each at the next request after it
is due; what they do was compared with a real control plane (tests/system/test_kubernetes.py). Knobs: `add_node`,
`node.alive`, `remove_node`, `evict`, `suspend`, `take_place` (a pod of higher priority), `add_second_pod`,
`fail_next_pod` and the fields of `quirks`.
"""

from tests.fakes.kubernetes.app import KubeApi, classify
from tests.fakes.kubernetes.cloud import ADMIN, KubeCloud, KubeQuirks, PodFailure
from tests.fakes.kubernetes.objects import Refused

__all__ = ["ADMIN", "KubeApi", "KubeCloud", "KubeQuirks", "PodFailure", "Refused", "classify"]

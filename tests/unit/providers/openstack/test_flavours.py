"""Which GPUs a flavour of an OpenStack cloud has, and how many: what is not known is not offered."""

from __future__ import annotations

from typing import Any

from spotd_providers.openstack.wire import OpenstackFlavor, flavors_of, gpus_of
from tests.cases import every

MANY, WHICH, SHARE, KINDS = "how many GPUs", "which GPUs", "a share of a GPU", "several kinds"
X = {"gpu": "H100_PCIE"}


@every(
    ("name", "alias", "said", "expected"),
    [
        ("g.1", "l40s:4", {}, ("L40S", 4)),
        ("g.1", "h100:2,nic:1", {}, ("H100", 2)),
        ("g.1", "nic:1, l40s:2", {}, ("L40S", 2)),
        ("g.1", "nic:1", {}, WHICH),
        ("g.1", "nic:1,nvme:4", {"gpus": 4}, WHICH),
        ("g.1", "l40s:0", {}, WHICH),
        ("g.1", "l40s", {}, WHICH),
        ("g.1", "l40s:2,t4:1", {}, KINDS),
        ("g.1", "l40s:2,nic", {}, WHICH),
        ("g.1", None, X, MANY),
        ("g.1", "nic:8", X, MANY),
        ("g.1", "l40s:2,t4:1", X, MANY),
        ("g.1", "gpu-x:8", {**X, "gpus": 8}, ("H100_PCIE", 8)),
        ("g.1", "h100:2,nic:1", X, ("H100_PCIE", 2)),
        ("g.1", "h100:2,nic:1", {**X, "gpus": 1}, ("H100_PCIE", 1)),
        ("h100-760", None, X, ("H100_PCIE", 2)),
        ("h100-760", None, {"gpus": 1}, WHICH),
        ("l4-180", "nic:1", {}, ("L4", 2)),
        ("l4-100", None, {}, WHICH),
        ("g.1", "nic:1", {"gpus": 0}, ("CPU", 0)),
    ],
)
def test_gpus_are_counted_or_the_flavour_is_not_offered(
    name: str, alias: str | None, said: dict[str, Any], expected: Any
) -> None:
    specs = {} if alias is None else {"pci_passthrough:alias": alias}
    (row,) = flavors_of([{"id": "f-1", "name": name, "disk": 10, "extra_specs": specs}]).rows
    found = gpus_of(row, OpenstackFlavor(name=name, price=1, **said))
    assert expected in found if isinstance(expected, str) else found == expected, found


@every("spec", ["resources:VGPU", "resources1:VGPU", "resources_GPU:CUSTOM_GPU_A100"])
def test_a_share_of_a_gpu_is_not_counted_as_a_whole_one(spec: str) -> None:
    specs = {spec: "1", "pci_passthrough:alias": "l40s:1"}
    (row,) = flavors_of([{"id": "f-1", "name": "g.1", "disk": 10, "extra_specs": specs}]).rows
    assert SHARE in gpus_of(row, OpenstackFlavor(name="g.1", price=1))

"""What machines of the fake need to reach each other: security groups, placement groups and network interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fakes.aws.catalog import Kind
from tests.fakes.aws.wire import Params, Refusal

EVERYWHERE = {"ipProtocol": "-1", "ipRanges": [{"cidrIp": "0.0.0.0/0"}]}


def from_group(group: str, *, protocol: str = "-1") -> dict[str, Any]:
    """A rule for all that comes from machines in this group, or goes to them."""
    return {"ipProtocol": protocol, "groups": [{"groupId": group, "userId": "123456789012"}]}


class Networks:
    """The account's own groups.

    Attributes:
        rules: by security group, its inbound and outbound rules; the default group of a VPC has those that AWS makes.
        placement_groups: by region and name.
    """

    def __init__(self) -> None:
        self.rules: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
        self.placement_groups: dict[tuple[str, str], dict[str, Any]] = {}

    def security_groups(self, vpcs: Sequence[str]) -> list[dict[str, Any]]:
        """The default group of each VPC, and in the first one those of `rules` that are none's default."""
        names = {default_group(vpc): vpc for vpc in vpcs}
        for group in self.rules:
            if vpcs and not group.startswith("sg-0default"):
                names.setdefault(group, vpcs[0])
        return [self._row(group, vpc) for group, vpc in names.items()]

    def _row(self, group: str, vpc: str) -> dict[str, Any]:
        inbound, outbound = self.rules.get(group, ([from_group(group)], [EVERYWHERE]))
        return {
            "groupId": group,
            "groupName": "default" if group == default_group(vpc) else group,
            "vpcId": vpc,
            "ipPermissions": inbound,
            "ipPermissionsEgress": outbound,
        }

    def subnet_of(self, kind: Kind, params: Params) -> str:
        """The subnet that a launch names, for the machine or for its interfaces.

        Raises:
            Refusal: the interfaces are none that EC2 makes.
        """
        if not params.get("NetworkInterface.1.DeviceIndex"):
            return params.get("SubnetId")
        if params.get("SubnetId") or params.many("SecurityGroupId"):
            text = "Network interfaces and an instance-level subnet ID or security groups may not be specified together"
            raise Refusal("InvalidParameterCombination", text)
        number = 1
        while params.get(f"NetworkInterface.{number}.DeviceIndex"):
            number += 1
        names = [f"NetworkInterface.{one}" for one in range(1, number)]
        if len(names) > 1 and any(params.get(f"{name}.AssociatePublicIpAddress") == "true" for name in names):
            text = "The associatePublicIPAddress parameter cannot be specified when launching with multiple interfaces"
            raise Refusal("InvalidParameterCombination", text)
        if sum(params.get(f"{name}.InterfaceType") == "efa" for name in names) > kind.efa:
            raise Refusal("AttachmentLimitExceeded", f"Interface count {len(names)} exceeds the limit for {kind.name}")
        cards = [int(params.get(f"{name}.NetworkCardIndex") or 0) for name in names]
        if cards != list(range(len(names))):
            raise Refusal("InvalidParameterValue", "each network card takes one EFA interface")
        return params.get("NetworkInterface.1.SubnetId")


def default_group(vpc: str) -> str:
    return f"sg-0default{vpc.removeprefix('vpc-0')}"

"""Whether machines in a subnet reach each other, and by which interfaces: what security groups allow. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Final

from spotd_providers.aws.wire import RuleRow, SecurityGroupRow, SubnetRow

_PORTS_MAX: Final = 65_535
_ALL: Final = "-1"
_TCP: Final = frozenset({"tcp", "6"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """One subnet as machines that are to reach each other find it.

    Attributes:
        groups: ids of the security groups of machines there.
        fault: why they do not reach each other there; empty where they do.
        takes_efa: the groups allow all traffic among themselves both ways, as EFA demands.
        is_public: machines there reach the store by a public address, which EC2 gives to no more than one interface.
    """

    groups: tuple[str, ...]
    fault: str
    takes_efa: bool
    is_public: bool


def ground_of(subnet: SubnetRow, groups: Sequence[SecurityGroupRow]) -> Ground:
    """Judge a subnet by the rules of those of the groups that are of its VPC."""
    own = [row for row in groups if row.VpcId == subnet.VpcId]
    ids = tuple(row.GroupId for row in own)
    inbound = [rule for row in own for rule in row.IpPermissions]
    outbound = [rule for row in own for rule in row.IpPermissionsEgress]
    names = ", ".join(ids) or "of machines there"
    fault = ""
    for rules, way in ((inbound, "from"), (outbound, "to")):
        if not fault and not any(_is_open(rule, ids, subnet.CidrBlock) for rule in rules):
            fault = (
                f"machines in {subnet.AvailabilityZone} do not reach each other: no rule of the security group {names}"
                f" allows all traffic {way} itself"
            )
    return Ground(
        groups=ids,
        fault=fault,
        takes_efa=not fault and all(any(_names_itself(rule, ids) for rule in rules) for rules in (inbound, outbound)),
        is_public=subnet.MapPublicIpOnLaunch is not False,
    )


def _names_itself(rule: RuleRow, ids: Collection[str]) -> bool:
    return rule.IpProtocol == _ALL and any(pair.GroupId in ids for pair in rule.UserIdGroupPairs)


def _is_open(rule: RuleRow, ids: Collection[str], cidr: str | None) -> bool:
    """Whether the rule allows every port of TCP between the machines of the subnet."""
    ports = (rule.FromPort or 0) <= 1 and (rule.ToPort or 0) >= _PORTS_MAX
    if rule.IpProtocol != _ALL and not (rule.IpProtocol in _TCP and ports):
        return False
    if any(pair.GroupId in ids for pair in rule.UserIdGroupPairs):
        return True
    return any(_holds(row.CidrIp, cidr or "0.0.0.0/0") for row in rule.IpRanges)


def _holds(outer: str, inner: str) -> bool:
    try:
        wide, narrow = ip_network(outer), ip_network(inner)
    except ValueError:
        return False
    return wide.version == narrow.version and wide.supernet_of(narrow)  # type: ignore[arg-type]  # of one version


def interfaces(subnet: str, ground: Ground, efa_max: int) -> list[dict[str, Any]]:
    """Return the EFA interfaces of a machine: one a network card, or the first alone where that has the public address.

    None where the type has no EFA, or the security groups do not let it work.
    """
    if not ground.takes_efa:
        return []
    count = min(1, efa_max) if ground.is_public else efa_max
    return [
        {
            "DeviceIndex": min(1, card),
            "NetworkCardIndex": card,
            "InterfaceType": "efa",
            "SubnetId": subnet,
            "Groups": list(ground.groups),
            "DeleteOnTermination": True,
            **({"AssociatePublicIpAddress": True} if ground.is_public else {}),
        }
        for card in range(count)
    ]


def fault_of(grounds: Iterable[Ground]) -> str:
    """Return why machines reach each other in none of these subnets; empty where they do in one, or none is known."""
    faults = [one.fault for one in grounds]
    return "" if not faults or "" in faults else faults[0]

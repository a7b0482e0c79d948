"""The meaning of AWS's error codes: one table, used for reads and for launches.

AWS distinguishes capacity, quota, price, key and request by code; the HTTP status says little (no capacity is a 500).
What no table knows is judged by the status: a server's error in a launch is an unknown outcome, in a read a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Final

from spotd_providers.aws.quotas import family_quota, region_quota
from spotd_providers.aws.sdk import AwsRefused
from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import LaunchRequest
from spotd_providers.kit.http import AnswerLost

NO_CAPACITY: Final = frozenset(
    {
        "InsufficientInstanceCapacity",
        "UnfulfillableCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacityOnHost",
        "ReservationCapacityExceeded",
    }
)
PRICE_MOVED: Final = frozenset({"SpotMaxPriceTooLow"})
SUBNET_FULL: Final = "InsufficientFreeAddressesInSubnet"
FULL_FOR: Final = timedelta(minutes=5)
"""How long a full subnet is left alone; addresses come back as machines end."""
NOT_SOLD_FOR: Final = timedelta(days=1)
"""Which types a zone has changes every few months."""
NOT_IN_ZONE: Final = frozenset({"Unsupported", "InvalidInstanceType", "UnsupportedOperation"})
FAMILY_QUOTA: Final = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded"})
REGION_QUOTA: Final = frozenset(
    {"VolumeLimitExceeded", "MaxIOPSLimitExceeded", "AddressLimitExceeded", "MaxFleetCountExceeded"}
)
QUOTA: Final = FAMILY_QUOTA | REGION_QUOTA
RATE: Final = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "429",
    }
)
UNKNOWN: Final = frozenset(
    {
        "InternalError",
        "InternalFailure",
        "Unavailable",
        "ServiceUnavailable",
        "ServerInternal",
        "IdempotentParameterMismatch",
    }
)
AUTH: Final = frozenset(
    {
        "UnauthorizedOperation",
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "IncompleteSignature",
        "MissingAuthenticationToken",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "OptInRequired",
        "Blocked",
        "401",
        "403",
    }
)
VERIFYING: Final = "PendingVerification"
NO_SPOT_ROLE: Final = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
ROLE_HINT: Final = (
    "let an administrator run once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
)
BACK_OFF: Final = timedelta(seconds=5)
_FIELDS: Final = {
    "InvalidAMIID": "ami",
    "InvalidSubnetID": "subnets",
    "InvalidSubnet": "subnets",
    "InvalidGroup": "security_groups",
    "InvalidGroupId": "security_groups",
    "InvalidUserData": "start_script",
    "InvalidBlockDeviceMapping": "disk_gb",
}


@contextmanager
def contract_errors(what: str, rng: Random, *, unless: str = "") -> Iterator[list[AwsRefused]]:
    """Translate the failure of a call that may be repeated. A refusal with the code `unless` is only recorded.

    Raises:
        AuthFailed, RateLimited, Unavailable: the call failed.
    """
    refused: list[AwsRefused] = []
    try:
        yield refused
    except AwsRefused as exc:
        if exc.code != unless:
            raise (_common(exc, what, rng) or Unavailable(f"{what}: {exc}")) from None
        refused.append(exc)
    except AnswerLost as exc:
        raise Unavailable(str(exc)) from None


def launch_failure(refused: AwsRefused, request: LaunchRequest, *, rng: Random) -> ProviderError:
    """Translate a refused launch into an error of the contract; nothing was bought unless it is `OutcomeUnknown`."""
    pool, code = request.offer.pool, refused.code
    if code == SUBNET_FULL:
        return OfferGone(f"the subnet for {pool} has no free address", lasts=FULL_FOR)
    if code in NO_CAPACITY:
        return NoCapacity(f"AWS has no capacity for {pool} now: {code}")
    if code in PRICE_MOVED:
        return PriceMoved(f"the spot price of {pool} is above what was agreed")
    if code in NOT_IN_ZONE or "not supported in your requested" in refused.detail:
        return OfferGone(f"AWS does not sell {pool}: {refused}", lasts=NOT_SOLD_FOR)
    if code in QUOTA:
        region = request.offer.region
        quota = region_quota(region)
        if code in FAMILY_QUOTA:
            quota = family_quota(str(pool).partition(":")[0], region, request.offer.market)
        return QuotaExceeded(f"the account's quota {quota} is used up ({code}); see spotctl doctor", quota=quota)
    common = _common(refused, f"launching {pool}", rng)
    if common is not None:
        return common
    if code in UNKNOWN or refused.status >= 500:
        return OutcomeUnknown(f"AWS answered {code} to the launch of {pool}", key=request.key)
    field = _FIELDS.get(code.partition(".")[0], "start_script" if "User data" in refused.detail else "request")
    return RequestRejected(f"AWS refused the launch of {pool}: {refused}", field=field, reason=code)


def _common(refused: AwsRefused, what: str, rng: Random) -> ProviderError | None:
    if refused.code in RATE or refused.status == 429:
        wait = refused.retry_after or BACK_OFF
        return RateLimited(f"AWS is asked too often ({what})", retry_after=wait + timedelta(seconds=rng.random()))
    if refused.code == NO_SPOT_ROLE:
        return AuthFailed(f"the account has no service-linked role for spot yet; {ROLE_HINT}")
    if refused.code in AUTH or refused.status == 401:
        return AuthFailed(f"AWS does not allow {what}: {refused}")
    if refused.code == VERIFYING:
        return Unavailable(f"AWS still verifies this account: {refused.detail}")
    return None

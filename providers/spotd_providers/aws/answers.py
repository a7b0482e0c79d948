"""The meaning of AWS's error codes: one table, used for reads and for launches.

AWS distinguishes capacity, quota, price, key and request by code; the HTTP status says little (no capacity is a 500).
What no table knows is judged by the status: a server's error in a launch is an unknown outcome, in a read a failure.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from random import Random
from typing import Final, Generic, TypeVar

import anyio

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
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import LaunchRequest, Market, QuotaId
from spotd_providers.kit.http import AnswerLost

# The account's limits: vCPUs of a family of types in a region, on spot and on-demand apart.
#
# A new account has none for GPUs. A limit that is used up is no lack of capacity: every other type of its family is
# refused in that region too, in every zone, while other families, regions and the other market are not touched by it.


SPOT_QUOTAS: Final[Mapping[str, str]] = {"G": "L-3819A6DF", "P2-P4": "L-7212CCBC", "P5": "L-C4BD4855"}
ON_DEMAND_QUOTAS: Final[Mapping[str, str]] = {"G": "L-DB2E81BA", "P": "L-417A185B"}
"""What Service Quotas calls them. AWS's pages do not agree on which spot quota P6 counts against."""
_NAME: Final = re.compile(r"([a-z]+)([0-9]*)")


def family_of(instance_type: str, market: Market) -> str:
    """Return the quota family whose vCPUs this type takes; types without GPUs keep their own letters."""
    found = _NAME.match(instance_type)
    letters, generation = (found[1], found[2]) if found is not None else (instance_type, "")
    if letters in {"g", "gr", "vt"}:
        return "G"
    if letters != "p":
        return letters.upper()
    if market is Market.ON_DEMAND:
        return "P"
    return "P2-P4" if generation in {"2", "3", "4"} else f"P{generation}"


def family_quota(instance_type: str, region: str, market: Market) -> QuotaId:
    """Return the vCPU quota that a launch of this type counts against."""
    return QuotaId(f"{region} {market.value} {family_of(instance_type, market)} vCPUs")


def region_quota(region: str) -> QuotaId:
    """Return the quota of volumes, their operations and addresses, which every launch in the region counts against."""
    return QuotaId(f"{region} volumes and addresses")


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
NO_GROUP: Final = "InvalidPlacementGroup.Unknown"
"""The placement group is not known there yet, or was deleted a moment ago: the next launch asks for it again."""
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
    if code == NO_GROUP:
        return OfferGone(f"AWS does not know the placement group for {pool} yet", lasts=BACK_OFF)
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


# Answers that improve offers without being needed for them: read seldom, waited for briefly, kept long.
#
# An absent permission is no failure of the market: it is remembered with AWS's sentence, and asked about again
# after a while, since somebody may grant it.


PATIENCE_S: Final = 15.0
"""A poll waits no longer for this; the next one asks again."""
RETRY_AFTER: Final = timedelta(minutes=10)
REFUSED_FOR: Final = timedelta(hours=1)
T = TypeVar("T")


class Optional(Generic[T]):
    """The newest answer to one question, and why there is none.

    Attributes:
        last_error: the sentence of the last failure, empty after a success.
        is_refused: whether that failure is a permission that is absent.
    """

    def __init__(
        self, services: Services, ask: Callable[[], Awaitable[T]], *, without: T, fresh: timedelta, kept: timedelta
    ) -> None:
        self._clock = services.clock
        self._ask = ask
        self._without = without
        self._fresh = fresh
        self._kept = kept
        self._due: datetime | None = None
        self._known: tuple[datetime, T] | None = None
        self.last_error = ""
        self.is_refused = False

    def known(self) -> T:
        """Return the newest answer unless it is too old."""
        if self._known is None or self._clock.now() - self._known[0] >= self._kept:
            return self._without
        return self._known[1]

    async def get(self) -> T:
        """Return the newest answer, read again if it is due; a failure is recorded, not raised."""
        if self._due is None or self._clock.now() >= self._due:
            await self._renew()
        return self.known()

    async def ask_now(self) -> T:
        """Read the answer now.

        Raises:
            ProviderError: there is none.
        """
        answer = await self._ask()
        self._record_answer(answer)
        return answer

    async def _renew(self) -> None:
        try:
            with anyio.fail_after(PATIENCE_S):
                answer = await self._ask()
        except AuthFailed as exc:
            self._record_failure(str(exc), refused=True, again_in=REFUSED_FOR)
        except ProviderError as exc:
            self._record_failure(str(exc), refused=False, again_in=RETRY_AFTER)
        except TimeoutError:
            self._record_failure(f"AWS did not answer within {PATIENCE_S:.0f} s", refused=False, again_in=RETRY_AFTER)
        else:
            self._record_answer(answer)

    def _record_answer(self, answer: T) -> None:
        now = self._clock.now()
        self._known, self._due = (now, answer), now + self._fresh
        self.last_error, self.is_refused = "", False

    def _record_failure(self, sentence: str, *, refused: bool, again_in: timedelta) -> None:
        self._due = self._clock.now() + again_in
        self.last_error, self.is_refused = sentence, refused

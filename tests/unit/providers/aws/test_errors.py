"""Every error code of AWS that a launch or a question meets, and what the daemon may do next."""

from __future__ import annotations

from random import Random

import pytest

from spotd_providers.aws.answers import contract_errors, launch_failure
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
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    Interruption,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from tests.cases import every

REQUEST = LaunchRequest(
    key=AttemptKey("spotd-lab-j0b-1"),
    install=InstallId("lab"),
    offer=Offer(
        provider=ProviderName("aws"),
        offer_id=OfferId("g5.xlarge:us-east-1a:spot"),
        pool=PoolId("g5.xlarge:us-east-1a"),
        market=Market.SPOT,
        interruption=Interruption.NOTICE,
        gpu="A10G",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(412_300),
        region="us-east-1",
    ),
    price_max=MicroUsdPerHour(500_000),
    image="image",
    disk_gb=20,
    start_script="true",
)

LAUNCH: list[tuple[str, int, type[ProviderError]]] = [
    ("InsufficientInstanceCapacity", 500, NoCapacity),
    ("UnfulfillableCapacity", 400, NoCapacity),
    ("InsufficientHostCapacity", 500, NoCapacity),
    ("InsufficientCapacityOnHost", 400, NoCapacity),
    ("InsufficientFreeAddressesInSubnet", 400, OfferGone),
    ("SpotMaxPriceTooLow", 400, PriceMoved),
    ("Unsupported", 400, OfferGone),
    ("InvalidInstanceType", 400, OfferGone),
    ("MaxSpotInstanceCountExceeded", 400, QuotaExceeded),
    ("VcpuLimitExceeded", 400, QuotaExceeded),
    ("InstanceLimitExceeded", 400, QuotaExceeded),
    ("VolumeLimitExceeded", 400, QuotaExceeded),
    ("MaxIOPSLimitExceeded", 400, QuotaExceeded),
    ("AddressLimitExceeded", 400, QuotaExceeded),
    ("RequestLimitExceeded", 503, RateLimited),
    ("Throttling", 400, RateLimited),
    ("ThrottlingException", 400, RateLimited),
    ("InternalError", 500, OutcomeUnknown),
    ("InternalFailure", 500, OutcomeUnknown),
    ("Unavailable", 503, OutcomeUnknown),
    ("ServiceUnavailable", 503, OutcomeUnknown),
    ("ServerInternal", 500, OutcomeUnknown),
    ("NobodyHasSeenThis", 500, OutcomeUnknown),
    ("502", 502, OutcomeUnknown),
    ("IdempotentParameterMismatch", 400, OutcomeUnknown),
    ("UnauthorizedOperation", 403, AuthFailed),
    ("AccessDenied", 403, AuthFailed),
    ("AuthFailure", 401, AuthFailed),
    ("InvalidClientTokenId", 403, AuthFailed),
    ("SignatureDoesNotMatch", 403, AuthFailed),
    ("ExpiredToken", 400, AuthFailed),
    ("RequestExpired", 400, AuthFailed),
    ("OptInRequired", 401, AuthFailed),
    ("Blocked", 400, AuthFailed),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, AuthFailed),
    ("PendingVerification", 400, Unavailable),
    ("InvalidAMIID.NotFound", 400, RequestRejected),
    ("InvalidAMIID.Malformed", 400, RequestRejected),
    ("InvalidParameterValue", 400, RequestRejected),
    ("InvalidSubnetID.NotFound", 400, RequestRejected),
    ("InvalidGroup.NotFound", 400, RequestRejected),
    ("InvalidKeyPair.NotFound", 400, RequestRejected),
    ("InvalidUserData.Malformed", 400, RequestRejected),
    ("InvalidParameterCombination", 400, RequestRejected),
    ("InvalidBlockDeviceMapping", 400, RequestRejected),
    ("NobodyHasSeenThis", 400, RequestRejected),
]


@every(("code", "status", "leaf"), LAUNCH, ids=[f"{code}-{status}" for code, status, _ in LAUNCH])
def test_a_refused_launch_is_the_leaf_that_says_what_to_do_next(
    code: str, status: int, leaf: type[ProviderError]
) -> None:
    refused = AwsRefused(code=code, status=status, detail="in AWS's words")
    found = launch_failure(refused, REQUEST, rng=Random(1))
    assert type(found) is leaf
    if isinstance(found, OutcomeUnknown):
        assert found.key == REQUEST.key
    if isinstance(found, RequestRejected):
        assert found.field
        assert found.reason == code


def test_a_type_that_a_zone_lacks_is_told_by_the_sentence_too() -> None:
    detail = "Your requested instance type is not supported in your requested Availability Zone"
    refused = AwsRefused(code="InvalidParameterValue", status=400, detail=detail)
    assert type(launch_failure(refused, REQUEST, rng=Random(1))) is OfferGone


@every(
    ("code", "field"),
    [
        ("InvalidAMIID.NotFound", "ami"),
        ("InvalidSubnetID.NotFound", "subnets"),
        ("InvalidGroup.NotFound", "security_groups"),
        ("InvalidUserData.Malformed", "start_script"),
        ("InvalidBlockDeviceMapping", "disk_gb"),
    ],
)
def test_a_wrong_setting_is_named(code: str, field: str) -> None:
    found = launch_failure(AwsRefused(code=code, status=400, detail=""), REQUEST, rng=Random(1))
    assert isinstance(found, RequestRejected)
    assert found.field == field


@every(("code", "status", "leaf"), LAUNCH, ids=[f"{code}-{status}" for code, status, _ in LAUNCH])
def test_a_refused_question_changes_nothing_and_is_asked_again_or_told(
    code: str, status: int, leaf: type[ProviderError]
) -> None:
    with pytest.raises(ProviderError) as found, contract_errors("describe_instances", Random(1)):
        raise AwsRefused(code=code, status=status, detail="")
    assert found.type is (leaf if leaf in (RateLimited, AuthFailed) else Unavailable)

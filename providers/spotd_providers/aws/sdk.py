"""AWS's own client: made late, run in threads, its exceptions turned into three outcomes.

An answer, a definite `AwsRefused`, or `AnswerLost`, where the request may have had its effect. The client never
retries: `InsufficientInstanceCapacity` comes as a server error, and its own retries would ask three times for a
machine.

Nothing is chained to AWS's exceptions: an unreadable answer is quoted in them whole, and may repeat what was sent.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints, field_validator

from spotd_providers.contract.errors import AuthFailed, RequestRejected, Unavailable
from spotd_providers.kit.boundary import AdapterSettings, install_command, safe_base_url
from spotd_providers.kit.calls import BlockingCalls
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.text import quote_safely

# The settings under `[providers.aws]`: the regions, what to boot, and how the job's image is run.


IMDS: Final = "http://169.254.169.254"
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}")
Region = Annotated[str, StringConstraints(max_length=32)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9/._*:-]+$")]


class AwsSettings(AdapterSettings):
    """Regions, types and the way a machine is booted. Keys come from `api_key` or from AWS's usual places."""

    regions: tuple[Region, ...] = Field(
        default=("us-east-1",), min_length=1, max_length=32, description="Regions to buy in and to watch."
    )
    instance_types: tuple[Name, ...] = Field(
        default=("g*", "p*"), min_length=1, max_length=100, description='Types to consider, with wildcards: "g5.*".'
    )
    cpu_types: tuple[Name, ...] = Field(
        default=(), max_length=100, description='Types without a GPU, for jobs that ask for none: "m7i.2xlarge".'
    )
    container: Literal["docker", "none"] = Field(
        default="docker",
        description='"docker" runs the job\'s image with the GPUs; "none" runs the job on the machine image itself.',
    )
    ami: dict[Region, Name] = Field(
        default_factory=dict, description='Machine image per region, say {"us-east-1" = "ami-..."}.'
    )
    ami_parameters: tuple[Name, ...] = Field(
        default=(
            "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-ubuntu-22.04/latest/ami-id",
        ),
        description="SSM parameters naming an image with docker and NVIDIA's driver; the first that exists.",
    )
    subnets: tuple[Name, ...] = Field(
        default=(), max_length=64, description="Subnets to launch in; empty for the default one of each zone."
    )
    security_groups: tuple[Name, ...] = Field(
        default=(), max_length=5, description="Security groups of the machines; empty for the VPC's default."
    )
    max_price: Literal["ceiling", "none"] = Field(
        default="ceiling",
        description=(
            '"ceiling": AWS ends a spot machine whose price passes your ceiling; "none": AWS caps its price at'
            " on-demand only, and spotd stops it in order when it passes your ceiling."
        ),
    )
    volume_mb_per_s: int = Field(
        default=250, ge=125, le=2000, description="Throughput of the disk; loading an image is what it limits."
    )
    on_demand_usd: dict[Region, dict[Name, float]] = Field(
        default_factory=dict,
        description="Your own on-demand prices per region and type, $/h; they win over AWS's list.",
    )
    egress_usd_per_gb: float = Field(
        default=0.09,
        ge=0,
        lt=10,
        allow_inf_nan=False,
        description="Price of traffic out of a machine; 0 if the checkpoint store is S3 in the same region.",
    )
    spot_advisor: str = Field(
        default="",
        max_length=4096,
        description="A saved copy of AWS's spot-advisor-data.json; decides between offers at the same price.",
    )
    profile: str = Field(
        default="", max_length=128, description="Profile of AWS's own config files, if api_key is unset."
    )
    endpoint_url: str = Field(default="", description="Where every AWS call goes instead, for tests.")

    @property
    def types(self) -> tuple[str, ...]:
        """All types to consider, with wildcards."""
        return (*self.instance_types, *self.cpu_types)

    @field_validator("regions")
    @classmethod
    def _are_regions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for region in value:
            if _REGION.fullmatch(region) is None:
                raise ValueError(f'{region!r} is no region; write it like "us-east-1"')
        return tuple(dict.fromkeys(value))

    @field_validator("on_demand_usd")
    @classmethod
    def _are_prices(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if any(not 0 < usd < 10_000 for prices in value.values() for usd in prices.values()):
            raise ValueError("a price is above 0 and below 10000 dollars per hour")
        return value

    @field_validator("endpoint_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example="http://127.0.0.1:5555") if value else ""


CONNECT_TIMEOUT_S: Final = 10
READ_TIMEOUT_S: Final = 45
CALL_TIMEOUT_S: Final = 60.0
AT_ONCE: Final = 16


class AwsRefused(Exception):
    """A definite answer that is no success; what it means depends on what was asked.

    Attributes:
        code: AWS's error code.
        detail: its sentence, clean enough to show.
    """

    def __init__(self, *, code: str, status: int, detail: str, retry_after: timedelta | None = None) -> None:
        super().__init__(f"AWS answered {code}: {detail}" if detail else f"AWS answered {code}")
        self.code = code
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


class Sdk:
    """Calls to AWS, each in a thread, with a deadline."""

    def __init__(self, settings: AwsSettings, credential: str | None) -> None:
        """Open a session; clients are made when they are needed.

        Raises:
            AuthFailed: the client is not installed, or the key is not of the right form.
        """
        self._settings = settings
        self._threads = BlockingCalls(AT_ONCE)
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}
        self._session = _session(settings, credential)
        self.requests_sent = 0

    async def call(self, service: str, region: str, operation: str, **params: Any) -> Mapping[str, Any]:
        """Call AWS in a thread.

        Raises:
            Refused: AWS said no.
            AnswerLost: the request left, and what came back proves nothing.
            AuthFailed, RequestRejected, Unavailable: it never left.
        """
        self.requests_sent += 1
        try:
            return await self._threads.run(
                partial(self._invoke, service, region, operation, params), timeout_s=CALL_TIMEOUT_S
            )
        except TimeoutError:
            raise AnswerLost(f"AWS did not answer {operation} within {CALL_TIMEOUT_S:.0f} s") from None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _invoke(self, service: str, region: str, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        from botocore import exceptions as failures
        from botocore.parsers import ResponseParserError

        try:
            answer: Mapping[str, Any] = getattr(self._client(service, region), operation)(**params)
            return answer
        except failures.ClientError as exc:
            raise _refused(exc.response) from None
        except (failures.EndpointConnectionError, failures.ConnectTimeoutError, failures.ProxyConnectionError):
            raise Unavailable(f"AWS cannot be reached ({service}, {region})") from None
        except (
            failures.NoCredentialsError,
            failures.PartialCredentialsError,
            failures.CredentialRetrievalError,
            failures.UnauthorizedSSOTokenError,
            failures.TokenRetrievalError,
        ) as exc:
            raise AuthFailed(f"no AWS key was found: {type(exc).__name__}") from None
        except failures.ParamValidationError:
            raise RequestRejected(
                f"AWS's client refused the parameters of {operation}", field="request", reason="not valid"
            ) from None
        except (failures.BotoCoreError, ResponseParserError) as exc:
            raise AnswerLost(f"AWS's answer to {operation} was lost: {type(exc).__name__}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            # What the client's parser makes of an answer that is XML and yet not what it expects.
            raise AnswerLost(f"AWS's answer to {operation} cannot be read: {type(exc).__name__}") from None

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            client = self._clients.get((service, region))
            if client is None:
                client = self._clients[service, region] = self._session.client(
                    service,
                    region_name=region,
                    endpoint_url=self._settings.endpoint_url or None,
                    config=_config(),
                )
            return client


def _session(settings: AwsSettings, credential: str | None) -> Any:
    try:
        import boto3
        import botocore.exceptions
        import botocore.session
    except ImportError as exc:
        raise AuthFailed(f"the AWS provider needs AWS's client, boto3: {install_command('aws')}") from exc
    core = botocore.session.Session(profile=settings.profile or None)
    core.register_component("data_loader", _models())
    # One row with an odd time must not cost the whole answer: its row's own validation sees the text.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time_or_text)
    if credential:
        parts = credential.split(":")
        if len(parts) not in (2, 3) or not all(parts):
            raise AuthFailed(
                "an AWS api_key is written ACCESS_KEY_ID:SECRET_ACCESS_KEY, or with :SESSION_TOKEN at its end"
            )
        core.set_credentials(*parts)
    try:
        return boto3.session.Session(botocore_session=core)
    except botocore.exceptions.ProfileNotFound as exc:
        raise AuthFailed(f"AWS's config files have no profile {settings.profile!r}") from exc


@lru_cache(maxsize=1)
def _models() -> Any:
    # AWS's own descriptions of its APIs, read-only and large: parsed once for all sessions of a process.
    from botocore.loaders import create_loader

    return create_loader()


def _config() -> Any:
    from botocore.config import Config

    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=AT_ONCE,
        user_agent_extra="spotd",
    )


def _time_or_text(value: Any) -> Any:
    from botocore.utils import parse_timestamp

    try:
        return parse_timestamp(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return value


def _refused(response: Mapping[str, Any]) -> AwsRefused:
    error = response.get("Error") or {}
    metadata = response.get("ResponseMetadata") or {}
    status = metadata.get("HTTPStatusCode")
    code = str(error.get("Code") or status or "nothing")
    header = str((metadata.get("HTTPHeaders") or {}).get("retry-after", ""))
    known = code if code.replace(".", "").isalnum() and len(code) <= 80 else "an unknown error"
    return AwsRefused(
        code=known,
        status=status if isinstance(status, int) else 500,
        detail=quote_safely(str(error.get("Message") or "")),
        retry_after=timedelta(seconds=int(header)) if header.isdecimal() and len(header) < 6 else None,
    )

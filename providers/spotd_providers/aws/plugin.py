"""The descriptor of AWS. AWS's client is not imported before the provider is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import anyio

from spotd_providers.aws.advisor import Band, read_advisor
from spotd_providers.aws.offers import PROVIDER
from spotd_providers.aws.provider import AwsProvider
from spotd_providers.aws.sdk import Sdk
from spotd_providers.aws.settings import IMDS, AwsSettings
from spotd_providers.aws.userdata import SCRIPT_BYTES_MAX
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.kit.plugin import AdapterPlugin
from spotd_providers.kit.settings import is_loopback


def _traits(settings: AwsSettings) -> ProviderTraits:
    local = bool(settings.endpoint_url) and is_loopback(settings.endpoint_url)
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        # A launch's time-out, and the five minutes after which AWS's lists are taken for true.
        reconcile_window=timedelta(minutes=6),
        # Loading an image of 10 GB onto a fresh disk takes up to ten minutes.
        provision_timeout=timedelta(minutes=25),
        hosts_share_filesystem=local,
        ends_itself_by="file",
        # Counted by EC2 from `running`, by us from the launch before it: never too long.
        free_if_taken_within=timedelta(hours=1),
        bills_from_running=True,
        bills_at_least=timedelta(minutes=1),
        bills_by=timedelta(seconds=1),
        # A fake cloud puts its own address into the environment of each machine.
        notice_imds="" if local else IMDS,
    )


@asynccontextmanager
async def _open(settings: AwsSettings, services: Services) -> AsyncIterator[Provider]:
    sdk = Sdk(settings, services.credential)
    try:
        yield AwsProvider(sdk, settings, services, await _bands(settings, services))
    finally:
        sdk.close()


async def _bands(settings: AwsSettings, services: Services) -> Mapping[tuple[str, str], Band]:
    """Read the saved Spot Advisor. It is only a prior, so a missing or invalid file is logged and ignored."""
    if not settings.spot_advisor:
        return {}
    file = await anyio.Path(settings.spot_advisor).expanduser()
    try:
        return read_advisor(await file.read_bytes())
    except (OSError, ValueError) as exc:
        detail = exc.strerror if isinstance(exc, OSError) else str(exc)
        services.log.warning("aws.spot_advisor_unreadable", file=str(file), detail=detail)
        return {}


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="AWS EC2",
    settings_model=AwsSettings,
    # Without api_key, AWS's client reads what AWS's own tools read: environment, config files, the host's role.
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
)

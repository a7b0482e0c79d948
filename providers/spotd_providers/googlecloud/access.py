"""Tokens for Google's APIs: from a service account's key file, from the environment's own login, or one that is given.

google-auth signs and refreshes; it is imported when a token is needed first, in a thread, and never where the
credential is a token itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.contract.provider import Clock, Services
from spotd_providers.googlecloud.wire import DIALECT, WHO, GoogleSettings
from spotd_providers.kit.boundary import install_command
from spotd_providers.kit.calls import BlockingCalls, KeptToken, is_token
from spotd_providers.kit.http import open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, RestClient

SCOPES: Final = (
    "https://www.googleapis.com/auth/compute",
    "https://www.googleapis.com/auth/cloud-billing.readonly",
)
TOKEN_FOR: Final = timedelta(minutes=30)
"""How long a token is used: one is valid for an hour, one of a metadata service for less, and is then refused."""
LOGIN_TIMEOUT_S: Final = 30.0
_HINT: Final = (
    "put a service account's key file into api_key under [providers.gcp], or run: gcloud auth application-default login"
)


class GoogleTokens(KeptToken):
    """The bearer token of now."""

    def __init__(self, credential: str | None, clock: Clock) -> None:
        super().__init__(clock)
        self._credential = credential
        self._calls = BlockingCalls(1)
        self._login: Any = None

    async def _fetch(self) -> tuple[str, timedelta]:
        try:
            return await self._calls.run(self._refresh_login, timeout_s=LOGIN_TIMEOUT_S), TOKEN_FOR
        except TimeoutError as exc:
            raise Unavailable("Google gives no token in time") from exc

    def _refresh_login(self) -> str:
        """Refresh the login; its errors are not chained, since they quote what was sent.

        Raises:
            AuthFailed: there is no login, or it is refused.
            Unavailable: Google does not answer.
        """
        try:
            import google.auth
            from google.auth import exceptions
            from google.auth.transport.requests import Request
            from google.oauth2 import service_account
        except ImportError as exc:
            raise AuthFailed(f"the library google-auth is missing: {install_command('gcp')}") from exc
        try:
            if self._login is None and self._credential:
                known = json.loads(self._credential)
                login: Any = service_account.Credentials
                self._login = login.from_service_account_info(known, scopes=SCOPES)
            elif self._login is None:
                self._login, _ = google.auth.default(scopes=SCOPES)
            self._login.refresh(Request())
        except exceptions.TransportError as exc:
            raise Unavailable(f"Google's login does not answer ({type(exc).__name__})") from None
        except (exceptions.GoogleAuthError, ValueError, TypeError) as exc:
            raise AuthFailed(f"no login at Google Cloud ({type(exc).__name__}): {_HINT}") from None
        if not is_token(token := self._login.token):
            raise Unavailable("Google's login gave no token")
        return token


def project_of(settings: GoogleSettings, credential: str | None) -> str:
    """Return the project of the settings, else the one that a service account's key file names.

    Raises:
        AuthFailed: neither names one.
    """
    if settings.project:
        return settings.project
    try:
        known = json.loads(credential or "")
    except ValueError:
        known = None
    found = known.get("project_id") if isinstance(known, dict) else None
    if not isinstance(found, str) or not found:
        raise AuthFailed(f"{WHO} needs a project: name it in project under [providers.gcp]")
    return found


@asynccontextmanager
async def open_clients(settings: GoogleSettings, services: Services) -> AsyncIterator[tuple[RestClient, RestClient]]:
    """Open the clients of Compute Engine and of the price list, which carry the same token."""
    credential = (services.credential or "").strip()
    is_token = bool(credential) and not credential.startswith("{")
    headers = {"accept": "application/json", **({"authorization": f"Bearer {credential}"} if is_token else {})}
    tokens = None if is_token else GoogleTokens(credential, services.clock)
    shown = services.date_shown
    async with (
        open_http(
            settings.base_url, headers=headers, timeout_s=READ_TIMEOUT_S, tokens=tokens, date_shown=shown
        ) as compute,
        open_http(settings.billing_url, headers=headers, timeout_s=READ_TIMEOUT_S, tokens=tokens) as billing,
    ):
        rest = [RestClient(http, DIALECT, clock=services.clock, rng=services.rng) for http in (compute, billing)]
        yield rest[0], rest[1]

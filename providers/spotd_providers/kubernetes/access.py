"""The way into a cluster: its address, its certificates and a bearer token, as a kubeconfig or a service account says.

The official client reads the file and runs the login program that it may name (`exec`), and nothing else of it is used:
it is imported when a cluster is opened, in a thread, and never where a token and `base_url` are given.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Services
from spotd_providers.kit.boundary import install_command, is_loopback, safe_base_url
from spotd_providers.kit.calls import BlockingCalls, Rest
from spotd_providers.kit.http import Http, TokenSource, open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, RestClient
from spotd_providers.kubernetes.wire import DIALECT, IN_CLUSTER, WHO, KubernetesSettings

TOKEN_FOR: Final = timedelta(minutes=5)
"""How long a token is used before the file is read again: a login program's is valid for ten minutes or more."""
LOGIN_TIMEOUT_S: Final = 60.0
EXAMPLE: Final = "https://203.0.113.7:6443"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a kubeconfig says of one cluster, as far as requests need it."""

    base_url: str
    tls: ssl.SSLContext | None
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One open cluster. `client` speaks JSON, `http` the little that is plain text."""

    client: RestClient
    http: Http
    address: str
    tls: ssl.SSLContext | None
    tokens: TokenSource


def read_access(settings: KubernetesSettings) -> Access:
    """Read kubeconfig or service account; blocks, and runs the login program if one is named.

    Raises:
        AuthFailed: nothing there leads into a cluster, with the way out.
    """
    try:
        from kubernetes import config
        from kubernetes.client import Configuration
    except ImportError as exc:
        command = install_command("kubernetes")
        raise AuthFailed(f"the library kubernetes is missing, which reads a kubeconfig: {command}") from exc
    found: Any = Configuration()
    try:
        if settings.kubeconfig == IN_CLUSTER:
            config.load_incluster_config(client_configuration=found)
        else:
            path = Path(settings.kubeconfig).expanduser()
            config.load_kube_config(
                config_file=str(path), context=settings.context, client_configuration=found, persist_config=False
            )
    except Exception as exc:  # whatever the file, its parser, the login program or the library of a cloud makes of it
        raise AuthFailed(
            f"{settings.kubeconfig} does not lead into a cluster ({type(exc).__name__}): check providers.kubernetes."
            "kubeconfig and context, and try: kubectl get nodes"
        ) from exc
    try:
        base_url = safe_base_url(found.host or "", example=EXAMPLE)
        return Access(base_url=base_url, tls=_tls(found, base_url), token=_token(found))
    except (ValueError, OSError) as exc:
        raise AuthFailed(f"{settings.kubeconfig} cannot be used: {exc}") from exc


def _token(found: Any) -> str:
    said = found.api_key.get("authorization") or found.api_key.get("BearerToken") or ""
    return said.removeprefix("Bearer ").strip()


def _tls(found: Any, base_url: str) -> ssl.SSLContext | None:
    """Build the context of this cluster's own authority.

    Raises:
        ValueError: the server is not to be verified, so that the token would go to anybody who answers.
    """
    if base_url.startswith("http:"):
        return None
    if not found.verify_ssl and not is_loopback(base_url):
        raise ValueError("insecure-skip-tls-verify would give the token to anybody who answers; name the authority")
    context = ssl.create_default_context(cafile=found.ssl_ca_cert or None)
    if not found.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.cert_file:
        context.load_cert_chain(found.cert_file, found.key_file)
    return context


class _Login:
    """The token of now: the file is read again after a while, and at once when the token is refused."""

    def __init__(self, settings: KubernetesSettings, services: Services, token: str) -> None:
        self._settings = settings
        self._calls = BlockingCalls(1)
        self._lock = anyio.Lock()
        self._fresh = Rest(services.clock)
        self._fresh.take(TOKEN_FOR)
        self._token = token

    async def token(self, *, refused: bool) -> str:
        used = self._token
        async with self._lock:
            if (refused and self._token == used) or not self._fresh.left():
                access = await self._calls.run(lambda: read_access(self._settings), timeout_s=LOGIN_TIMEOUT_S)
                self._token = access.token
                self._fresh.take(TOKEN_FOR)
            return self._token


@asynccontextmanager
async def open_cluster(settings: KubernetesSettings, services: Services) -> AsyncIterator[Cluster]:
    """Open the cluster that the settings name.

    Raises:
        AuthFailed: they name none that can be entered.
    """
    if settings.base_url is not None:
        token, base_url, tls = services.credential or "", settings.base_url, None
        tokens: TokenSource
        if not token:
            raise AuthFailed('base_url needs a token: api_key = { env = "KUBE_TOKEN" } under [providers.kubernetes]')
        if settings.authority is not None:
            tls = await anyio.to_thread.run_sync(_trust, settings.authority)

        async def same(*, refused: bool) -> str:  # noqa: ARG001 - another is not known
            return token

        tokens = same

    else:
        calls = BlockingCalls(1)
        try:
            access = await calls.run(lambda: read_access(settings), timeout_s=LOGIN_TIMEOUT_S)
        except TimeoutError as exc:
            raise AuthFailed(f"the login program of {settings.kubeconfig} gave no token in a minute") from exc
        base_url, tls, tokens = access.base_url, access.tls, _Login(settings, services, access.token).token
    headers = {"accept": "application/json"}
    async with open_http(base_url, headers=headers, timeout_s=READ_TIMEOUT_S, tls=tls, tokens=tokens) as http:
        client = RestClient(http, DIALECT, clock=services.clock, rng=services.rng)
        yield Cluster(client=client, http=http, address=base_url, tls=tls, tokens=tokens)


def _trust(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(Path(path).expanduser()))
    except OSError as exc:
        raise AuthFailed(f"{WHO}: the authority {path} cannot be read: {type(exc).__name__}") from exc

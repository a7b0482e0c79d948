"""The way into a cluster: its address, its certificates and a bearer token, as a kubeconfig or a service account says.

The official client reads the file and runs the login program that it may name (`exec`), and nothing else of it is used:
it is imported when a cluster is opened, in a thread, and never where a token and `base_url` are given.

A connection to a port of a pod is a WebSocket of its own, by the right to `pods/portforward`. Two channels are
multiplexed on it: 0 carries the bytes, 1 what the kubelet has to complain of. The first message of each holds the port
only. The way carries no half-closed connection.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.kit.boundary import install_command, is_loopback, safe_base_url
from spotd_providers.kit.calls import BlockingCalls, KeptToken
from spotd_providers.kit.http import Http, TokenSource, open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, RestClient
from spotd_providers.kit.text import clean
from spotd_providers.kubernetes.wire import DIALECT, IN_CLUSTER, WHO, KubernetesSettings, problem_of

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


class _Login(KeptToken):
    """The token of now: the file is read again after a while, and at once when the token is refused."""

    def __init__(self, settings: KubernetesSettings, services: Services, token: str) -> None:
        super().__init__(services.clock)
        self._settings = settings
        self._calls = BlockingCalls(1)
        self._keep(token, TOKEN_FOR)

    async def _fetch(self) -> tuple[str, timedelta]:
        access = await self._calls.run(lambda: read_access(self._settings), timeout_s=LOGIN_TIMEOUT_S)
        return access.token, TOKEN_FOR


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
        base_url, tls, tokens = access.base_url, access.tls, _Login(settings, services, access.token)
    headers = {"accept": "application/json"}
    async with open_http(base_url, headers=headers, timeout_s=READ_TIMEOUT_S, tls=tls, tokens=tokens) as http:
        client = RestClient(http, DIALECT, clock=services.clock, rng=services.rng)
        yield Cluster(client=client, http=http, address=base_url, tls=tls, tokens=tokens)


def _trust(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(Path(path).expanduser()))
    except OSError as exc:
        raise AuthFailed(f"{WHO}: the authority {path} cannot be read: {type(exc).__name__}") from exc


OPEN_S: Final = 20.0
CLOSE_S: Final = 5.0
PROTOCOL: Final = "v4.channel.k8s.io"
MESSAGE_BYTES_MAX: Final = 1024 * 1024
_BYTES, _COMPLAINT = 0, 1


class PodPort:
    """A `PortConnection` to a pod."""

    def __init__(self, socket: Any, failures: tuple[type[Exception], ...]) -> None:
        self._socket = socket
        self._failures = failures
        self._begun: set[int] = set()

    async def receive(self) -> bytes:
        while True:
            try:
                message = await self._socket.recv()
            except self._failures as exc:
                # The server closes without more ado when the program closed its side.
                if type(exc).__name__ == "ConnectionClosedOK":
                    return b""
                raise Unavailable(f"the way to {WHO}'s pod broke") from exc
            data = message.encode() if isinstance(message, str) else bytes(message)
            channel, content = data[:1], data[1:]
            if channel not in (b"\0", b"\1"):
                continue
            if channel[0] not in self._begun:
                self._begun.add(channel[0])
                content = content[2:]
            if channel[0] == _COMPLAINT and content:
                raise Unavailable(f"{WHO}: {clean(content.decode('utf-8', 'replace'))}")
            if channel[0] == _BYTES and content:
                return content

    async def send(self, data: bytes) -> None:
        try:
            await self._socket.send(bytes([_BYTES]) + data)
        except self._failures as exc:
            raise Unavailable(f"the way to {WHO}'s pod broke") from exc

    async def send_eof(self) -> None:
        """Do nothing: the channels have no end of their own."""

    async def aclose(self) -> None:
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self._socket.close()


def _words(body: bytes) -> str:
    """Return what a refusal says: the message of a `Status`, or the text of whatever stands before the API server."""
    try:
        problem = problem_of(json.loads(body))
    except ValueError:
        problem = None
    return clean(problem.text if problem and problem.text else body.decode("utf-8", "replace"))


async def open_pod_port(cluster: Cluster, path: str, port: int) -> PodPort:
    """Connect to a port of the pod whose `portforward` is at this path.

    Raises:
        Unavailable: the cluster or its node gives no way there now.
        AuthFailed: the right to it is missing.
    """
    try:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
    except ImportError as exc:
        command = install_command("kubernetes")
        raise AuthFailed(f"the library websockets is missing, which ports of pods need: {command}") from exc
    failures = (WebSocketException, OSError)
    uri = f"ws{cluster.address.removeprefix('http')}{path}?ports={port}"
    try:
        with anyio.fail_after(OPEN_S):
            for refused in (False, True):
                token = await cluster.tokens(refused=refused)
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                try:
                    socket = await connect(
                        uri, ssl=cluster.tls, additional_headers=headers, subprotocols=[PROTOCOL],  # type: ignore[list-item]  # a str is one at run time
                        compression=None, proxy=None, max_size=MESSAGE_BYTES_MAX, open_timeout=None,
                    )  # fmt: skip
                    return PodPort(socket, failures)
                except InvalidStatus as exc:
                    status = exc.response.status_code
                    if status == 401 and not refused:
                        continue
                    if status == 401:
                        raise AuthFailed(f"{WHO} does not take the token of the kubeconfig or of api_key") from exc
                    if status == 403:
                        raise AuthFailed(f"{WHO} does not allow: create pods/portforward") from exc
                    said = _words(bytes(exc.response.body or b""))
                    raise Unavailable(f"{WHO} gives no way to port {port} of the pod (HTTP {status}) {said}") from exc
    except failures as exc:
        raise Unavailable(f"{WHO} gives no way to port {port} of the pod ({type(exc).__name__})") from exc
    raise Unavailable(f"{WHO} gives no way to port {port} of the pod")

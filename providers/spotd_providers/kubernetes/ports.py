"""One connection to a port of a pod, through the API server: a WebSocket for each, by the right to `pods/portforward`.

Two channels are multiplexed on it: 0 carries the bytes, 1 what the kubelet has to complain of. The first message of
each holds the port only. The way carries no half-closed connection.
"""

from __future__ import annotations

import json
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.kit.boundary import install_command
from spotd_providers.kit.text import clean
from spotd_providers.kubernetes.access import Cluster
from spotd_providers.kubernetes.wire import WHO, problem_of

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

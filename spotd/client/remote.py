"""Where a daemon of another computer is reached, with which token, and what can go wrong on the way, in words."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

URL: Final = "SPOTCTL_URL"
TOKEN_FILE: Final = "SPOTCTL_TOKEN_FILE"  # noqa: S105 - the name of a variable
CA: Final = "SPOTCTL_CA"
TOKEN_BYTES_MAX: Final = 4096
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_NOT_YET_VALID, _EXPIRED = 9, 10
_SELF_SIGNED: Final = frozenset({18, 19})
_UNKNOWN_AUTHORITY: Final = frozenset({2, 20, 21})
_OTHER_NAME: Final = frozenset({62, 64})


class RemoteRefused(Exception):
    """An address, a token or a certificate of an authority that cannot be used."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Of one daemon: `https://host:port`, or `http://` on this computer."""

    url: str
    host: str
    port: int
    is_encrypted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Daemons that serve one state, of which one leads, and how a program proves for whom it asks."""

    addresses: tuple[Address, ...]
    token_file: Path | None
    ca: Path | None

    def token(self) -> str:
        """Return the token, read anew, so that one that was replaced is used at once.

        Raises:
            RemoteRefused: it is missing, others may read it, or it is no token.
        """
        if self.token_file is None:
            raise RemoteRefused("a daemon of another computer asks for a token", hint=f"--token-file, or ${TOKEN_FILE}")
        try:
            mode = self.token_file.stat().st_mode
            with self.token_file.open("rb") as file:
                text = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not text"
            raise RemoteRefused(
                f"the token's file {self.token_file} cannot be read: {reason}", hint="check its path and mode"
            ) from None
        if mode & 0o077:
            raise RemoteRefused(
                f"others may read the token's file {self.token_file}", hint=f"chmod 600 {self.token_file}"
            )
        if not text or not text.isprintable() or " " in text:
            raise RemoteRefused(
                f"the file {self.token_file} does not hold one token", hint="write what spotd user add printed"
            )
        return text

    def connection(self, address: Address, *, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is not open yet.

        Raises:
            RemoteRefused: the file of the authority cannot be used.
        """
        if not address.is_encrypted:
            return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else os.fspath(self.ca))
        except (OSError, ssl.SSLError) as exc:
            reason = getattr(exc, "strerror", None) or "it holds no certificate in PEM"
            raise RemoteRefused(f"the file {self.ca} of --ca cannot be used: {reason}", hint="check it") from exc
        return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=context)


def remote_in(environ: Mapping[str, str]) -> Remote | None:
    """Return what the environment says, `None` where the daemon of this computer is meant.

    Raises:
        RemoteRefused: it names an address that cannot be used.
    """
    urls = [text.strip() for text in environ.get(URL, "").split(",") if text.strip()]
    if not urls:
        return None
    token_file, ca = environ.get(TOKEN_FILE, ""), environ.get(CA, "")
    return Remote(
        addresses=tuple(map(parse_url, urls)),
        token_file=Path(token_file).expanduser() if token_file else None,
        ca=Path(ca).expanduser() if ca else None,
    )


def parse_url(text: str) -> Address:
    """Return the address that a URL names.

    Raises:
        RemoteRefused
    """
    hint = "write it like https://gpu.example.org:7443"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise RemoteRefused("the URL of the daemon is none", hint=hint) from None
    if parts.username is not None or parts.password is not None:
        # Not repeated: what stands there may be a token.
        raise RemoteRefused("a URL holds no token", hint="write the token into a file, and give --token-file")
    if (
        parts.scheme not in {"http", "https"}
        or not host
        or parts.path not in {"", "/"}
        or parts.query
        or parts.fragment
    ):
        raise RemoteRefused("the URL of the daemon is not https:// with a host and a port", hint=hint)
    is_encrypted = parts.scheme == "https"
    if not is_encrypted and host not in _LOOPBACK:
        raise RemoteRefused(f"the token would travel to {host} in the clear", hint=hint)
    port = port or (443 if is_encrypted else 80)
    shown = f"[{host}]" if ":" in host else host
    return Address(url=f"{parts.scheme}://{shown}:{port}", host=host, port=port, is_encrypted=is_encrypted)


def failure(exc: Exception, address: Address) -> tuple[str, str]:
    """Return why no answer came from an address, and a way out."""
    place = address.url
    match exc:
        case ssl.SSLCertVerificationError():
            return _of_certificate(exc, address)
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE"):
            return f"what answers at {place} speaks no TLS", "check host and port: [api] listen of the daemon's config"
        case ssl.SSLError():
            return f"no encrypted connection with {place}: {exc.reason or exc}", "check host and port"
        case socket.gaierror():
            return f"no computer is known by the name {address.host}", "check --url"
        case ConnectionRefusedError():
            return f"nothing listens at {place}", "start spotd there, with listen in [api] of its config"
        case TimeoutError():
            return f"{place} does not answer", "check host, port and firewall; running machines go on"
        case http.client.IncompleteRead():
            return f"{place} went away in the middle of its answer", "try again"
        case ConnectionError():
            return (
                f"{place} closed the connection without an answer",
                "check that https:// or http:// is right; it may have too many connections: try again in a minute",
            )
        case http.client.HTTPException():
            return f"what answers at {place} is not spotd", "check host and port: [api] listen of the daemon's config"
        case _:
            return f"cannot talk to {place}: {exc}", "check --url"


def _of_certificate(exc: ssl.SSLCertVerificationError, address: Address) -> tuple[str, str]:
    code = exc.verify_code
    if code == _EXPIRED:
        return f"the certificate of {address.url} has expired", "have it renewed there, then send spotd SIGHUP"
    if code == _NOT_YET_VALID:
        return f"the certificate of {address.url} is not valid yet", "check the clocks of both computers"
    if code in _SELF_SIGNED:
        return f"the certificate of {address.url} is signed by itself", "--ca FILE with this very certificate"
    if code in _UNKNOWN_AUTHORITY:
        words = f"the certificate of {address.url} is of an authority that this computer does not know"
        return words, "--ca FILE with the certificate of that authority"
    if code in _OTHER_NAME:
        return f"the certificate at {address.url} is not for {address.host}", "write the name that it is for in --url"
    return f"the certificate of {address.url} is refused: {exc.verify_message}", "--ca FILE, or another certificate"

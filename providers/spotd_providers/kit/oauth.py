"""A key that is a pair of client id and secret, exchanged for tokens that run out: client credentials of OAuth 2."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.contract.provider import Clock, Services
from spotd_providers.kit.calls import KeptToken, is_token
from spotd_providers.kit.http import AnswerLost, Http, RequestOptions, open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, Dialect, RestClient
from spotd_providers.kit.shapes import decode_or_none

TOKEN_MARGIN: Final = timedelta(seconds=60)
TOKEN_LIFE_MAX: Final = timedelta(hours=12)


class Tokens(KeptToken):
    """Bearer tokens for the pair of client id and secret, fetched when one is about to run out or was refused."""

    def __init__(
        self, http: Http, path: str, pair: tuple[str, str], *, who: str, clock: Clock, scope: str | None = None
    ) -> None:
        super().__init__(clock)
        self._http = http
        self._path = path
        self._who = who
        body = {"grant_type": "client_credentials", "client_id": pair[0], "client_secret": pair[1]}
        # The standard asks for a form; who names no scope was seen to take JSON.
        self._sent: RequestOptions = {"json_body": body} if scope is None else {"form": {**body, "scope": scope}}

    async def _fetch(self) -> tuple[str, timedelta]:
        try:
            answer = await self._http.send("POST", self._path, **self._sent)
        except AnswerLost as exc:
            raise Unavailable(f"{self._who}'s answer to a request for a token was lost") from exc
        said = decode_or_none(answer.body, who=self._who)
        if answer.status in (400, 401, 403) and isinstance(said, dict):
            raise AuthFailed(f"{self._who} refused the pair of client_id and api_key ({answer.status})")
        token = said.get("access_token") if isinstance(said, dict) and answer.status < 300 else None
        if not is_token(token):
            raise Unavailable(f"{self._who} answered {answer.status} to a request for a token, and no token")
        life = said.get("expires_in")
        known = isinstance(life, int | float) and 0 < life < TOKEN_LIFE_MAX.total_seconds()
        span = timedelta(seconds=life) if known else TOKEN_MARGIN * 2
        return token, span - min(TOKEN_MARGIN, span / 4)


@asynccontextmanager
async def open_with_tokens(
    base_url: str,
    dialect: Dialect,
    services: Services,
    *,
    client_id: str,
    path: str,
    key_hint: str,
    login_url: str | None = None,
    scope: str | None = None,
) -> AsyncIterator[RestClient]:
    """Open the client of one account, whose requests carry a token that `path` gives.

    Args:
        login_url: where that path is, if not at `base_url`.
        scope: what the token is for; with one, the pair is sent as a form.

    Raises:
        AuthFailed: there is no pair; `key_hint` says which settings name it.
    """
    if not services.credential or not client_id:
        raise AuthFailed(f"{dialect.who} needs a pair of client id and secret: {key_hint}")
    headers, pair = {"accept": "application/json"}, (client_id, services.credential)
    async with open_http(login_url or base_url, headers=headers, timeout_s=READ_TIMEOUT_S) as keys:
        tokens = Tokens(keys, path, pair, who=dialect.who, clock=services.clock, scope=scope)
        opened = open_http(
            base_url, headers=headers, timeout_s=READ_TIMEOUT_S, tokens=tokens, date_shown=services.date_shown
        )
        async with opened as http:
            yield RestClient(http, dialect, clock=services.clock, rng=services.rng)

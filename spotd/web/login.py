"""The page on which a browser states the token, once. Plain HTML: it works before anything else is served."""

from __future__ import annotations

import asyncio
import math
from html import escape
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from spotd.web.guard import LOGIN, session_cookie
from spotd.web.peers import peer_of
from spotd.web.sessions import COOKIE, SESSION_S, Sessions

BODY_BYTES_MAX: Final = 4096
BODY_WITHIN_S: Final = 10.0
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Log in - spotd</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/favicon.svg"><link rel="stylesheet" href="/style.css"></head>
<body class="login"><main><h1>spotd</h1>
<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<p role="alert">{message}</p>
<button type="submit">Log in</button>
<p class="muted">spotctl web showed it when it started, or it is in the file that was given to it.</p>
</form></main></body></html>
"""


def page(message: str = "", *, status: int = 200) -> Response:
    return HTMLResponse(
        _PAGE.format(message=escape(message)), status_code=status, headers={"cache-control": "no-store"}
    )


async def login(request: Request, sessions: Sessions) -> Response:
    """Open a session for the right token."""
    text, peer = await _token(request), peer_of(request.client, request.headers)
    if wait_s := math.ceil(sessions.wait_s(peer)):
        return page(f"Too many wrong tokens. Try again in {wait_s} s.", status=429)
    await asyncio.sleep(sessions.delay_s())
    if not sessions.is_token(text, peer):
        return page("That is not the token.", status=403)
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(
        COOKIE,
        sessions.open(),
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=request.headers.get("x-forwarded-proto") == "https",
    )
    return answer


async def logout(request: Request, sessions: Sessions) -> Response:
    """End the session of this browser."""
    sessions.close(session_cookie(request.headers))
    answer = RedirectResponse(LOGIN, status_code=303)
    answer.delete_cookie(COOKIE)
    return answer


async def _token(request: Request) -> str:
    """Return the field of the form, from a body of bounded size."""
    body = b""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return ""
    except TimeoutError:
        return ""
    from urllib.parse import parse_qs

    return parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()

"""The meaning of vast.ai's answers: status codes, error words and plain texts to outcomes.

Theory. vast.ai refuses in several forms: an HTTP status, a 200 with `success: false`, a 404 that really means
"bad key", a 429 that is plain text. The body's `error` word is therefore read before the status is believed.
What only the caller can judge (is a missing ask a lost offer or a finished deletion?) becomes `VastRefused`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, ProviderError, QuotaExceeded, RateLimited
from spotd_providers.kit.answers import DefiniteRefusal, raise_for_status
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.pace import too_often
from spotd_providers.kit.shapes import decode_or_none
from spotd_providers.kit.text import TEXT_CHARS_MAX, quote_safely
from spotd_providers.vastai.wire import WHO

_THRESHOLD: Final = re.compile(r"threshold\s*=\s*([0-9]+(?:\.[0-9]+)?)")
_AUTH_WORDS: Final = frozenset({"auth_error", "unauthorized", "not_authorized", "invalid_api_key", "forbidden"})
_ABOUT_THE_KEY: Final = re.compile(r"api key|user key|permission|scope|login|log in|auth|access denied")
_TWO_FACTOR: Final = re.compile(r"(?i)lacks proper privileges|two[ -]factor")
"""Said of a key that may search and nothing else, since it is older than the account's second factor."""
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{2,40}")


class VastRefused(DefiniteRefusal):
    """A definite "no" of vast.ai's; `code` is in lower case."""

    who = WHO

    @property
    def says_absent(self) -> bool:
        """The thing named in the call does not exist, in vast.ai's own words."""
        return self.code.startswith("no_such") or "no_such_instance" in self.detail


def body_of(answer: HttpAnswer) -> Any:
    """Decode the body; `None` if it is not JSON."""
    return decode_or_none(answer.body, who=WHO)


def raise_for(
    answer: HttpAnswer,
    body: Any,
    *,
    endpoint: str,
    penalty: timedelta,
    now: datetime,
    rng: Random,
    purchase: bool = False,
) -> None:
    """Raise the error that an answer stands for; return only if it is a success.

    On a purchase, a 403 may be about the account or the offer (hosts may rent only their own, new accounts may spend
    only so fast) and says so in its words; elsewhere it is the key.

    Raises:
        AuthFailed, RateLimited, Unavailable: whatever was asked, this is what it means.
        Refused: a definite no.
    """
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    word = _text(fields.get("error")).lower()
    code = word if _WORD.fullmatch(word) else ""
    said = _text(fields.get("msg")) or _text(fields.get("detail")) or ("" if code else word)
    detail = quote_safely(said or ("" if fields else answer.text[:TEXT_CHARS_MAX]))
    if _TWO_FACTOR.search(said):
        raise AuthFailed(
            "vast.ai wants a key that was made in a session with two-factor login; make a new one after such a login:"
            f" {detail}"
        )
    if answer.status == 429:
        raise too_many(answer, code=code, detail=detail, endpoint=endpoint, penalty=penalty, now=now, rng=rng)
    explained = purchase and bool(code or said) and _ABOUT_THE_KEY.search(f"{code} {said}".lower()) is None
    not_allowed = answer.status == 403 and not explained
    if answer.status == 401 or code in _AUTH_WORDS or not_allowed:
        raise AuthFailed(f"vast.ai refused the API key: {detail or code or answer.status}")
    if 200 <= answer.status < 300 and fields.get("success") is not False:
        return
    raise_for_status(answer, who=WHO, what=endpoint)
    raise VastRefused(status=answer.status, code=code, detail=detail)


def too_many(
    answer: HttpAnswer, *, code: str, detail: str, endpoint: str, penalty: timedelta, now: datetime, rng: Random
) -> ProviderError:
    """Build the error of a 429: its wait is the header, else the threshold in its text, else the endpoint's penalty."""
    if code == "search_quota_exceeded":
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        return RateLimited(
            "vast.ai's daily search quota is used up until 00:00 UTC; raise poll_every to stay below it",
            retry_after=midnight - now,
        )
    if code == "spend_rate_limit":
        return QuotaExceeded(f"vast.ai limits how fast this account may spend: {detail}")
    wait = penalty
    if (found := _THRESHOLD.search(answer.text)) is not None:
        wait = max(penalty, timedelta(seconds=min(float(found[1]), 3600.0)))
    header = answer.retry_after
    return too_often("vast.ai", endpoint, wait if header is None else header, rng)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

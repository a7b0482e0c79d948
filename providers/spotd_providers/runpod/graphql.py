"""RunPod's old GraphQL API, as far as v2 has no word for it: the balance, and spot pods.

It answers "no" with HTTP 200 and `errors[]`, has staged rate limits, and will be gone some day in 2027: then this
says so once and is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from spotd_providers.contract.errors import NotSupported, OutcomeUnknown, Unavailable
from spotd_providers.contract.provider import Logger
from spotd_providers.kit.http import AnswerLost, HttpAnswer
from spotd_providers.kit.text import quoted
from spotd_providers.runpod.answers import RunpodRefused, body_of, raise_for
from spotd_providers.runpod.client import RunpodClient


class Graph:
    """Questions and orders to the GraphQL endpoint.

    Attributes:
        gone: why it is not asked any more; empty while it is.
    """

    def __init__(self, client: RunpodClient, *, rng: Random, log: Logger) -> None:
        self._client = client
        self._rng = rng
        self._log = log
        self.gone = ""

    async def ask(self, query: str) -> Mapping[str, Any]:
        """The data of a question, which may be asked again.

        Raises:
            NotSupported: the API is gone. Refused: it answered with errors.
        """

        async def call() -> Mapping[str, Any]:
            self._refuse_if_gone()
            try:
                answer = await self._client.graphql(query)
            except AnswerLost as exc:
                raise Unavailable(str(exc)) from exc
            return self._data(answer)

        return await self._client.repeated(call)

    async def order(self, query: str, variables: Mapping[str, Any], *, key: str) -> Mapping[str, Any]:
        """The data of an order, which is sent once.

        Raises:
            OutcomeUnknown: it may have had its effect.
            NotSupported, Refused, RateLimited, AuthFailed, Unavailable: it certainly had none.
        """
        self._refuse_if_gone()
        try:
            answer = await self._client.graphql(query, variables)
        except AnswerLost as exc:
            raise OutcomeUnknown("RunPod's answer to an order was lost", key=key) from exc
        try:
            return self._data(answer)
        except Unavailable as exc:
            if 300 <= answer.status < 500 and answer.status != 408:
                raise
            raise OutcomeUnknown(f"RunPod answered {answer.status} to an order", key=key) from exc

    def _refuse_if_gone(self) -> None:
        if self.gone:
            raise NotSupported(self.gone)

    def _data(self, answer: HttpAnswer) -> Mapping[str, Any]:
        body = body_of(answer)
        if answer.status in (404, 410):
            self.gone = f"RunPod's GraphQL API is gone (HTTP {answer.status})"
            self._log.warning("runpod.graphql_gone", status=answer.status)
            raise NotSupported(self.gone)
        fields = body if isinstance(body, dict) else {}
        errors = fields.get("errors")
        if errors and answer.status in (200, 400):
            raise _refusal(answer.status, errors)
        raise_for(answer, body, what="GraphQL", rng=self._rng)
        data = fields.get("data")
        if not isinstance(data, dict):
            raise Unavailable("RunPod's GraphQL answer holds no data")
        return data


class GraphRefused(RunpodRefused):
    """A definite "no" of GraphQL; `internal` if it calls itself an internal error, which proves nothing."""

    def __init__(self, *, status: int, detail: str, internal: bool) -> None:
        super().__init__(status=status, detail=detail)
        self.internal = internal


def _refusal(status: int, errors: Any) -> GraphRefused:
    rows = [row for row in errors if isinstance(row, dict)] if isinstance(errors, list) else []
    messages = [row["message"] for row in rows if isinstance(row.get("message"), str)]
    codes = {str((row.get("extensions") or {}).get("code")) for row in rows if isinstance(row.get("extensions"), dict)}
    return GraphRefused(
        status=status, detail=quoted("; ".join(messages[:3])), internal="INTERNAL_SERVER_ERROR" in codes
    )

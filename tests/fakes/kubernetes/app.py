"""The cluster's HTTP API over a `KubeCloud`, as a Starlette application."""

from __future__ import annotations

import base64
import copy
import json
import re
from datetime import UTC, datetime
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.cloud import FakeApi
from tests.fakes.kubernetes.cloud import KubeCloud
from tests.fakes.kubernetes.objects import Document, Refused, selected

_ALL: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_PATH: Final = re.compile(
    r"/(?:api/v1|apis/batch/v1)(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)
_VERBS: Final = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}


def classify(request: RecordedRequest) -> Call:
    """What a request to the cluster is for."""
    found = _PATH.fullmatch(request.path)
    plural = found["plural"] if found is not None else ""
    if plural == "nodes":
        return Call.OFFERS
    if plural == "jobs" and request.method == "POST":
        return Call.LAUNCH
    if plural == "jobs" and request.method == "DELETE":
        return Call.TERMINATE
    if plural == "jobs" and request.method == "GET":
        return Call.LIST
    return Call.OTHER


class KubeApi(FakeApi[KubeCloud]):
    """The ASGI application."""

    def _built(self) -> Starlette:
        return Starlette(routes=[Route("/{rest:path}", self.endpoint(self._answer), methods=_ALL)])

    def _answer(self, request: Request, content: bytes) -> Response:
        try:
            user = self._user(request)
            body = json.loads(content) if content else {}
            path = request.url.path
            if path == "/version":
                return _json(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
            if path.endswith("/selfsubjectaccessreviews"):
                return self._review(user, body)
            found = _PATH.fullmatch(path)
            if found is None or found["plural"] not in self.cloud.objects:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            return self._object(request, user, found, body)
        except Refused as refused:
            return _status(refused)

    def _user(self, request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        user = self.cloud.tokens.get(token) if scheme == "Bearer" else None
        if user is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        return user

    def _may(self, user: str, verb: str, resource: str) -> bool:
        rights = self.cloud.rights.get(user)
        return rights is None or f"{verb} {resource}" in rights

    def _review(self, user: str, body: Document) -> Response:
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(part for part in (asked["resource"], asked.get("subresource")) if part)
        return _json(201, {**body, "metadata": {}, "status": {"allowed": self._may(user, asked["verb"], resource)}})

    def _object(self, request: Request, user: str, found: re.Match[str], body: Document) -> Response:
        plural, name, namespace, sub = found["plural"], found["name"], found["ns"] or "", found["sub"]
        verb = _VERBS.get(request.method) or ("get" if name else "list")
        resource = f"{plural}/{sub}" if sub else plural
        if not self._may(user, verb, resource):
            group = "batch" if plural == "jobs" else ""
            place = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            what = f'resource "{resource}" in API group "{group}"{place}'
            text = f'{plural} is forbidden: User "{user}" cannot {verb} {what}'
            raise Refused(403, "Forbidden", text)
        if verb == "create":
            if namespace and ("", namespace) not in self.cloud.objects["namespaces"].rows:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            return self._create(plural, namespace, body)
        if verb == "list":
            return self._list(request, plural, namespace)
        if verb == "delete":
            return _json(200, _shown(self.cloud.delete(plural, namespace, name, body)))
        document = self.cloud.get(plural, namespace, name)
        if sub == "log":
            return self._log(request, document)
        return _json(200, self._row(plural, document))

    def _create(self, plural: str, namespace: str, body: Document) -> Response:
        made = self.cloud.create(plural, namespace, body)
        if plural == "jobs" and self.cloud.quirks.fail_after_creation:
            code, self.cloud.quirks.fail_after_creation = self.cloud.quirks.fail_after_creation, 0
            raise Refused(code, "InternalError", "etcdserver: request timed out")
        return _json(201, _shown(made))

    def _list(self, request: Request, plural: str, namespace: str) -> Response:
        cloud, ask = self.cloud, request.query_params
        rows = [row for (ns, _), row in cloud.objects[plural].rows.items() if not namespace or ns == namespace]
        rows = selected(rows, ask.get("labelSelector", ""))
        for phase in re.findall(r"status\.phase!=(\w+)", ask.get("fieldSelector", "")):
            rows = [row for row in rows if row["status"].get("phase") != phase]
        if plural in ("jobs", "pods"):
            born = cloud.clock.now() - cloud.quirks.list_lag
            rows = [
                row
                for row in rows
                if _instant(row["metadata"]["creationTimestamp"]) <= born or not cloud.quirks.list_lag
            ]
        start = 0
        if token := ask.get("continue"):
            if cloud.quirks.tokens_age:
                text = "The provided continue parameter is too old to display a consistent list result."
                raise Refused(410, "Expired", text)
            start = int(base64.b64decode(token))
        limit = min(int(ask.get("limit", "500")), cloud.quirks.page_rows)
        more = base64.b64encode(str(start + limit).encode()).decode() if start + limit < len(rows) else ""
        kind = cloud.objects[plural]
        shown = [self._row(plural, row) for row in rows[start : start + limit]]
        meta = {"resourceVersion": "1", **({"continue": more} if more else {})}
        api = "batch/v1" if kind.group else "v1"
        return _json(200, {"kind": f"{kind.kind}List", "apiVersion": api, "metadata": meta, "items": shown})

    def _row(self, plural: str, row: Document) -> Any:
        quirks = self.cloud.quirks
        if plural == "jobs" and row["metadata"]["uid"] in quirks.spoiled:
            return "not a row"
        shown = _shown(row)
        if plural == "nodes" and row["metadata"]["name"] in quirks.raw_label:
            shown["metadata"]["labels"]["nvidia.com/gpu.product"] = quirks.raw_label[row["metadata"]["name"]]
        return shown

    def _log(self, request: Request, pod: Document) -> Response:
        uid = pod["metadata"]["uid"]
        if uid not in self.cloud.machines.ids():
            text = f'container "job" in pod "{pod["metadata"]["name"]}" is waiting to start: ContainerCreating'
            raise Refused(400, "BadRequest", text)
        lines = self.cloud.machines.console(uid, lines=int(request.query_params.get("tailLines", "100")))
        return Response("".join(f"{line}\n" for line in lines), media_type="text/plain")


def _instant(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _shown(document: Document) -> Document:
    shown = copy.deepcopy(document)
    for private in ("ready_at", "fails", "conditions_final"):
        shown["status"].pop(private, None)
    if shown["kind"] == "Secret":
        shown.pop("status")
    return shown


def _json(status: int, body: Any) -> Response:
    return Response(json.dumps(body), status_code=status, media_type="application/json")


def _status(refused: Refused) -> Response:
    body = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": refused.message,
        "reason": refused.reason, "code": refused.code,
    }  # fmt: skip
    return _json(refused.code, body)

"""AWS's endpoints over an `Ec2Cloud`: EC2 and STS speak the Query protocol, SSM, prices and quotas JSON.

Which region and service is meant stands in the signature, as it does for real; the signature itself is not checked.
The metadata service of each instance answers below `/imds/<instance id>`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.aws.actions import ACTIONS, AMIS
from tests.fakes.aws.cloud import Ec2Cloud
from tests.fakes.aws.imds import metadata
from tests.fakes.aws.pricelist import get_products
from tests.fakes.aws.wire import Params, Refusal, answer, error, signer
from tests.fakes.cloud import FakeApi

_CALLS = {
    "DescribeSpotPriceHistory": Call.OFFERS,
    "DescribeInstanceTypes": Call.OFFERS,
    "DescribeInstanceTypeOfferings": Call.OFFERS,
    "DescribeSubnets": Call.OFFERS,
    "DescribeSecurityGroups": Call.OFFERS,
    "DescribeInstances": Call.LIST,
    "DescribeSpotInstanceRequests": Call.LIST,
    "TerminateInstances": Call.TERMINATE,
}
SSM_AMI = "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id"


def classify(request: RecordedRequest) -> Call:
    """What a request to AWS is for. A dry run launches nothing."""
    if request.path != "/":
        return Call.OTHER
    if "x-amz-target" in request.headers:
        return Call.ACCOUNT
    params = Params(request.body)
    if params.get("Action") == "RunInstances":
        return Call.ACCOUNT if params.flag("DryRun") else Call.LAUNCH
    return _CALLS.get(params.get("Action"), Call.ACCOUNT)


class Ec2Api(FakeApi[Ec2Cloud]):
    """The ASGI application.

    Attributes:
        asked: every API call that was made, as IAM names it (`ec2:RunInstances`).
    """

    def __init__(self, cloud: Ec2Cloud) -> None:
        self.asked: list[str] = []
        self._request_ids = count(1)
        super().__init__(cloud)

    def _built(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._dated(self._api), methods=["POST"]),
                Route("/imds/{id}/{path:path}", self._dated(self._imds), methods=["GET", "PUT"]),
            ]
        )

    def _dated(self, handle: Callable[[Request, bytes], Response]) -> Callable[[Request], Awaitable[Response]]:
        def answer(request: Request, content: bytes) -> Response:
            response = handle(request, content)
            now = self.cloud.clock.now() + self.cloud.quirks.clock_ahead
            response.headers["date"] = format_datetime(now, usegmt=True)
            return response

        return self.endpoint(answer)

    def _api(self, request: Request, content: bytes) -> Response:
        request_id = f"req-{next(self._request_ids):08d}"
        access_key, region, service = signer(request.headers.get("authorization", ""))
        target = request.headers.get("x-amz-target", "")
        params = Params(b"" if target else content)
        action = target.partition(".")[2] or params.get("Action")
        self.asked.append(f"{service}:{action}")
        try:
            if not access_key:
                raise Refusal("MissingAuthenticationToken", "Request is missing Authentication Token", 403)
            if access_key != self.cloud.access_key:
                code = "AuthFailure" if service == "ec2" else "InvalidClientTokenId"
                raise Refusal(code, "AWS was not able to validate the provided access credentials", 401)
            if self.cloud.quirks.allowed is not None and not self.cloud.quirks.allowed(f"{service}:{action}"):
                code = "UnauthorizedOperation" if service == "ec2" else "AccessDenied"
                raise Refusal(code, "You are not authorized to perform this operation.", 403)
            refused = self.cloud.quirks.refusals.get(action)
            if refused is not None:
                raise Refusal(refused[0], refused[2], refused[1])
            if target:
                return _json(200, self._json_action(target, region, json.loads(content)))
            if service == "sts":
                return Response(_CALLER.encode(), media_type="text/xml")
            if region in self.cloud.quirks.failing_regions:
                raise Refusal("Unavailable", "The service is unavailable. Please try again shortly.", 503)
            handle = ACTIONS.get(action)
            if handle is None:
                raise Refusal("InvalidAction", f"The action {action} is not valid for this web service.")
            return Response(answer(action, handle(self.cloud, region, params), request_id), media_type="text/xml")
        except Refusal as refusal:
            if target:
                return _json(refusal.status, {"__type": refusal.code, "message": refusal.message})
            return Response(error(refusal, request_id), status_code=refusal.status, media_type="text/xml")

    def _json_action(self, target: str, region: str, body: Any) -> Any:
        if target == "AmazonSSM.GetParameter":
            if body.get("Name") != SSM_AMI or region not in AMIS:
                raise Refusal("ParameterNotFound", "")
            return {"Parameter": {"Name": body["Name"], "Type": "String", "Value": AMIS[region]}}
        if target == "ServiceQuotasV20190624.GetServiceQuota":
            code = body.get("QuotaCode")
            if code not in self.cloud.quotas:
                raise Refusal("NoSuchResourceException", "no such quota")
            value = self.cloud.quotas_in.get((region, code), self.cloud.quotas[code])
            quota = {"ServiceCode": "ec2", "QuotaCode": code, "Value": value, "Unit": "None"}
            return {"Quota": quota}
        if target == "AWSPriceListService.GetProducts":
            return get_products(self.cloud, region, body)
        raise Refusal("UnknownOperationException", "")

    def _imds(self, request: Request, _: bytes) -> Response:
        instance = self.cloud.instances.get(request.path_params["id"])
        if instance is None or not instance.phase.exists:
            return Response(status_code=404)
        path = request.path_params["path"]
        return metadata(instance, request.method, path, request.headers, as_wall=self._as_wall)

    def _as_wall(self, at: datetime) -> datetime:
        clock = self.cloud.clock
        return datetime.now(UTC) + timedelta(seconds=clock.real_seconds(at - clock.now()))


_CALLER = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
    "<Arn>arn:aws:iam::123456789012:user/spotd</Arn><UserId>AIDAFAKE</UserId><Account>123456789012</Account>"
    "</GetCallerIdentityResult><ResponseMetadata><RequestId>r</RequestId></ResponseMetadata></GetCallerIdentityResponse>"
)


def _json(status: int, body: Any) -> Response:
    return Response(json.dumps(body), status_code=status, media_type="application/x-amz-json-1.1")

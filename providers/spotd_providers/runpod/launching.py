"""The body of a create, and the meaning of its refusal."""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    OfferGone,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import LaunchRequest, OfferId
from spotd_providers.kit.answers import rejected
from spotd_providers.runpod.answers import (
    BALANCE_WORDS,
    NO_CAPACITY_WORDS,
    QUOTA_WORDS,
    SCOPE_WORDS,
    RunpodRefused,
    says,
)
from spotd_providers.runpod.settings import RunpodSettings
from spotd_providers.runpod.wire import WHO

SCRIPT_BYTES_MAX: Final = 16 * 1024
BODY_BYTES_MAX: Final = 102_400
NAME_CHARS_MAX: Final = 191
IMAGE_CHARS_MAX: Final = 1024
DISK_GB_MIN: Final = 20
"""Below it, unpacking a large image can fail."""
UNEXPLAINED_MAX: Final = 3


def request_body(request: LaunchRequest, settings: RunpodSettings) -> dict[str, Any]:
    """Build the pod to create. The schema is closed, so it holds only what is needed.

    No `mounts` (nothing outlives the machine but checkpoints), no `ports` (hosts only call out), no `env` (secrets
    have no business there). `args` goes to the image's ENTRYPOINT; almost every image runs what it is given.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(request)
    gpu: dict[str, Any] = {"id": request.offer.extra["gpu"], "count": request.offer.gpu_count}
    if settings.cuda_min is not None:
        gpu["minCudaVersion"] = settings.cuda_min
    body: dict[str, Any] = {
        "name": request.key,
        "image": request.image,
        "cloud": request.offer.extra["cloud"],
        "gpu": gpu,
        "disk": max(request.disk_gb, DISK_GB_MIN),
    }
    if settings.override_entrypoint:
        body["entrypoint"] = ["/bin/sh", "-c"]
        body["cmd"] = [request.start_script]
    else:
        body["args"] = shlex.join(["/bin/sh", "-c", request.start_script])
    if settings.data_centers:
        body["dataCenterIds"] = list(settings.data_centers)
    if settings.registry is not None:
        body["registry"] = settings.registry
    if len(json.dumps(body).encode()) > BODY_BYTES_MAX:
        raise rejected(WHO, "start_script", f"quoted, it makes a request of more than {BODY_BYTES_MAX} bytes")
    return body


def require_launchable(request: LaunchRequest) -> None:
    """Check that RunPod can be asked for this.

    Raises:
        RequestRejected: it would be refused for ever.
    """
    if not request.offer.extra.get("gpu") or request.offer.extra.get("cloud") not in ("SECURE", "COMMUNITY"):
        raise rejected(WHO, "offer", "it is not an offer of RunPod")
    size = len(request.start_script.encode())
    if size > SCRIPT_BYTES_MAX:
        raise rejected(WHO, "start_script", f"it has {size} of at most {SCRIPT_BYTES_MAX} bytes")
    if "\0" in request.start_script:
        raise rejected(WHO, "start_script", "it holds a NUL")
    if len(request.key) > NAME_CHARS_MAX:
        raise rejected(WHO, "key", f"a name has at most {NAME_CHARS_MAX} characters")
    if not request.image or len(request.image) > IMAGE_CHARS_MAX:
        raise rejected(WHO, "image", f"an image name has 1 to {IMAGE_CHARS_MAX} characters")


class UnexplainedRefusals:
    """Refused creates whose words do not say whether the offer or the request is at fault.

    A 400 is a lack of capacity or a broken rule, and only known sentences say which. An unknown one counts as the
    first, so that the next offer is tried; if offer after offer is refused like that, it is the request.
    """

    def __init__(self) -> None:
        self._refused: set[OfferId] = set()
        self._forbidden: set[OfferId] = set()

    def is_request_suspect(self, offer: OfferId) -> bool:
        """Record a refused offer; whether so many different ones were refused in a row that the request is suspect."""
        self._refused.add(offer)
        return len(self._refused) >= UNEXPLAINED_MAX

    def is_key_suspect(self, offer: OfferId) -> bool:
        """Record a forbidden offer; whether so many different ones were forbidden in a row that the key is suspect.

        A key that may only read is refused every create in words that read like a pool this account may not use.
        """
        self._forbidden.add(offer)
        return len(self._forbidden) >= UNEXPLAINED_MAX

    def forget(self) -> None:
        """Forget all refusals, since a create was understood."""
        self._refused.clear()
        self._forbidden.clear()


def refusal_of_create(
    refused: RunpodRefused, request: LaunchRequest, unexplained: UnexplainedRefusals
) -> ProviderError:
    """Translate a refused create into an error of the contract; no pod was made."""
    said = refused.detail or f"HTTP {refused.status}"
    wrong = RequestRejected(f"RunPod refused the request ({refused.status}): {said}", field="request", reason=said)
    if refused.status in (413, 422):
        return wrong
    known = refusal_in_words(refused.detail, said)
    if known is not None:
        unexplained.forget()
        return known
    if refused.status == 403 and says(refused.detail, SCOPE_WORDS):
        return AuthFailed(f"the RunPod API key may not create pods: {said}")
    if refused.status == 403 and unexplained.is_key_suspect(request.offer.offer_id):
        return AuthFailed(
            f"RunPod forbids every create with this key: {said}; give it write access, `spotctl doctor` checks it"
        )
    if refused.status == 403:
        return NoCapacity(f"this account may not rent this kind of pod: {said}")
    if refused.status in (404, 410):
        return OfferGone(f"RunPod does not know this GPU any more: {said}")
    if refused.status in (400, 409):
        if unexplained.is_request_suspect(request.offer.offer_id):
            return wrong
        return NoCapacity(f"RunPod did not make the pod, perhaps for want of machines: {said}")
    return Unavailable(f"RunPod refused the pod: {said}")


def refusal_in_words(text: str, said: str) -> ProviderError | None:
    """Translate a known sentence of RunPod's; `None` for others."""
    if says(text, BALANCE_WORDS):
        return NoBalance(f"the RunPod account's balance is too low: {said}")
    if says(text, QUOTA_WORDS):
        return QuotaExceeded(f"a limit of the RunPod account is reached: {said}")
    if says(text, NO_CAPACITY_WORDS):
        return NoCapacity(f"RunPod has no such machine now: {said}")
    return None

"""What hosts are given in place of a bucket's keys: signed forms, or credentials that reach one prefix.

The probe decides which of them a store can be trusted with; here they are only made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, assert_never
from urllib.parse import urlsplit

from spotd_jobs.objects.credentials import B2_HOST, R2_HOST, CredentialCache, Minter, R2Minter, StsMinter
from spotd_jobs.objects.credentials_b2 import B2Minter
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.objects.s3_signing import Signer

CHECKSUM_FIELD: Final = "x-amz-checksum-sha256"
AUTO: Final = "auto"


class GrantMethod(StrEnum):
    """How hosts get write permission. The values are those of `grants` in the config."""

    FORM = "form"
    STS = "sts"
    R2 = "r2"
    B2 = "b2"


def methods_for(place: S3Place) -> tuple[GrantMethod, ...]:
    """Return what is worth trying with this store, best first.

    A form is best: it limits the size of each object, and cannot read, list or delete whatever the store thinks.
    """
    if place.grants != AUTO:
        return (GrantMethod(place.grants),)
    host = (urlsplit(place.endpoint_url or "").hostname or "").lower()
    if host.endswith(R2_HOST):
        return (GrantMethod.R2,)
    if host.endswith(B2_HOST):
        return (GrantMethod.B2,)
    if place.role_arn is not None or place.endpoint_url is None:
        return (GrantMethod.FORM, GrantMethod.STS)
    return (GrantMethod.FORM,)


def folder_of(key: str) -> str:
    """All of the key before its last part."""
    return key[: key.rfind("/") + 1]


class S3Grants:
    """Makes forms and credentials for one place, by a clock that is given."""

    def __init__(
        self,
        place: S3Place,
        signer: Signer,
        clock: Callable[[], datetime],
        store_errors: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._place = place
        self._signer = signer
        self._clock = clock
        self._store_errors = store_errors
        self._caches: dict[GrantMethod, CredentialCache] = {}

    def form(self, prefix: str, *, expires: datetime, size_max: int, checksums: bool) -> dict[str, Any]:
        """Return a signed POST policy, as `UploadGrant.fields`."""
        key_prefix = self._place.prefix + prefix
        conditions: list[Any] = [["content-length-range", 0, size_max]]
        if checksums:
            conditions.append(["starts-with", f"${CHECKSUM_FIELD}", ""])
        with self._store_errors(prefix):
            url, form = self._signer.form(key_prefix, expires=expires, conditions=conditions)
        if checksums:
            form[CHECKSUM_FIELD] = ""
        return {"url": url, "form": form, "key_prefix": key_prefix}

    def form_of(self, key: str, *, expires: datetime, size_max: int) -> dict[str, Any]:
        """Return a signed POST policy that names the one key it is good for."""
        full = self._place.prefix + key
        with self._store_errors(key):
            conditions = [["content-length-range", 0, size_max]]
            url, form = self._signer.form(full, expires=expires, conditions=conditions, exact=True)
        return {"url": url, "form": form, "key_prefix": folder_of(full)}

    def credential(
        self, method: GrantMethod, prefix: str, *, expires: datetime, checksums: bool, also: str = ""
    ) -> tuple[dict[str, Any], datetime]:
        """Return a credential as `UploadGrant.fields`, and its end, which may be another instant than asked for.

        Args:
            also: one object outside the prefix that may be put, too.

        Raises:
            StoreError: the service that makes them refuses or is away.
        """
        key_prefix = self._place.prefix + prefix
        made = self._credential_cache(method).credential(
            key_prefix, expires=expires, also=self._place.prefix + also if also else ""
        )
        fields = {
            "endpoint": self._signer.endpoint,
            "bucket": self._place.bucket,
            "region": self._signer.region,
            "path_style": self._signer.path_style,
            "access_key": made.access_key,
            "secret_key": made.secret_key,
            "session_token": made.session_token,
            "key_prefix": key_prefix,
            "checksum": checksums,
        }
        return fields, made.expires

    def revoke(self, method: GrantMethod, prefix: str) -> None:
        """Revoke what can be revoked of a prefix's newest credential."""
        if method is not GrantMethod.FORM:
            self._credential_cache(method).revoke(self._place.prefix + prefix)

    def _credential_cache(self, method: GrantMethod) -> CredentialCache:
        if method not in self._caches:
            self._caches[method] = CredentialCache(self._minter(method), self._clock)
        return self._caches[method]

    def _minter(self, method: GrantMethod) -> Minter:
        match method:
            case GrantMethod.R2:
                return R2Minter(self._place)
            case GrantMethod.B2:
                return B2Minter(self._place)
            case GrantMethod.STS:
                return StsMinter(self._place)
            case GrantMethod.FORM:
                raise ValueError("a form needs no credential")
            case _:
                assert_never(method)

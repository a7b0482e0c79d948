"""What of a bucket's own settings costs money or checkpoints, found by reading them. Nothing is ever changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotd_jobs.objects.api import Advice, ObjectMissing, StoreError, StoreUnavailable
from spotd_jobs.objects.s3_errors import store_errors

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from spotd_jobs.objects.s3_client import S3Place

_ABORT = "add a lifecycle rule that aborts incomplete multipart uploads after a day or two"
_EXPIRE_OLD = (
    "add a lifecycle rule with NoncurrentVersionExpiration of NoncurrentDays = 7"
    " and Expiration of ExpiredObjectDeleteMarker = true; docs/stores.md has it whole"
)


def advice(client: S3Client, place: S3Place) -> list[Advice]:
    """Return what is right or wrong with unfinished uploads, with expiry and with versions, as far as the key may read.

    Raises:
        StoreUnavailable
    """
    try:
        rules = _rules(client, place)
    except StoreUnavailable:
        raise
    except StoreError:
        unread = "this key may not read the bucket's lifecycle rules"
        return [
            Advice(name="lifecycle", detail=unread, hint="allow s3:GetLifecycleConfiguration, or read them yourself")
        ]
    found = [_of_parts(rules, place.prefix), *_of_ends(rules, place.prefix)]
    return [*found, _of_versions(rules, place.prefix)] if keeps_versions(client, place) else found


def keeps_versions(client: S3Client, place: S3Place) -> bool:
    """Whether what is deleted or overwritten stays; `False` where that may not be asked."""
    try:
        with store_errors(place, ""):
            return client.get_bucket_versioning(Bucket=place.bucket).get("Status") == "Enabled"
    except StoreUnavailable:
        raise
    except StoreError:
        return False


def _rules(client: S3Client, place: S3Place) -> list[Any]:
    from botocore.exceptions import ClientError

    try:
        with store_errors(place, ""):
            answer = client.get_bucket_lifecycle_configuration(Bucket=place.bucket)
    except ObjectMissing:
        return []
    except StoreError as exc:
        cause = exc.__cause__
        code = cause.response.get("Error", {}).get("Code") if isinstance(cause, ClientError) else ""
        if code == "NoSuchLifecycleConfiguration":
            return []
        raise
    return [rule for rule in answer.get("Rules", ()) if rule.get("Status") == "Enabled"]


def _of_parts(rules: list[Any], prefix: str) -> Advice:
    if any("AbortIncompleteMultipartUpload" in rule and _is_for_all(rule, prefix) for rule in rules):
        return Advice(name="unfinished uploads", detail="a lifecycle rule aborts them")
    detail = "no lifecycle rule aborts them: parts that a power cut left behind are invisible and billed"
    return Advice(name="unfinished uploads", detail=detail, hint=_ABORT)


def _of_versions(rules: list[Any], prefix: str) -> Advice:
    for rule in rules:
        days = (rule.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays")
        if days is not None and _is_for_all(rule, prefix):
            return Advice(name="old versions", detail=f"a lifecycle rule deletes them after {days} days")
    detail = "the bucket keeps every version and no lifecycle rule ends them: what spotd deletes stays and is billed"
    return Advice(name="old versions", detail=detail, hint=_EXPIRE_OLD)


def _of_ends(rules: list[Any], prefix: str) -> list[Advice]:
    """Warn of a rule that deletes by age: it deletes what a checkpoint on the list still refers to."""
    found = []
    for rule in rules:
        begin = _prefix_of(rule)
        if "Expiration" in rule and (begin.startswith(prefix) or prefix.startswith(begin)):
            days = rule["Expiration"].get("Days")
            if days is None and "Date" not in rule["Expiration"]:
                continue  # it only takes away what is left of deleted objects
            when = f"after {days} days" if days is not None else "on a date"
            detail = f"a lifecycle rule deletes objects below {begin or 'everything'!r} {when}, needed or not"
            found.append(
                Advice(
                    name="expiry",
                    detail=detail,
                    ok=False,
                    hint="remove it: spotd deletes what is not needed",
                )
            )
    return found


def _is_for_all(rule: Any, prefix: str) -> bool:
    """Whether the rule concerns everything below the prefix, whatever its size and tags."""
    where = rule.get("Filter") or {}
    narrower = {*where, *(where.get("And") or {})} - {"Prefix", "And"}
    return prefix.startswith(_prefix_of(rule)) and not narrower


def _prefix_of(rule: Any) -> str:
    where = rule.get("Filter") or {}
    return str(rule.get("Prefix") or where.get("Prefix") or (where.get("And") or {}).get("Prefix") or "")

"""Responses for tests of how `spotctl` shows them: complete, with defaults, overridden by name."""

from __future__ import annotations

from typing import Any, cast

from spotd.api.schemas.answers import EventResponse, LogResponse, PlanResponse, ProviderResponse, WhyResponse
from spotd.api.schemas.costs import (
    AttemptCostResponse,
    CostGroupResponse,
    CostResponse,
    HistoryResponse,
    PastBucketResponse,
    PollResponse,
    QuoteResponse,
    ReceiptResponse,
)
from spotd.api.schemas.jobs import (
    AttemptResponse,
    CheckpointResponse,
    JobDetailResponse,
    JobResponse,
    KeptCheckpointResponse,
    TransferResponse,
)

NOW = "2026-11-21T10:00:00.000Z"
EARLIER = "2026-11-21T07:00:00.000Z"


def checkpoint(**given: Any) -> CheckpointResponse:
    base: CheckpointResponse = {
        "name": "step-1200",
        "attempt": 1,
        "step": 1200,
        "bytes": 1_500_000,
        "at": "2026-11-21T09:30:00.000Z",
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # a test overrides keys of the shape by name


def transfer(**given: Any) -> TransferResponse:
    base: TransferResponse = {
        "kind": "upload",
        "checkpoint": "step-1300",
        "bytes_done": 1_200_000_000,
        "bytes_total": 4_000_000_000,
        "bytes_per_s": 80_000_000,
        "seconds_left": 35.0,
        "queued": 0,
        "failing": "",
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def kept_checkpoint(**given: Any) -> KeptCheckpointResponse:
    base: KeptCheckpointResponse = {
        **checkpoint(),
        "job": "6k0a1b2c3d",
        "metric": None,
        "best": False,
        "pinned": False,
        "manifest_sha256": "ab" * 32,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def attempt(**given: Any) -> AttemptResponse:
    base: AttemptResponse = {
        "attempt": 1,
        "state": "running",
        "provider": "local",
        "host": "h3",
        "region": "here",
        "market": "spot",
        "gpu": "H100",
        "gpu_count": 1,
        "nodes": 1,
        "effective_usd_h": 2.31,
        "ceiling_usd_gpu_h": 2.4,
        "on_demand_usd_h": 3.9,
        "intended_at": "2026-11-21T08:00:00.000Z",
        "launched_at": "2026-11-21T08:00:01.000Z",
        "running_at": "2026-11-21T08:01:00.000Z",
        "ended_at": None,
        "resumed_from": None,
        "reason": None,
        "detail": "",
        "exit_code": None,
        "spent_usd": 4.62,
        "estimated": False,
        "on_demand_usd": 7.8,
        "bid": None,
        "taken_over_from": None,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def job(**given: Any) -> JobResponse:
    base: JobResponse = {
        "id": "6k0a1b2c3d",
        "name": "llama-lora",
        "state": "RUNNING",
        "reason": "runs on local h3",
        "provider": "local",
        "host": "h3",
        "gpu": "H100",
        "gpu_count": 1,
        "nodes": 1,
        "attempt": 1,
        "attempts": [attempt()],
        "effective_usd_h": 2.31,
        "spent_usd": 4.62,
        "estimated": False,
        "on_demand_usd": 7.8,
        "saved_usd": 3.18,
        "recoveries": 0,
        "checkpoint": checkpoint(),
        "submitted_at": EARLIER,
        "started_at": "2026-11-21T08:01:00.000Z",
        "ended_at": None,
        "verdict": "runs at $2.31 per GPU-hour, under the ceiling of $2.40",
        "exit_code": None,
        "transfer": None,
        "gpus": [],
        "uncompared_usd": 0.0,
        "summary": "",
        "checkpoint_late": "",
        "array": None,
        "ceiling_usd_gpu_h": 2.4,
        "stage": None,
        "moves": 0,
        "submitted_by": "",
        "gpu_wanted": "H100:1",
        "failure": None,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def waiting_job(**given: Any) -> JobResponse:
    return job(
        **{
            "id": "6k0a9zzzzz",
            "name": "prep",
            "state": "WAITING_PRICE",
            "reason": "the lowest H100 costs $2.61, the ceiling is $2.40",
            "provider": None,
            "host": None,
            "attempt": 0,
            "attempts": [],
            "effective_usd_h": None,
            "spent_usd": 0.0,
            "estimated": False,
            "on_demand_usd": 0.0,
            "saved_usd": 0.0,
            "checkpoint": None,
            "started_at": None,
            "verdict": "the lowest H100 costs $2.61, the ceiling is $2.40",
            **given,
        }
    )


def detail(row: JobResponse) -> JobDetailResponse:
    return {
        "job": row,
        "spec": {"image": "pytorch/pytorch:2.9.0", "run": ["/bin/sh", "-c", "python train.py"], "secrets": ["TOKEN"]},
        "code_sha256": "ab" * 32,
        "code_bytes": 12_345,
        "priority": 0,
        "lost_s": 372.0,
        "ceiling_usd_gpu_h": 2.4,
        "ceilings": {"H100_SXM": 2.4},
        "budget_usd": 120.0,
        "phase": "run",
        "checkpoint_advice": "",
        "set_aside": [],
    }


def past_bucket(**given: Any) -> PastBucketResponse:
    base: PastBucketResponse = {
        "at": EARLIER,
        "begins": EARLIER,
        "offers": 12.25,
        "imported": 0.0,
        "low_usd_gpu_h": 1.9,
        "p10_usd_gpu_h": 2.0,
        "p25_usd_gpu_h": 2.1,
        "median_usd_gpu_h": 2.31,
        "p75_usd_gpu_h": 2.6,
        "p90_usd_gpu_h": 2.9,
        "high_usd_gpu_h": 3.4,
    }
    return cast(PastBucketResponse, {**base, **given})


def history(**given: Any) -> HistoryResponse:
    base: HistoryResponse = {
        "since": "2026-11-14T10:00:00.000Z",
        "until": NOW,
        "bucket_s": 21_600,
        "disk_gb": 10,
        "trouble": "",
        "prices": [{"gpu": "H100_SXM", "market": "spot", "buckets": [past_bucket()]}],
    }
    return cast(HistoryResponse, {**base, **given})


def quote(**given: Any) -> QuoteResponse:
    base: QuoteResponse = {
        "provider": "vast",
        "offer": "771",
        "host": "4410",
        "region": "SE",
        "market": "spot",
        "interruption": "sudden",
        "gpu": "H100",
        "gpu_count": 1,
        "nodes": 1,
        "gpu_vram_gb": 80.0,
        "reliability": 0.99,
        "effective_usd_h": 2.31,
        "effective_usd_gpu_h": 2.31,
        "floor_usd_gpu_h": 2.31,
        "bid_usd_gpu_h": 2.4,
        "on_demand_usd_h": 3.9,
        "ceiling_usd_gpu_h": 2.4,
        "fits": True,
        "verdict": "ok",
        "breakdown": {
            "gpu_usd_h": 1.85,
            "storage_usd_h": 0.0417,
            "fee_usd_h": 0.3783,
            "fee_multiplier": 1.2,
            "upload_usd_h": 0.03,
            "restore_usd_h": 0.01,
            "total_usd_h": 2.31,
            "per_gpu_usd_h": 2.31,
        },
        "at": NOW,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def board(**given: Any) -> PollResponse:
    base: PollResponse = {"provider": "vast", "offers": 1, "at": NOW, "error": "", "note": ""}
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def plan(**given: Any) -> PlanResponse:
    base: PlanResponse = {
        "name": "llama-lora",
        "spec": {},
        "run": "python train.py",
        "image": "pytorch/pytorch:2.9.0",
        "workdir": None,
        "secrets": [],
        "ceilings": {"H100": 2.4},
        "budget_usd": 120.0,
        "resume_from": None,
        "data": [],
        "data_cost": "",
        "candidates": [quote()],
        "costs": [],
        "passed_over": [{"reason": "less disk than 100 GB", "offers": 12}],
        "offers": [board()],
        "fits": True,
        "verdict_kind": "placed",
        "verdict": "would start now on vast/4410",
        "unprotected": "",
        "warnings": [],
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def why(**given: Any) -> WhyResponse:
    base: WhyResponse = {
        "id": "6k0a9zzzzz",
        "name": "prep",
        "state": "WAITING_PRICE",
        "sentence": "the lowest H100 costs $2.61, the ceiling is $2.40",
        "kind": "above_ceiling",
        "at": NOW,
        "until": None,
        "ceiling_usd_gpu_h": 2.4,
        "best": quote(),
        "costs": [],
        "passed_over": [{"reason": "above the ceiling", "offers": 40}],
        "offers": [board()],
        "stage": None,
        "placed": [],
        "failure": None,
        "events": [event()],
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def event(**given: Any) -> EventResponse:
    base: EventResponse = {
        "id": 1,
        "at": EARLIER,
        "kind": "job.submitted",
        "message": "queued",
        "job": "6k0a1b2c3d",
        "job_name": "llama-lora",
        "attempt": None,
        "data": {},
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def log(text: str = "", *, kind: str = "log", cursor: int, attempt: int = 1, state: str | None = None) -> LogResponse:
    return {
        "kind": kind,  # type: ignore[typeddict-item]  # a test may name any kind
        "cursor": str(cursor),
        "attempt": attempt,
        "at": NOW,
        "text": text,
        "state": state,
        "exit_code": None,
    }


def cost_group(**given: Any) -> CostGroupResponse:
    base: CostGroupResponse = {
        "key": "6k0a1b2c3d",
        "name": "llama-lora",
        "machines": 2,
        "seconds": 7200.0,
        "gpu_usd": 3.5,
        "disk_usd": 0.1,
        "traffic_usd": 0.02,
        "fee_usd": 0.9,
        "free_usd": 0.0,
        "booked_usd": 4.52,
        "corrected_usd": 0.1,
        "spent_usd": 4.62,
        "estimated": False,
        "uncompared_usd": 0.0,
        "on_demand_usd": 7.8,
        "saved_usd": 3.18,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def attempt_cost(**given: Any) -> AttemptCostResponse:
    base: AttemptCostResponse = {
        "attempt": 1,
        "provider": "local",
        "host": "h3",
        "gpu": "H100",
        "gpu_count": 1,
        "nodes": 1,
        "market": "spot",
        "effective_usd_h": 2.31,
        "on_demand_usd_h": 3.9,
        "started_at": "2026-11-21T08:00:00.000Z",
        "ended_at": "2026-11-21T10:00:00.000Z",
        "seconds": 7200.0,
        "free_usd": 0.0,
        "spent_usd": 4.62,
        "estimated": False,
        "on_demand_usd": 7.8,
        "traffic_usd": 0.0,
        "egress_usd": 0.0,
        "uploaded_bytes": 0,
        "restored_bytes": 0,
        "reason": "preempted",
        "gpu_usd": 0.0,
        "disk_usd": 0.0,
        "fee_usd": 0.0,
        "corrected_usd": 0.0,
        "kept_s": 0.0,
        "kept_usd": 0.0,
        "billed_usd": None,
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def receipt(**given: Any) -> ReceiptResponse:
    base: ReceiptResponse = {
        "id": "6k0a1b2c3d",
        "name": "llama-lora",
        "state": "SUCCEEDED",
        "spent_usd": 4.62,
        "estimated": False,
        "on_demand_usd": 7.8,
        "saved_usd": 3.18,
        "own_saved_usd": None,
        "recoveries": 1,
        "lost_s": 372.0,
        "budget_usd": 120.0,
        "attempts": [attempt_cost()],
        "fallbacks": [],
        "corrections": [],
        "uncompared_usd": 0.0,
        "summary": "",
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above


def cost(*receipts: ReceiptResponse) -> CostResponse:
    return {
        "receipts": [*receipts],
        "spent_usd": sum(r["spent_usd"] for r in receipts),
        "estimated": False,
        "on_demand_usd": sum(r["on_demand_usd"] for r in receipts),
        "saved_usd": sum(r["saved_usd"] for r in receipts),
        "uncompared_usd": sum(r["uncompared_usd"] for r in receipts),
        "recoveries": sum(r["recoveries"] for r in receipts),
        "lost_s": sum(r["lost_s"] for r in receipts),
        "budgets": [],
        "more": 0,
        "strays": [],
    }


def provider(**given: Any) -> ProviderResponse:
    base: ProviderResponse = {
        "name": "vast",
        "title": "vast.ai",
        "enabled": True,
        "ok": True,
        "detail": "64 offers",
        "offers": 64,
        "machines": 1,
        "last_poll_at": "2026-11-21T09:59:30.000Z",
        "last_listing_at": NOW,
        "fee_multiplier": 1.2,
        "requests_h": 372,
        "requests_min": 7,
        "balance_usd": None,
        "balance_at": None,
        "spend_usd_h": 0.0,
        "runway_s": None,
        "capabilities": [
            {"power": "bid_change", "available": True, "reason": ""},
            {"power": "notices", "available": False, "reason": "vast.ai stops machines without a word"},
        ],
    }
    return {**base, **given}  # type: ignore[typeddict-item]  # as above

"""The daemon's API as plain calls. Answers are the JSON objects of `spotd.api.schemas`, with `schema` and `now`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import quote

from spotd import paths
from spotd.client.transport import (
    ADOPTION_S,
    ANSWER_S,
    PATIENT_S,
    DaemonRefused,
    DaemonUnreachable,
    Query,
    Transport,
)

if TYPE_CHECKING:  # a command that does not print a type does not load it
    from spotd.api.schemas import answers
    from spotd.api.schemas import jobs as schemas
    from spotd.api.schemas.costs import CostResponse, HistoryResponse, LedgerResponse, PriceImportAnswer, PricesResponse
    from spotd.client.remote import Remote

SPANS_MAX: Final = 200
"""So that the line of a request stays within what every server takes."""


class Daemon:
    """One daemon, found by its socket. Every call may raise `DaemonUnreachable` or `DaemonRefused`.

    Without a socket it is the daemon that `SPOTCTL_URL` names, else the one of this computer.
    """

    def __init__(self, socket: Path | None = None) -> None:
        remote = _remote() if socket is None and os.environ.get("SPOTCTL_URL") else None
        self._transport = Transport(paths.socket_path(os.environ) if socket is None else socket, remote)

    @property
    def place(self) -> str:
        """Where it is, for messages: a socket or a URL."""
        return self._transport.place

    def close_streams(self) -> None:
        """Let the streams of this object, which other threads read, end at the next sign of the daemon."""
        self._transport.is_closing = True

    def status(self) -> answers.DaemonStatusAnswer:
        return self._transport.json("GET", "/v1/status")

    def plan(self, draft: Mapping[str, Any], *, resume_from: str = "", array: str = "") -> answers.PlanAnswer:
        body: dict[str, Any] = {"draft": draft, "resume_from": resume_from, "array": array}
        return self._transport.json("POST", "/v1/plan", body=body, timeout_s=PATIENT_S)

    def has_code(self, sha256: str) -> bool:
        return bool(self._transport.json("GET", f"/v1/code/{sha256}", timeout_s=PATIENT_S).get("present"))

    def put_code(self, sha256: str, content: IO[bytes], size: int) -> answers.CodeAnswer:
        return self._transport.upload(f"/v1/code/{sha256}", content, size)

    def datasets(self) -> schemas.DatasetsAnswer:
        return self._transport.json("GET", "/v1/data", timeout_s=PATIENT_S)

    def has_data_chunk(self, sha256: str) -> bool:
        answer = self._transport.json("GET", f"/v1/data/chunks/{sha256}", timeout_s=PATIENT_S)
        return bool(answer.get("present"))

    def put_data_chunk(self, sha256: str, content: IO[bytes], size: int) -> schemas.StoredAnswer:
        return self._transport.upload(f"/v1/data/chunks/{sha256}", content, size)

    def put_data_part(self, sha256: str, content: IO[bytes], size: int) -> schemas.StoredAnswer:
        return self._transport.upload(f"/v1/data/parts/{sha256}", content, size)

    def store_dataset(self, root: str) -> schemas.DatasetAnswer:
        return self._transport.json("POST", "/v1/data", body={"root": root}, timeout_s=PATIENT_S)

    def name_dataset(self, name: str, root: str) -> schemas.DatasetAnswer:
        body = {"root": root}
        return self._transport.json("POST", f"/v1/data/{quote(name, safe='')}", body=body, timeout_s=PATIENT_S)

    def remove_dataset(self, name: str) -> schemas.DatasetAnswer:
        return self._transport.json("POST", f"/v1/data/{quote(name, safe='')}/remove", timeout_s=PATIENT_S)

    def submit(
        self,
        draft: Mapping[str, Any],
        *,
        code_sha256: str | None = None,
        secrets: Mapping[str, str] | None = None,
        resume_from: str = "",
        array: str = "",
        i_know: bool = False,
        agent: bool = False,
    ) -> schemas.JobDetailResponse:
        body = {"draft": draft, "code_sha256": code_sha256, "secrets": secrets or {}}
        used: dict[str, Any] = {"resume_from": resume_from, "array": array, "i_know": i_know, "agent": agent}
        body |= {key: value for key, value in used.items() if value}  # an older daemon may not know the others
        return self._transport.json("POST", "/v1/jobs", body=body)

    def jobs_bytes(self, query: Query) -> bytes:
        """Return the answer unparsed: with a thousand jobs, parsing it only to print it takes half of the time."""
        return self._transport.json_bytes("GET", "/v1/jobs", query=query)

    def jobs(self, query: Query | None = None, *, timeout_s: float = ANSWER_S) -> schemas.JobPageResponse:
        return self._transport.json("GET", "/v1/jobs", query=query, timeout_s=timeout_s)

    def job(self, ref: str) -> schemas.JobDetailResponse:
        return self._transport.json("GET", _job(ref))

    def why(self, ref: str) -> answers.WhyAnswer:
        return self._transport.json("GET", _job(ref, "why"))

    def gpu_history(self, ref: str) -> schemas.GpuHistoryResponse:
        return self._transport.json("GET", _job(ref, "gpus"))

    def shell(self, ref: str) -> schemas.ShellResponse:
        return self._transport.json("GET", _job(ref, "shell"), timeout_s=PATIENT_S)

    def port(self, ref: str, port: int) -> Iterator[schemas.PortResponse]:
        """Yield first the socket that leads to a port of the machine, and last why it does so no more."""
        return self._transport.lines(_job(ref, f"ports/{port}"))

    def logs(self, ref: str, query: Query | None = None, *, follow: bool = False) -> Iterator[answers.LogResponse]:
        """Yield what the job wrote; with `follow`, go on until it has ended."""
        return self._transport.lines(_job(ref, "logs"), query=_streaming(query, follow=follow))

    def cancel(self, ref: str) -> answers.JobOrArrayAnswer:
        return self._transport.json("POST", _job(ref, "cancel"))

    def retry(self, ref: str, *, anyway: bool = False, start: int = 0) -> answers.JobOrArrayAnswer:
        query: Query = {**({"anyway": 1} if anyway else {}), **({"start": start} if start else {})}
        return self._transport.json("POST", _job(ref, "retry"), query=query, timeout_s=PATIENT_S)

    def set_budget(self, ref: str, budget: str) -> answers.JobAnswer:
        return self._transport.json("POST", _job(ref, "budget"), body={"budget": budget})

    def set_ceiling(self, ref: str, ceiling: str) -> answers.JobOrArrayAnswer:
        return self._transport.json("POST", _job(ref, "ceiling"), body={"ceiling": ceiling})

    def forget(self, machine: str) -> answers.ForgottenAnswer:
        return self._transport.json("POST", "/v1/machines/forget", body={"machine": machine})

    def prices(self, query: Query | None = None) -> PricesResponse:
        return self._transport.json("GET", "/v1/prices", query=query)

    def history(self, query: Query | None = None) -> HistoryResponse:
        return self._transport.json("GET", "/v1/history", query=query)

    def import_offers(self, body: Mapping[str, Any]) -> PriceImportAnswer:
        return self._transport.json("POST", "/v1/history/offers", body=body, timeout_s=PATIENT_S)

    def import_prices(self, provider: str, since_s: int, after: str = "") -> PriceImportAnswer:
        body = {"provider": provider, "since_s": since_s, "after": after}
        return self._transport.json("POST", "/v1/history/import", body=body, timeout_s=PATIENT_S)

    def events(self, query: Query | None = None, *, follow: bool = False) -> Iterator[answers.EventResponse]:
        """Yield events, oldest first; with `follow`, go on as they happen."""
        return self._transport.lines("/v1/events", query=_streaming(query, follow=follow))

    def cost(self, ref: str | None = None) -> CostResponse:
        return self._transport.json("GET", "/v1/cost" if ref is None else _job(ref, "cost"))

    def cost_by(self, what: str) -> LedgerResponse:
        return self._transport.json("GET", "/v1/cost", query={"by": what})

    def calibration(self) -> answers.CalibrationAnswer:
        return self._transport.json("GET", "/v1/calibration")

    def checkpoints(self, ref: str) -> answers.CheckpointsAnswer:
        return self._transport.json("GET", _job(ref, "checkpoints"))

    def verify_checkpoints(self, ref: str, query: Query | None = None) -> Iterator[schemas.VerificationResponse]:
        return self._transport.lines(_job(ref, "checkpoints/verify"), query=query)

    def pin_checkpoints(self, ref: str, names: Sequence[str], *, pinned: bool) -> answers.CheckpointsAnswer:
        body = {"checkpoints": [*names], "pinned": pinned}
        return self._transport.json("POST", _job(ref, "checkpoints/pin"), body=body)

    def remove_checkpoints(self, ref: str, names: Sequence[str]) -> answers.CheckpointsAnswer:
        return self._transport.json("POST", _job(ref, "checkpoints/remove"), body={"checkpoints": [*names]})

    def files(self, ref: str, checkpoint: str | None = None) -> schemas.FilesResponse:
        return self._transport.json("GET", _job(ref, "files"), query={"checkpoint": checkpoint}, timeout_s=PATIENT_S)

    def read_file(self, ref: str, checkpoint: str | None, path: str) -> Iterator[bytes]:
        return self._transport.chunks(_job(ref, "files/content"), query={"checkpoint": checkpoint, "path": path})

    def read_files(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> Iterator[bytes]:
        """Yield many files one behind the other. A request names a bounded number of spans."""
        for start in range(0, len(spans), SPANS_MAX):
            some = ",".join(f"{first}-{last}" for first, last in spans[start : start + SPANS_MAX])
            query: Query = {"checkpoint": checkpoint, "manifest": manifest, "files": some}
            yield from self._transport.chunks(_job(ref, "files/contents"), query=query)

    def providers(self) -> answers.ProvidersAnswer:
        return self._transport.json("GET", "/v1/providers")

    def hosts(self) -> answers.HostsResponse:
        return self._transport.json("GET", "/v1/hosts")

    def forget_host(self, host: str) -> answers.ForgottenHostsAnswer:
        return self._transport.json("POST", "/v1/hosts/forget", body={"host": host})

    def test_notifications(self, channel: str | None) -> answers.ChannelTestsAnswer:
        body = {"channel": channel}
        return self._transport.json("POST", "/v1/notify/test", body=body, timeout_s=PATIENT_S)

    def doctor(self) -> answers.DoctorResponse:
        return self._transport.json("GET", "/v1/doctor", timeout_s=PATIENT_S)

    def reconcile(self) -> answers.ReconcileResponse:
        return self._transport.json("POST", "/v1/reconcile", timeout_s=PATIENT_S)

    def adoption(self) -> answers.AdoptionResponse:
        return self._transport.json("GET", "/v1/adoption", timeout_s=ADOPTION_S)

    def adopt(self, secrets: Mapping[str, str]) -> answers.AdoptionResponse:
        body = {"secrets": dict(secrets)}
        return self._transport.json("POST", "/v1/adoption", body=body, timeout_s=ADOPTION_S)


def _job(ref: str, part: str = "") -> str:
    """Return the target of one job.

    Raises:
        DaemonRefused: text that can be neither id nor name, and would name another target.
    """
    if not ref or "/" in ref or ref in {".", ".."} or not ref.isprintable():
        raise DaemonRefused(f"there is no job {ref!r}", code="not_found", hint="spotctl ls")
    return f"/v1/jobs/{quote(ref, safe='')}" + (f"/{part}" if part else "")


def _streaming(query: Query | None, *, follow: bool) -> Query | None:
    return {**(query or {}), "follow": 1} if follow else query


def _remote() -> Remote | None:
    from spotd.client.remote import RemoteRefused, remote_in

    try:
        return remote_in(os.environ)
    except RemoteRefused as exc:
        raise DaemonUnreachable(exc.message, hint=exc.hint) from exc

"""Datasets: stored once by their content, named, listed and forgotten."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from spotd.api.handlers.context import DaemonAnswers, HandlerContext
from spotd.api.requests import FolderContent, utc_text
from spotd.api.responses import ApiUnavailable, Invalid, NotFound, StateConflict
from spotd.api.schemas.jobs import DatasetResponse
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import World
from spotd.daemon.datasets import BadDataset, Content, Dataset, Datasets, Incomplete
from spotd.daemon.hub import SourceAway, SourceRefused
from spotd.daemon.remote_data import UrlRefused
from spotd.store import Reads
from spotd.words import count
from spotd_jobs.spec.data import DATA_SCHEME
from spotd_jobs.spec.model import DataSource, JobSpec
from spotd_jobs.spec.problems import Problem
from spotd_jobs.wire.client.dataset import data_chunk_key, digest_of, listing_text

PUT_HINT = "spotctl data put NAME DIR stores a folder, spotctl data ls shows what is stored"
FOLDER_HINT = "submit with spotctl, which stores it; or spotctl data put NAME DIR, then the name as source"


class DataHandlers(DaemonAnswers):
    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self._datasets = context.datasets

    async def has_chunk(self, sha256: str) -> bool:
        """Return whether the store holds this chunk."""
        return await self._context.stored(lambda: self._datasets.has_chunk(sha256))

    async def put_chunk(self, sha256: str, stream: AsyncIterator[bytes]) -> int:
        """Store the chunk under its hash; return its size.

        Raises:
            Invalid: the bytes have another hash.
            ApiUnavailable: the store does not answer or is full.
        """
        digest, size = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(prefix="data-", dir=self._context.spool)
        path = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                async for piece in stream:
                    digest.update(piece)
                    size += len(piece)
                    file.write(piece)
            if digest.hexdigest() != sha256:
                raise Invalid("a chunk arrived with another content than announced", hint="run it again")
            await self._context.stored(lambda: self._context.objects.put_file(data_chunk_key(sha256), path))
        except OSError as exc:
            raise ApiUnavailable(f"the chunk cannot be kept: {exc.strerror}", hint="free some disk space") from exc
        finally:
            await self._context.stored(lambda: path.unlink(missing_ok=True))
        return size

    async def put_part(self, sha256: str, stream: AsyncIterator[bytes]) -> int:
        """Store a list of files under its hash; return its size.

        Raises:
            Invalid: it is none, or has another hash.
        """
        text = b"".join([piece async for piece in stream])
        try:
            await self._context.stored(lambda: self._datasets.put_part(sha256, text))
        except BadDataset as exc:
            raise Invalid(str(exc), hint="spotctl and the daemon may be of different versions") from exc
        return len(text)

    async def give_name(self, name: str, root: str) -> DatasetResponse | list[str]:
        """Let the name mean this dataset; return what the store lacks of it instead, if it lacks something.

        Raises:
            Invalid: it is no dataset, or no name of one.
        """
        now = self._context.wall.now()
        try:
            made = await self._context.stored(lambda: self._datasets.give_name(name, root.encode(), now))
        except BadDataset as exc:
            raise Invalid(str(exc), hint="a name has a-z, 0-9, '.', '_' and '-', as in imagenet-1k") from exc
        if isinstance(made, Incomplete):
            return list(made.missing)
        self._context.log.info("data.stored", name=name, sha256=made.sha256, bytes=made.bytes, files=made.files)
        return _response(made, self._context.world())

    async def store(self, root: str) -> DatasetResponse | list[str]:
        """Keep this dataset without a name; return what the store lacks of it instead, if it lacks something.

        Raises:
            Invalid: it is no dataset.
        """
        try:
            made = await self._context.stored(lambda: self._datasets.store(root.encode()))
        except BadDataset as exc:
            raise Invalid(str(exc), hint="spotctl and the daemon may be of different versions") from exc
        if isinstance(made, Incomplete):
            return list(made.missing)
        now = self._context.wall.now()
        unnamed = Dataset(name="", sha256=made.sha256, bytes=made.bytes, files=made.files, created_at=now)
        return _response(unnamed, self._context.world())

    async def every(self) -> list[DatasetResponse]:
        """Return all datasets that have a name."""
        world = self._context.world()
        return [_response(one, world) for one in await self._context.stored(self._datasets.every)]

    async def remove(self, name: str) -> DatasetResponse:
        """Forget the name; its content goes later, unless another name means it.

        Raises:
            NotFound: there is no such dataset.
            StateConflict: jobs that have not ended read it.
        """
        found = await self._context.stored(lambda: self._datasets.named(name))
        if found is None:
            raise NotFound(f"there is no dataset {name!r}", hint="spotctl data ls")
        answers: list[DatasetResponse] = []

        def decide(_reads: Reads, world: World, _now: datetime) -> Plan:
            # The world of this very transaction: that of the newest cycle lacks jobs that were queued since.
            answers.append(_response(found, world))
            if jobs := answers[-1]["jobs"]:
                raise StateConflict(
                    f"the dataset {name} is read by {count(len(jobs), 'unfinished job')}: {', '.join(jobs[:5])}",
                    hint="cancel them, or wait until they have ended",
                )
            return Plan()

        await self._context.commit(decide)
        response = answers[-1]
        await self._context.stored(lambda: self._datasets.forget(name))
        self._context.log.info("data.forgotten", name=name, sha256=found.sha256)
        return response


async def with_data(
    context: HandlerContext, spec: JobSpec, folders: Mapping[str, FolderContent], *, is_plan: bool = False
) -> JobSpec:
    """Return the job with the content that its datasets have now, which every attempt of it will read.

    Args:
        folders: what the folders hold that it names as sources.
        is_plan: what they hold need not be stored yet.

    Raises:
        Invalid: there is no such dataset, or it has another content than the job states.
    """
    problems: list[Problem] = []
    data: list[DataSource] = []
    for number, one in enumerate(spec.data):
        content = folders.get(one.source) if one.is_folder else None
        if content is not None and is_plan:
            data.append(replace(one, bytes=content.bytes, files=content.files))
            continue
        if one.is_listed:
            listed = await context.stored(partial(_with_listing, context.datasets, one, is_plan=is_plan))
            if isinstance(listed, DataSource):
                data.append(listed)
            else:
                problems.append(replace(listed, key=f"data[{number}].{listed.key}"))
            continue
        found = await context.stored(partial(_content_of, context.datasets, one, content))
        if isinstance(found, tuple):
            message, hint = found
            problems.append(Problem(key=f"data[{number}].source", message=message, hint=hint))
        elif one.sha256 not in {None, found.sha256}:
            message = f"{one.source} has another content now: {found.sha256}"
            hint = "put the former content again, or state the new hash"
            problems.append(Problem(key=f"data[{number}].sha256", message=message, hint=hint))
        else:
            data.append(replace(one, sha256=found.sha256, bytes=found.bytes, files=found.files))
    if problems:
        raise Invalid("the job reads data that is not stored", problems=tuple(problems))
    return replace(spec, data=tuple(data))


def _content_of(datasets: Datasets, one: DataSource, content: FolderContent | None) -> Content | tuple[str, str]:
    """Return what is there of it, or what is wrong and a way out."""
    if one.is_url:
        try:
            return Content(sha256=one.sha256 or "", bytes=datasets.measure(one.source), files=1)
        except UrlRefused as exc:
            return f"{one.source} {exc}", exc.hint
    if not one.is_folder:
        found = datasets.named(one.source.removeprefix(DATA_SCHEME))
        if found is None:
            return f"there is no dataset {one.source!r}", PUT_HINT
        return Content(sha256=found.sha256, bytes=found.bytes, files=found.files)
    if content is None or content.sha256 is None:
        return f"the folder {one.source} was not sent", FOLDER_HINT
    stored = datasets.stored(content.sha256)
    return stored if stored is not None else (f"the folder {one.source} is not stored completely", "submit it again")


def _with_listing(datasets: Datasets, one: DataSource, *, is_plan: bool) -> DataSource | Problem:
    """Return the source with what it holds now, or what is wrong and a way out.

    Raises:
        StoreError
        ApiUnavailable: its place does not answer.
    """
    try:
        found = datasets.remote.listing(one, None if is_plan else datasets.keep_file)
    except SourceRefused as exc:
        return Problem(key="source", message=f"{one.source} {exc}", hint=exc.hint)
    except SourceAway as exc:
        raise ApiUnavailable(f"{one.source} cannot be listed now: {exc}", hint="try again") from exc
    if is_plan:
        # Of files that the store is to hold, the list says so only once they are there.
        sha256 = None if found.by_token else digest_of(listing_text(found.files))
    else:
        sha256 = datasets.store_listing(found.files)
    if one.sha256 is not None and sha256 not in {one.sha256, None}:
        hint = "name the revision, or state the new hash"
        return Problem(key="sha256", message=f"{one.source} has another content now: {sha256}", hint=hint)
    return replace(
        one,
        sha256=sha256,
        bytes=found.bytes,
        files=len(found.files),
        revision=found.revision,
        egress=found.egress,
        near=found.near,
        by_token=found.by_token,
    )


def gone(datasets: Datasets, jobs: Iterable[Job]) -> dict[JobId, str]:
    """Return for which of these jobs the store lacks data, and which; what it has is kept for `KEPT` from now on.

    Raises:
        StoreError
    """
    read: dict[str, bool] = {}
    found: dict[JobId, str] = {}
    for job in jobs:
        for one in job.spec.data:
            if one.is_url or one.sha256 is None:
                continue
            if one.sha256 not in read:
                is_there = datasets.has_listing if one.is_listed else datasets.is_stored
                read[one.sha256] = is_there(one.sha256)
            if not read[one.sha256]:
                found[job.id] = one.source
    return found


def _response(dataset: Dataset, world: World) -> DatasetResponse:
    readers = [
        job.id
        for job in world.jobs.values()
        if not job.state.is_final and any(one.sha256 == dataset.sha256 for one in job.spec.data)
    ]
    return DatasetResponse(
        name=dataset.name,
        sha256=dataset.sha256,
        bytes=dataset.bytes,
        files=dataset.files,
        created_at=utc_text(dataset.created_at),
        jobs=sorted(readers),
    )

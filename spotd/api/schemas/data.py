"""Datasets: what a name means, and what its upload still lacks."""

from __future__ import annotations

from typing import TypedDict

from spotd.api.schemas.envelope import Answer


class DatasetResponse(TypedDict):
    """A dataset that has a name.

    `sha256` stands for its whole content. `jobs` are the ids of jobs that have not ended and read just this content.
    """

    name: str
    sha256: str
    bytes: int
    files: int
    created_at: str
    jobs: list[str]


class DatasetsAnswer(Answer):
    datasets: list[DatasetResponse]


class DatasetAnswer(Answer, total=False):
    """The dataset that has the name now, or hashes of what the store lacks of it, and then nothing has changed."""

    dataset: DatasetResponse
    missing: list[str]


class StoredAnswer(Answer):
    """How many bytes were stored."""

    bytes: int


class RootBody(TypedDict):
    """The list of the parts of a dataset, as its text."""

    root: str

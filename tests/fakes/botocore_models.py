"""The descriptions of AWS's services, parsed once for all clients of a test process instead of once for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader


@contextmanager
def parse_models_once() -> Iterator[None]:
    """Keep each parsed file (a tenth of a second of processor time and more) until the block ends.

    The clients of one session share them as well, so none of them changes one.
    """
    load = JSONFileLoader.load_file

    @cache
    def loaded(path: str) -> Any:
        return load(JSONFileLoader(), path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _self, path: loaded(path))
        yield

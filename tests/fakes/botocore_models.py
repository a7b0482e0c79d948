"""What each client of AWS begins with, made once for all clients of a test process instead of once for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import pytest
from botocore.hooks import EventAliaser
from botocore.loaders import JSONFileLoader
from botocore.session import Session


@contextmanager
def parse_models_once() -> Iterator[None]:
    """Keep each parsed file (a tenth of a second of processor time and more) until the block ends.

    The clients of one session share them as well, so none of them changes one. A session's own event handlers, which
    take as long to register, are copied as its clients copy them.
    """
    load = JSONFileLoader.load_file

    @cache
    def loaded(path: str) -> Any:
        return load(JSONFileLoader(), path)

    handlers = Session().get_component("event_emitter")

    def take_handlers(session: Any, _events: EventAliaser) -> None:
        session._events = copy(handlers)
        session._original_handler = session._events._emitter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_register_builtin_handlers", take_handlers)
        patch.setattr(JSONFileLoader, "load_file", lambda _self, path: loaded(path))
        yield

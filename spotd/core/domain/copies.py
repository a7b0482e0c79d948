"""`replace` for the rows of a decision: a copy of a frozen dataclass with some fields changed.

`dataclasses.replace` calls the constructor with each field by its name, which takes more than twice as long; most of
what a decision does is to copy rows. Here the slots are copied as they are, so that a class must check nothing of its
own when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # whose fields mypy checks
else:
    import dataclasses
    from collections import deque
    from functools import cache
    from itertools import repeat
    from operator import attrgetter, call

    def replace(row: Any, /, **changes: Any) -> Any:
        """Return a copy of the row with these fields changed.

        Raises:
            TypeError: it has no such field, or checks its values when it is made.
        """
        cls = type(row)
        setters, values = _slots(cls)
        copy = object.__new__(cls)
        deque(map(call, setters.values(), repeat(copy), values(row)), maxlen=0)
        for name, value in changes.items():
            if name not in setters:
                raise TypeError(f"{cls.__name__} has no field {name!r}")
            setters[name](copy, value)
        return copy

    @cache
    def _slots(cls: type) -> tuple[dict[str, Any], Any]:
        """Return how each field of a class is written, and how all of them are read at once."""
        names = [field.name for field in dataclasses.fields(cls)]
        if hasattr(cls, "__post_init__"):
            raise TypeError(f"what {cls.__name__} checks of its values would be left out")
        read = attrgetter(*names) if len(names) > 1 else lambda row: (getattr(row, names[0]),)
        return {name: getattr(cls, name).__set__ for name in names}, read

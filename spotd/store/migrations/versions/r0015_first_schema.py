"""The first schema, where the other revisions begin. No state takes this step: a new one is made from the tables.

Lower numbers belong to schemas from before the first release; a state of one of them is refused and stays as it is.
"""

from __future__ import annotations

revision: str = "0015"
down_revision: str | None = None


def upgrade() -> None:
    raise NotImplementedError("a state without tables is made by spotd.store.engine")

"""Of an attempt that took over a machine: the key that this carries, and whose it was before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("machine_key", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("former_key", sa.Text(), nullable=True))
    op.create_index("ix_attempts_machine_key", "attempts", ["machine_key"])

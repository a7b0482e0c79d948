"""The key that the machine of an attempt carries, where it took over that of another one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("machine_key", sa.Text(), nullable=True))
    op.create_index("ix_attempts_machine_key", "attempts", ["machine_key"])

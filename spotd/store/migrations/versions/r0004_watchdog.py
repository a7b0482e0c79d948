"""What the watchdog knows of each attempt, and how often its job has stalled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("watch", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("freshness", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("stalls", sa.BigInteger(), nullable=False, server_default=sa.text("0")))

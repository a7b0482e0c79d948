"""Checkpoints can be pinned, and tell the metric by which the best of a job is kept."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("metric", sa.Float(), nullable=True))
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false()))

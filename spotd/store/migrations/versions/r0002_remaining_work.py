"""What shows how much of a job is left: the pace of its attempts, and the work in each checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("paces", sa.Text(), nullable=False, server_default="[]"))
    op.add_column("checkpoints", sa.Column("worked", sa.BigInteger(), nullable=True))

"""Jobs that follow others, and jobs of arrays. Those of before have neither."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"


def upgrade() -> None:
    for name in ("chain", "array_id", "array_name"):
        op.add_column("jobs", sa.Column(name, sa.Text(), nullable=True))
    for name in ("array_index", "array_count", "array_at_once"):
        op.add_column("jobs", sa.Column(name, sa.BigInteger(), nullable=True))
    op.create_index("ix_jobs_array_id", "jobs", ["array_id"])
    op.create_index("ix_jobs_array_name", "jobs", ["array_name"])

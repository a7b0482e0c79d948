"""Since when a machine bills in full, and how many sums of a job are estimates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("full_since", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("totals_estimated", sa.BigInteger(), nullable=False, server_default=sa.text("0")))

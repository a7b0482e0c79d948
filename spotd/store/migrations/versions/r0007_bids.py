"""The bids for each machine, and what a job's moves to cheaper machines came to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("bidding", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("moves", sa.Text(), nullable=False, server_default="{}"))

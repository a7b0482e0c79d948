"""What a job with a deadline remembers from one decision to the next."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    for name in ("counted_from", "up_since"):
        op.add_column("jobs", sa.Column(f"pacing_{name}", sa.BigInteger(), nullable=True))
    for name in ("ran_before", "past_up", "past_runs", "losses"):
        op.add_column("jobs", sa.Column(f"pacing_{name}", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("jobs", sa.Column("pacing_is_slipping", sa.Boolean(), nullable=False, server_default=sa.false()))

"""Since when a job waits for an own machine, and what own machines saved it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pacing_own_wanted_since", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("totals_own_saved", sa.BigInteger(), nullable=True))

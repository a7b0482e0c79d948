"""How long saving takes, and how often an attempt is advised to save."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("save_time", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("save_every", sa.BigInteger(), nullable=True))

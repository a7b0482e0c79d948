"""What an attempt's machine may cost since its owner changed that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("ceiling_set", sa.BigInteger(), nullable=True))

"""Since when a machine without an attempt is listed at a higher price, which a second list has to state, too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"


def upgrade() -> None:
    op.add_column("intents", sa.Column("stray_rose_at", sa.BigInteger(), nullable=True))

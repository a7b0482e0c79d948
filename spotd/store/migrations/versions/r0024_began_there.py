"""When the start script of an attempt's host began, by the host's own clock."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0024"
down_revision: str | None = "0023"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("began_there_s", sa.BigInteger(), nullable=True))

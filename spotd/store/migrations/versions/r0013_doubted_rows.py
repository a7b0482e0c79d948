"""Since when lists say that a machine is over, and which notices of an interruption did not come true."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("over_since", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("notices_lapsed", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("attempts", sa.Column("notice_lapsed_at", sa.BigInteger(), nullable=True))

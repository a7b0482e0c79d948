"""Which of several machines of an attempt take part, and which are to be replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0023"
down_revision: str | None = "0022"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("members", sa.Text(), nullable=True))

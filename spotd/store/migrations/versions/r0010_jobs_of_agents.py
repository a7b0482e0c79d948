"""Which jobs an agent queued."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("submitted_by", sa.Text(), nullable=False, server_default=""))

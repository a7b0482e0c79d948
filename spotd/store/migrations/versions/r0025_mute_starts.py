"""How many starts of a job in a row gave no sign of life, once it had saved."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0025"
down_revision: str | None = "0024"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("mute_starts", sa.BigInteger(), nullable=True))

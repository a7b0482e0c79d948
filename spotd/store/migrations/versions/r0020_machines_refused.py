"""How many machines of a job their canaries refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("machines_refused", sa.BigInteger(), nullable=True))

"""How long a job has waited for spot, without the time in which something else kept it from a machine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0022"
down_revision: str | None = "0021"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pacing_spot_waited", sa.BigInteger(), nullable=True))

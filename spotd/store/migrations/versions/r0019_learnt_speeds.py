"""How fast GPUs are by what earlier jobs and the markets measured, as it was known at the submission of a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("learnt", sa.Text(), nullable=True))

"""Since when a job waits for spot that may take on-demand later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pacing_spot_wanted_since", sa.BigInteger(), nullable=True))

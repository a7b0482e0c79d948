"""What keeping the promises against hostile input, lost state and silent clocks has to remember."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa  # noqa: F401  # for the columns below
from alembic import op  # noqa: F401  # for the columns below

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Add what the tables have beyond revision 0002."""

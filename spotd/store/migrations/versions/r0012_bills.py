"""What a provider's bill said last, why it was not believed, and the last proof of a machine's life."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("bill_read", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("bill_note", sa.Text(), nullable=False, server_default=""))
    op.add_column("attempts", sa.Column("proven_at", sa.BigInteger(), nullable=True))

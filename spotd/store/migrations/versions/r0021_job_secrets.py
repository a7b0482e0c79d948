"""The encrypted values of jobs' secrets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"


def upgrade() -> None:
    op.create_table(
        "job_secrets",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_secrets_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_secrets"),
    )

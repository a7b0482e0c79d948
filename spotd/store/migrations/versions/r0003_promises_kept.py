"""What keeping the promises against hostile input, lost state and silent clocks has to remember."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Add what the tables have beyond revision 0002."""
    # What measures a machine's bill: until when it is proven, its traffic, the listings that showed it.
    _add("attempts", "meter_until", "listed_at", "over_ceiling_at", "heard_by", "traffic_since")
    _add("attempts", "meter_traffic", "uploaded_bytes", "restored_bytes", "traffic_spent", "bill_tries", nullable=False)
    # An older spotd did not distinguish launches that it had sent from those that it had not.
    op.execute("UPDATE intents SET state = 'sent' WHERE kind = 'launch' AND state = 'open'")
    # What a machine costs that no attempt owns.
    _add("intents", "stray_since")
    _add("intents", "stray_rate", nullable=False)
    # What shows that a checkpoint is worth something, or nothing.
    op.add_column("checkpoints", sa.Column("host", sa.Text(), nullable=False, server_default=""))
    op.add_column("checkpoints", sa.Column("proven_by", sa.BigInteger(), nullable=True))
    op.add_column("checkpoints", sa.Column("doubted_by", sa.Text(), nullable=False, server_default=""))
    # Events that are too old or too many are folded, and deleted in no other way.
    op.execute("DROP TRIGGER events_no_delete")
    op.execute(
        "CREATE TRIGGER events_no_delete BEFORE DELETE ON events "
        "WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'folding') "
        "BEGIN SELECT RAISE(ABORT, 'events are append-only'); END"
    )
    # Which outputs are the job's.
    op.add_column("jobs", sa.Column("outputs_attempt", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("outputs_sha256", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("outputs_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("outputs_problem", sa.Text(), nullable=False, server_default=""))
    # What a job's failures, its budget and its disk need.
    _add("jobs", "idle_launches", "failed_starts", "disk_gb_seen", nullable=False)
    _add("jobs", "not_before", "budget_set", "rate_low")
    _add("cooldowns", "since")
    _add("cooldowns", "strikes", nullable=False)
    op.add_column("cooldowns", sa.Column("ends", sa.Text(), nullable=False, server_default="time"))
    # Whose machine it is at the provider.
    for table in ("attempts", "intents"):
        op.add_column(table, sa.Column("account", sa.Text(), nullable=False, server_default=""))
    _sums()


def _sums() -> None:
    """Add sums of the charges, for answers that need not read every one of them."""
    op.create_table(
        "attempt_costs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("amount", "on_demand", "billed", "free")),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_attempt_costs"),
    )
    op.create_table(
        "day_costs",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("amount", "on_demand")),
        sa.PrimaryKeyConstraint("day", "provider", name="pk_day_costs"),
    )
    op.execute(
        "INSERT INTO attempt_costs (job_id, attempt, amount, on_demand, billed, free) SELECT job_id, attempt, "
        'sum(amount), sum(coalesce(on_demand, amount)), sum("end" - start), sum(max(0, -amount)) '
        "FROM charges GROUP BY job_id, attempt"
    )
    op.execute(
        "INSERT INTO day_costs (day, provider, amount, on_demand) "
        "SELECT day, provider, sum(amount), sum(coalesce(on_demand, amount)) FROM charges GROUP BY day, provider"
    )
    op.create_index("ix_events_kind_job_id", "events", ["kind", "job_id"], unique=False)


def _add(table: str, *names: str, nullable: bool = True) -> None:
    """Whole numbers, and instants as microseconds; 0 in the rows that are there where none may be missing."""
    default = None if nullable else sa.text("0")
    for name in names:
        op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=nullable, server_default=default))

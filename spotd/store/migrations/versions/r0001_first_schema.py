"""The first schema."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COUNTING = "state IN ('intended', 'starting', 'running', 'stopping')"


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _big(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable, autoincrement=False)


def _zeros(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")) for name in names]


def _worded(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default=default)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False)


def upgrade() -> None:
    _jobs()
    _attempts()
    _checkpoints()
    _intents()
    _cooldowns()
    _charges()
    _sums()
    _events()
    _meta()
    if op.get_bind().dialect.name == "sqlite":
        # Events that are too old or too many are folded, and deleted in no other way.
        _append_only("events", deletable="WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'folding') ")
        _append_only("charges")


def _jobs() -> None:
    op.create_table(
        "jobs",
        _text("id"),
        _text("name"),
        _text("spec"),
        _text("gpu_wanted"),
        _text("code_sha256", nullable=True),
        _big("code_bytes"),
        _big("submitted_at"),
        _text("state"),
        _text("reason"),
        _big("state_since"),
        _big("attempts_made"),
        _big("errors"),
        _big("image_errors"),
        _big("recoveries"),
        _big("spent"),
        _big("on_demand"),
        _big("lost"),
        _big("started_at", nullable=True),
        _big("ended_at", nullable=True),
        _big("exit_code", nullable=True),
        _flag("cancel_requested"),
        _big("outputs_attempt", nullable=True),
        _text("outputs_sha256", nullable=True),
        sa.Column("outputs_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        _worded("outputs_problem"),
        *_zeros("idle_launches", "failed_starts"),
        _big("not_before", nullable=True),
        _big("budget_set", nullable=True),
        _big("rate_low", nullable=True),
        *_zeros("disk_gb_seen"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_name_submitted_at", "jobs", ["name", "submitted_at"])
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_submitted_at", "jobs", ["submitted_at"])


def _attempts() -> None:
    op.create_table(
        "attempts",
        _text("job_id"),
        _big("number"),
        _text("key"),
        _text("state"),
        _text("quote"),
        _text("provider"),
        _text("offer_id"),
        _text("host_id", nullable=True),
        _text("region"),
        _text("gpu"),
        _big("gpu_count"),
        _big("price_total"),
        _big("price_per_gpu"),
        _big("ceiling"),
        _big("price_max"),
        _big("intended_at"),
        _text("ref_id", nullable=True),
        _text("ref_scope", nullable=True),
        _flag("outcome_unknown"),
        _big("launched_at", nullable=True),
        _big("running_at", nullable=True),
        _big("ended_at", nullable=True),
        _big("meter_settled"),
        _big("meter_rate"),
        _big("meter_on_demand_rate", nullable=True),
        _big("meter_since", nullable=True),
        _big("on_demand_settled"),
        _flag("ever_listed"),
        _big("missing_since", nullable=True),
        _text("machine"),
        _big("heartbeat_seq"),
        _big("heartbeat_seen_at", nullable=True),
        _big("read_at", nullable=True),
        _text("phase"),
        _text("resumed_from", nullable=True),
        _big("notice_at", nullable=True),
        _text("stop", nullable=True),
        _text("end_reason", nullable=True),
        _text("end_detail"),
        _big("exit_code", nullable=True),
        _big("meter_until", nullable=True),
        *_zeros("meter_traffic"),
        _big("listed_at", nullable=True),
        _big("over_ceiling_at", nullable=True),
        _big("start_deadline", nullable=True),
        *_zeros("uploaded_bytes", "restored_bytes"),
        _big("traffic_since", nullable=True),
        *_zeros("traffic_spent", "bill_tries"),
        _worded("account"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
    )
    op.create_index("ix_attempts_key", "attempts", ["key"], unique=True)
    op.create_index(
        "ix_attempts_one_counting",
        "attempts",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text(_COUNTING),
        postgresql_where=sa.text(_COUNTING),
    )
    op.create_index("ix_attempts_state", "attempts", ["state"])


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("job_id"),
        _big("ordinal"),
        _text("name"),
        _big("attempt"),
        _big("step", nullable=True),
        _big("bytes"),
        _big("at"),
        _text("manifest_key"),
        _text("sha256"),
        sa.Column("metric", sa.Float(), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false()),
        _worded("host"),
        _big("proven_by", nullable=True),
        _worded("doubted_by"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "ordinal", name="pk_checkpoints"),
    )


def _intents() -> None:
    op.create_table(
        "intents",
        _text("id"),
        _text("kind"),
        _text("provider"),
        _text("key"),
        _text("state"),
        _big("created_at"),
        _text("attempt_job", nullable=True),
        _big("attempt_number", nullable=True),
        _text("ref_provider", nullable=True),
        _text("ref_id", nullable=True),
        _text("ref_scope", nullable=True),
        _big("tries"),
        _big("not_before", nullable=True),
        _big("accepted_at", nullable=True),
        _text("error"),
        _worded("account"),
        *_zeros("stray_rate"),
        _big("stray_since", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_intents"),
    )
    op.create_index("ix_intents_state", "intents", ["state"])


def _cooldowns() -> None:
    op.create_table(
        "cooldowns",
        _text("provider"),
        _text("scope"),
        _text("subject"),
        _big("until"),
        _text("reason"),
        _big("since", nullable=True),
        *_zeros("strikes"),
        _worded("ends", "time"),
        sa.PrimaryKeyConstraint("provider", "scope", "subject", name="pk_cooldowns"),
    )
    op.create_index("ix_cooldowns_until", "cooldowns", ["until"])


def _charges() -> None:
    op.create_table(
        "charges",
        _text("job_id"),
        _big("attempt"),
        _big("start"),
        _big("end"),
        _text("provider"),
        sa.Column("day", sa.Date(), nullable=False),
        _big("amount"),
        _big("on_demand", nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"], ["attempts.job_id", "attempts.number"], name="fk_charges_job_id_attempts"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "start", name="pk_charges"),
    )
    op.create_index("ix_charges_day", "charges", ["day"])


def _sums() -> None:
    """Create the sums of the charges, for answers that need not read every one of them."""
    op.create_table(
        "attempt_costs",
        _text("job_id"),
        _big("attempt"),
        *(_big(name) for name in ("amount", "on_demand", "billed", "free")),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_attempt_costs"),
    )
    op.create_table(
        "day_costs",
        sa.Column("day", sa.Date(), nullable=False),
        _text("provider"),
        *(_big(name) for name in ("amount", "on_demand")),
        sa.PrimaryKeyConstraint("day", "provider", name="pk_day_costs"),
    )


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        _big("at"),
        _text("kind"),
        _text("message"),
        _text("job_id", nullable=True),
        _big("attempt", nullable=True),
        _text("data"),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
    )
    op.create_index("ix_events_job_id_seq", "events", ["job_id", "seq"])
    op.create_index("ix_events_kind_job_id", "events", ["kind", "job_id"])


def _meta() -> None:
    op.create_table("meta", _text("key"), _text("value"), sa.PrimaryKeyConstraint("key", name="pk_meta"))


def _append_only(table: str, deletable: str = "") -> None:
    """Rows of the table can be neither changed nor deleted, the latter unless `deletable` says so."""
    for verb, unless in (("UPDATE", ""), ("DELETE", deletable)):
        op.execute(
            f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} {unless}"
            f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        )

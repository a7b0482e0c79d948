"""Runs the revisions on the connection, and in the transaction, that `spotd.store.engine` opened."""

from __future__ import annotations

from alembic import context

from spotd.store.tables import METADATA

_attributes = context.config.attributes
context.configure(
    connection=_attributes["connection"],
    target_metadata=METADATA,
    on_version_apply=_attributes["each_step"],
)
with context.begin_transaction():
    context.run_migrations()

"""alembic scripts: each revision is written out by hand and never edited once released."""

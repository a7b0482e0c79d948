"""`python -m spotd_jobs.runner`, and what the zipapp runs."""

from __future__ import annotations

from spotd_jobs.runner.main import run

run()

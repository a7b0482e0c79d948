"""The `[mcp]` table: what agents may queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spotd.config.section import Section
from spotd.config.values import Money


class McpSection(Section):
    """What agents may queue through `spotctl mcp`; they may only watch unless both are set. docs/how-to/agents.md."""

    job_budget: Annotated[Money | None, Field(examples=[10.0])] = None
    """Most dollars that one job of an agent may cost; a job that names no budget gets this one."""

    day_budget: Annotated[Money | None, Field(examples=[30.0])] = None
    """Most dollars that all jobs of agents may cost together: budgets of those that have not ended, and what those
    have cost that ended since midnight UTC."""

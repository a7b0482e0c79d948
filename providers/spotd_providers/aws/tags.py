"""The tags on everything that a launch makes; a resource without them is not ours."""

from __future__ import annotations

from typing import Final

INSTALL_TAG: Final = "spotd:install"
KEY_TAG: Final = "spotd:key"

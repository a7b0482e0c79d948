"""What a user means by the name of a GPU or a provider, for prices now and in the past."""

from __future__ import annotations

from collections.abc import Collection

from spotd.api.errors import Invalid
from spotd_providers.contract import gpus


def resolved_gpus(gpu: str | None, sold: set[str]) -> frozenset[str] | None:
    """Those of the sold ones that the name means; `None` for no name.

    Raises:
        Invalid: such a GPU is neither known nor sold.
    """
    if gpu is None:
        return None
    try:
        names = gpus.resolve(gpu, sold=sold)
    except gpus.UnknownGpu as exc:
        raise Invalid(str(exc), hint="spotctl prices shows every GPU that is sold now") from exc
    return frozenset(name for name in sold if name in names or gpus.matches(names, name))


def known_provider(name: str | None, providers: Collection[str]) -> None:
    """Require a provider of the config, or none.

    Raises:
        Invalid: it is not one.
    """
    if name is not None and name not in providers:
        raise Invalid(f"there is no provider {name!r}", hint=f"known here: {', '.join(sorted(providers))}")

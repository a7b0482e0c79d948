"""Whatever a stranger writes into a GPU's name, it is taken somewhere sensible and nowhere by accident."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotd_providers.contract.gpus import GPUS, UnknownGpu, canonical, gpu_info, kept_name, matches, resolve

PROVIDERS = st.sampled_from(["vast", "runpod", "aws", "local", "shelf"])
SOLD = [name for row in GPUS for name in (row.name, *row.vast, *row.runpod, *row.aws, *row.aliases)]
NAMES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(SOLD),
    st.tuples(st.sampled_from(SOLD), st.sampled_from([" laptop", " 80GB", " MIG 1g.24gb", " Max-Q", "x", "  "])).map(
        "".join
    ),
)
MEMORY = st.one_of(st.none(), st.integers(min_value=-5, max_value=400_000))


@given(provider=PROVIDERS, name=NAMES, vram_mb=MEMORY)
def test_every_sold_name_becomes_an_id_that_can_be_asked_for(provider: str, name: str, vram_mb: int | None) -> None:
    offered = canonical(provider, name, vram_mb)
    assert offered
    assert kept_name(offered) == offered, "an id is its own kept name, so it survives being typed back"
    try:
        asked = resolve(offered, sold=[offered])
    except UnknownGpu as exc:
        asked = frozenset({exc.kept})
    assert matches(asked, offered)


@given(provider=PROVIDERS, name=NAMES, vram_mb=st.integers(min_value=1, max_value=400_000))
def test_a_row_is_never_claimed_with_memory_it_does_not_have(provider: str, name: str, vram_mb: int) -> None:
    row = gpu_info(canonical(provider, name, vram_mb))
    if row is not None:
        assert any(abs(vram_mb / 1024 - gb) <= gb * 0.07 + 1e-9 for gb in row.vram_gb)


@given(text=NAMES)
def test_asking_never_fails_in_another_way_than_unknown(text: str) -> None:
    refusal: UnknownGpu | None = None
    found: frozenset[str] = frozenset()
    try:
        found = resolve(text)
    except UnknownGpu as exc:
        refusal = exc
    assert bool(found) is (refusal is None)
    if refusal is not None:
        assert refusal.text == text
        assert all(gpu_info(name) is not None for name in refusal.nearest)

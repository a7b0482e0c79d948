from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.estimates.memory import memory_parts
from spotd.estimates.model_config import FAMILIES, ModelConfigError, architecture_of
from spotd.estimates.workload import PARAMS_MAX, PARAMS_MIN, Layout, Workload, typical_architecture
from tests.cases import every
from tests.unit.estimates.models import CONFIGS, PARAMS, model


@every("name", CONFIGS)
def test_every_parameter_of_a_published_model_is_counted(name: str) -> None:
    assert model(name).params == PARAMS[name]


def test_every_family_is_held_by_a_published_model() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@every(
    ("name", "billions"),
    [
        ("mixtral", 12.9),
        ("qwen3-30b-a3b", 3.4),
        ("deepseek-v3", 37.6),
        ("deepseek-v2-lite", 2.7),
        ("gpt-oss-120b", 5.8),
        ("olmoe", 1.3),
        ("llama-3.1-8b", 8.0),
    ],
)
def test_a_token_passes_only_its_experts(name: str, billions: float) -> None:
    assert round(model(name).active_params / 1e9, 1) == billions


def test_grouped_queries_shrink_the_cache() -> None:
    assert model("llama-2-7b").cache_width == 2 * 4096
    assert model("llama-3.1-8b").cache_width == 2 * 1024
    assert model("deepseek-v3").cache_width == 512 + 64


def test_tied_embeddings_are_counted_once() -> None:
    config = {**CONFIGS["llama-3.2-1b"], "tie_word_embeddings": False}
    assert architecture_of(config).params - model("llama-3.2-1b").params == 128_256 * 2048


LLAMA: dict[str, Any] = dict(CONFIGS["llama-3.1-8b"])


@every(
    ("change", "key", "words"),
    [
        ({"model_type": None}, "model_type", "is missing, or is not text"),
        ({"model_type": 7}, "model_type", "is missing, or is not text"),
        ({"model_type": "lama"}, "model_type", "is not a known architecture"),
        ({"model_type": "whisper"}, "model_type", "is not a known architecture"),
        ({"model_type": "llava", "text_config": {}}, "model_type", "is a model of more than text"),
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"hidden_size": 0}, "hidden_size", "is not between 1 and"),
        ({"hidden_size": -4096}, "hidden_size", "is not between 1 and"),
        ({"hidden_size": 1e308}, "hidden_size", "is not a whole number"),
        ({"hidden_size": 10**400}, "hidden_size", "is not between 1 and"),
        ({"hidden_size": True}, "hidden_size", "is not a whole number"),
        ({"hidden_size": "4096"}, "hidden_size", "is not a whole number"),
        ({"hidden_size": [4096]}, "hidden_size", "is not a whole number"),
        ({"hidden_size": 4097}, "hidden_size", "cannot be shared among 32 heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads", "is more than the 32 heads"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "is not between 1 and"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "is not true or false"),
        ({"vocab_size": None}, "vocab_size", "is missing"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_counted_is_refused_with_its_key(change: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        architecture_of({**LLAMA, **change})
    assert (caught.value.key, words in str(caught.value), bool(caught.value.hint)) == (key, True, True)


@every(
    ("change", "key"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        architecture_of({**CONFIGS["qwen3-30b-a3b"], **change})
    assert caught.value.key == key


@every("params", [PARAMS_MIN, 5 * 10**6, 10**8, 11 * 10**8, 7 * 10**9, 4 * 10**11, PARAMS_MAX])
def test_a_typical_shape_has_exactly_the_parameters_asked_for(params: int) -> None:
    shape = typical_architecture(params)
    assert shape.params == params
    assert shape.active_width > 0


@every(
    ("params", "hidden", "layers"),
    [(11 * 10**8, 2048, 16), (7 * 10**9, 4096, 32), (13 * 10**9, 5120, 40), (405 * 10**9, 16384, 128)],
)
def test_a_typical_shape_is_near_that_of_llama(params: int, hidden: int, layers: int) -> None:
    shape = typical_architecture(params)
    assert (shape.hidden, shape.layers) == (hidden, layers)


@every("params", [0, -1, PARAMS_MIN - 1, PARAMS_MAX + 1])
def test_no_model_has_that_many_parameters(params: int) -> None:
    with pytest.raises(ValueError, match="typical shape"):
        typical_architecture(params)


KEYS = sorted({key for config in CONFIGS.values() for key in config} - {"model_type"})
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(0, 3) | st.none() | st.text(max_size=2), max_size=4)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=2)
)


@given(
    st.sampled_from([*CONFIGS]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.sets(st.sampled_from(KEYS), max_size=3),
)
def test_no_config_breaks_the_reader(name: str, change: dict[str, Any], missing: set[str]) -> None:
    config = {key: value for key, value in {**CONFIGS[name], **change}.items() if key not in missing}
    try:
        shape = architecture_of(config)
    except ModelConfigError as exc:
        assert exc.hint  # noqa: PT017 - either outcome is right
        return
    assert shape.params >= shape.active_params > 0
    parts = memory_parts(shape, Workload(training=True), Layout())
    assert parts.total > 0

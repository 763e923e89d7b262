"""What config.json may say: both spellings of it, what is refused, what is missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import ModelError
from engine.model_source import ModelSource
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import describe, describe_decoder
from engine.models.json_config import JsonConfig
from engine.models.parse_config import parse_decoder
from engine.models.rope import rotary_tables
from engine.models.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from kv_cache.layout import KvGroup
from tests.engine.models.cases import YARN_ROPE

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 4,
}
PHI3: dict[str, Any] = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
GEMMA2: dict[str, Any] = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
GEMMA3: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
YARN = {"type": "yarn", "factor": 4.0}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def parsed(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return parse_decoder(JsonConfig({**values, **changes}, "config.json"))


def rope(values: dict[str, Any], **changes: Any) -> RopeConfig:
    return parsed(values, **changes).layers[0].rope


def test_classic_rope_keys_and_those_of_transformers_5_mean_the_same() -> None:
    classic = rope(LLAMA, rope_theta=500000.0, rope_scaling=LLAMA3_SCALING)
    new = rope(LLAMA, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0})
    assert classic == new == RopeConfig(500000.0, 16, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_rope_types() -> None:
    assert rope(LLAMA) == RopeConfig(10000.0, 16)
    assert rope(LLAMA, rope_theta=7.0, rope_scaling=None) == RopeConfig(7.0, 16)
    linear = rope(LLAMA, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.scaling == LinearScaling(2.0)
    yarn = rope(LLAMA, rope_scaling={"type": "yarn", "factor": 4.0}).scaling
    assert isinstance(yarn, YarnScaling)
    assert (yarn.original_max_positions, yarn.beta_fast, yarn.beta_slow) == (128, 32.0, 1.0)


def test_yarn_is_the_same_finetuned_or_not() -> None:
    said = [rope(LLAMA, rope_scaling={**YARN, "finetuned": value}) for value in (True, False)]
    assert said == [rope(LLAMA, rope_scaling=YARN)] * 2
    with pytest.raises(ModelError, match="rope_scaling: finetuned: is not supported"):
        rope(LLAMA, rope_scaling={"type": "linear", "factor": 4.0, "finetuned": True})


@pytest.mark.parametrize("scales", [(0, 0), (0.0, 0.0), (0, 0.7), (1.3, 0), (1.3, 0.7)])
def test_a_zero_in_yarn_is_as_good_as_absent(scales: tuple[float, float]) -> None:
    mscale, mscale_all_dim = scales
    scaling = {**YARN_ROPE, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
               "beta_fast": 0, "beta_slow": 0}  # fmt: skip
    ours = rotary_tables(rope(LLAMA, rope_scaling=scaling), 128, torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters=scaling))
    cos, sin = theirs(torch.ones(1), torch.arange(128)[None])
    torch.testing.assert_close(ours.cos, cos[0, :, :8])
    torch.testing.assert_close(ours.sin, sin[0, :, :8])


def test_old_phi3_names_of_longrope() -> None:
    for name in ("su", "yarn", "longrope"):
        factors = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2] * 8}
        scaling = rope(PHI3, rope_scaling=factors, original_max_position_embeddings=64).scaling
        assert isinstance(scaling, LongRopeScaling)
        assert scaling.original_max_positions == 64


def test_gemma3_local_and_global_layers_turn_differently_in_both_spellings() -> None:
    classic = parsed(
        GEMMA3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    )
    new = parsed(
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert classic == new
    assert classic.layers[5].rope == RopeConfig(1e6, 256, LinearScaling(8.0))
    assert classic.layers[0].rope == RopeConfig(1e4, 256)


def test_gemma3_has_the_original_length_in_the_section_of_the_rotation() -> None:
    """transformers looks for it nowhere else where layers turn differently."""
    plain = parsed(GEMMA3, rope_scaling=LLAMA3_SCALING)
    assert parsed(GEMMA3, rope_scaling=LLAMA3_SCALING, original_max_position_embeddings=64) == plain
    assert plain.layers[5].rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_groups_are_by_reach_with_full_attention_first() -> None:
    small = {"sliding_window": 12, "head_dim": 32, "num_key_value_heads": 2}
    assert parsed(GEMMA2, **small).groups == (
        KvGroup((1, 3), 2, (32, 32)),
        KvGroup((0, 2), 2, (32, 32), 12),
    )
    assert parsed(GEMMA3, **small).groups == (
        KvGroup((5,), 2, (32, 32)),
        KvGroup((0, 1, 2, 3, 4, 6), 2, (32, 32), 12),
    )
    mistral = parsed(LLAMA, architectures=["MistralForCausalLM"], **small)
    assert mistral.groups == (KvGroup((0, 1), 2, (32, 32), 12),)
    assert parsed(LLAMA).groups == (KvGroup((0, 1), 4, (16, 16)),)


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert parsed(PHI3, sliding_window=128).groups[0].window is None
    assert parsed(PHI3, sliding_window=127).groups[0].window == 127


def test_qwen_windows_need_to_be_switched_on() -> None:
    off = parsed(QWEN2, sliding_window=8, max_window_layers=1)
    assert [layer.window for layer in off.layers] == [None, None]
    on = parsed(QWEN2, sliding_window=8, max_window_layers=1, use_sliding_window=True)
    assert [layer.window for layer in on.layers] == [None, 8]


def test_the_text_half_of_gemma3_has_its_class_defaults() -> None:
    """The hub's files leave out what equals the default."""
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = parsed(values)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.dtype, config.tied_embeddings) == (262208, "bfloat16", True)
    assert [g.window for g in config.groups] == [None, 1024]
    assert config.groups[0].layers == (5, 11, 17, 23, 29)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_keys(key: str, dtype: str) -> None:
    assert parsed(LLAMA, **{key: dtype}).dtype == "bfloat16"


def test_yarn_stretches_the_promised_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parsed(LLAMA, rope_scaling=scaling).max_context == 512


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    values = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelError, match=f"config.json: {key}: missing"):
        parsed(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "96"}, "vocab_size: '96', must be an integer"),
        ({"hidden_size": 0}, "hidden_size: 0, must be an integer of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000, must be at most 10000"),
        ({"num_attention_heads": 1e12}, "num_attention_heads: 1000000000000, must be at most"),
        ({"hidden_size": 10**400}, "hidden_size: 1000+, must be at most"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1, must be a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: 1000+, must be a positive number"),
        ({"rope_theta": 1e308}, "rope_theta: 1e.308, must be a positive number, 1e-30 to 1e.30"),
        ({"max_position_embeddings": 1}, "max_position_embeddings: 1, must be .* of at least 2"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings: 1, must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        ({"hidden_act": "relu2"}, "hidden_act: 'relu2', must be one of"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8', must be"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1, must be true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"residual_multiplier": 0.5}, "residual_multiplier: 0.5 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts: 8 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "rotated elements"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type: 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_sect"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor: missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "factor: 1e.308, must be a positive"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1e30}},
            "factor: 1e.30, must be at most 16777",
        ),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1e308}}, "beta_fast: 1e.308, must be"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 1e-320}}, "beta_slow: 1e-320, must be"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta: 1.0, must be above 1 with yarn"),
        ({"rope_scaling": [2.0]}, "rope_scaling: \\[2.0\\], must be an object"),
        ({"rope_parameters": {"full_attention": {}}}, "one rotation for all layers"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parsed(LLAMA, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "'chunked_attention' is not supported"),
        ({"sliding_window": None}, "sliding_window: missing"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "default"}}, "rotation of each layer type"),
    ],
)
def test_a_wrong_value_of_gemma3_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parsed(GEMMA3, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor: 1e.308, must be a positive"),
        ({"partial_rotary_factor": 1e30}, "16[0-9]+ rotated elements, which must be"),
        (
            {"original_max_position_embeddings": 1},
            "rope_scaling: original_max_position_embeddings: 1, must be an integer of at least 2",
        ),
        ({"long_factor": [1e308] * 8}, "long_factor: must be a list of positive numbers, 1e-30"),
    ],
)
def test_a_wrong_value_of_phi3_is_named(changes: dict[str, Any], message: str) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ModelError, match=message):
        parsed(PHI3, rope_scaling={**factors, **changes})


def test_longrope_factors_must_fit_the_head() -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}
    with pytest.raises(ModelError, match="long_factor: has 7 numbers, 8 are needed"):
        parsed(PHI3, rope_scaling=factors)


def test_keys_that_the_class_never_reads_are_said_to_be_unused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parsed(LLAMA, head_scale=2.0, use_cache=True)
    assert "LlamaForCausalLM does not use these keys: head_scale" in caplog.text


def test_a_config_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ('{"a":' * 100_000, "not valid JSON"),
        (f'{{"a": {"1" * 5000}}}', "not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ModelError, match=f"{path}: {message}"):
            describe(ModelSource("m", tmp_path))


def test_description(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    description = describe(ModelSource("m", tmp_path))
    attention, mlp, norms = 4 * 64 * 64, 3 * 64 * 96, 2 * 64
    assert description.num_parameters == 2 * 96 * 64 + 2 * (attention + mlp + norms) + 64
    assert (description.native, description.dtype) == (True, "bfloat16")
    assert (description.num_layers, description.max_model_len) == (2, 128)


@pytest.mark.parametrize(("values", "num_tables"), [(LLAMA, 1), (GEMMA3, 2)])
def test_what_is_counted_of_rotations_is_what_their_tables_take(
    values: dict[str, Any], num_tables: int
) -> None:
    config = parsed(values)
    ropes = {layer.rope for layer in config.layers}
    assert len(ropes) == num_tables
    tables = [rotary_tables(one, 100, torch.device("cpu")) for one in ropes]
    taken = sum(table.cos.nbytes + table.sin.nbytes for table in tables)
    assert describe_decoder(config).position_bytes * 100 == taken


def test_descriptions_names_and_defaults_need_no_torch(tmp_path: Path) -> None:
    """The HTTP front reads them."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    program = """if True:
        import sys
        from engine.fingerprint import fingerprint
        from engine.generation_defaults import read_generation_defaults
        from engine.model_source import resolve_model
        from engine.models.describe import describe
        source = resolve_model(sys.argv[1], weights=False)
        describe(source), fingerprint(source, "dummy", 0), read_generation_defaults(source.folder)
        loaded = {"torch", "transformers", "safetensors", "huggingface_hub"} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}])
def test_what_attending_costs_beside_a_token_itself(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """By the products: with each matrix of a layer, and with one token's key and value."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    model = describe(ModelSource("m", tmp_path))
    head, num_kv_heads = 16, changes.get("num_key_value_heads", 4)
    query = output = 64 * 4 * head
    key = value = 64 * num_kv_heads * head
    gate = up = down = 64 * 96
    by_itself = query + key + value + output + gate + up + down
    assert model.pair_share == pytest.approx(4 * 2 * head / by_itself)

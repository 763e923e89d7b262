"""The oracle itself, against torch's attention and transformers' own functions."""

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, eager_attention_forward
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.kernels.interface import NO_SLOT, Activation, HeadNorm, Rotary
from engine.kernels.reference import ReferenceKernels
from kv_cache.slab import KvSlab
from tests.engine.kernels.cases import (
    QUANTISED,
    AttentionCase,
    attention_case,
    make_slab,
    make_spec,
    random_slots,
    row,
    scale,
)

KERNELS = ReferenceKernels()
MIXED = [(1, 1), (1, 37), (5, 5), (1, 64), (17, 40), (1, 16), (33, 33)]


def sdpa(case: AttentionCase) -> torch.Tensor:
    """torch's own attention over the dense keys and values with the mask written out."""
    spec, starts, out = case.spec, case.batch.query_starts.tolist(), []
    for s, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[starts[s] : starts[s + 1]]
        i = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
        j = torch.arange(k.shape[0])[None, :]
        mask = (j <= i) & (j > i - (spec.window or 10**9))
        q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        out.append(result.transpose(0, 1))
    return torch.cat(out)


def attended(case: AttentionCase) -> torch.Tensor:
    return KERNELS.attention(
        case.q, case.spec, case.slab, case.layer, case.batch, case.group, case.sinks
    )


@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_is_a_token_of_every_sequence_whose_value_is_nothing(window: int | None) -> None:
    """Which torch's attention is given at the front, as a key that only its head's queries see."""
    spec = make_spec(4, 2, 16, window=window)
    case = attention_case(spec, [(5, 40)]).with_sinks()
    assert case.sinks is not None
    (k,), (v,) = case.keys, case.values
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    k = torch.cat((torch.zeros(1, 4, 16), k))
    k = torch.cat((k, torch.zeros(41, 4, 1)), -1)
    k[0, :, -1] = case.sinks / spec.scale
    v = torch.cat((torch.zeros(1, 4, 16), v))
    q = torch.cat((case.q, torch.ones(5, 4, 1)), -1)
    i, j = torch.arange(36, 41)[:, None], torch.arange(41)[None, :]
    mask = (j <= i) & ((j > i - (window or 100)) | (j == 0))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    torch.testing.assert_close(attended(case), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(4, 2, 16, 16), (6, 1, 80, 80), (3, 3, 96, 32), (8, 2, 256, 256)],
)
def test_attention_is_torchs_over_the_gathered_cache(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, window: int | None
) -> None:
    case = attention_case(make_spec(heads, kv_heads, head_dim, value_dim, window), MIXED)
    torch.testing.assert_close(attended(case), sdpa(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 64])
def test_attention_in_half_precision(dtype: torch.dtype, block_size: int) -> None:
    case = attention_case(make_spec(head_dim=64), MIXED, block_size, dtype)
    out = attended(case)
    assert out.dtype == dtype
    torch.testing.assert_close(out, sdpa(case).to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("window", "value_dim"), [(None, 64), (20, 40)])
def test_attention_over_a_quantised_cache(format: str, window: int | None, value_dim: int) -> None:
    """The dense truth is what the rows are after torch's own conversions."""
    spec = make_spec(head_dim=64, value_dim=value_dim, window=window)
    case = attention_case(spec, MIXED, format=format)
    torch.testing.assert_close(attended(case), sdpa(case), rtol=1e-5, atol=1e-5)


def test_soft_cap_is_gemmas() -> None:
    spec = make_spec(heads=4, kv_heads=2, head_dim=32, soft_cap=2.0)
    case = attention_case(spec, [(9, 9)])
    module = Gemma2Attention(Gemma2Config(num_attention_heads=4, num_key_value_heads=2), 0).eval()
    causal = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (case.q, case.keys[0], case.values[0]))
    theirs, _ = eager_attention_forward(
        module, q, k, v, causal, scaling=spec.scale, softcap=spec.soft_cap
    )
    torch.testing.assert_close(attended(case), theirs[0], rtol=1e-5, atol=1e-5)


def test_a_sequence_without_tokens_gives_zeros() -> None:
    case = attention_case(make_spec(), [(1, 5), (1, 9)])
    case.batch.kv_lens[1] = 0
    out = attended(case)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    torch.testing.assert_close(out[0], sdpa(case)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    spec = make_spec(kv_heads=3, head_dim=24, value_dim=40)
    slab = make_slab(spec, num_blocks=4, block_size=8, dtype=dtype)
    slots = random_slots(num_tokens=13, num_slots=32)
    k, v = torch.randn(13, 3, 24).to(dtype), torch.randn(13, 3, 40).to(dtype)
    KERNELS.write_kv(k, v, slab, 2, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot == NO_SLOT:
            continue
        for head in range(3):
            for plane, rows in ((0, k), (1, v)):
                stored = row(slab, 2, plane, head, slot // 8, slot % 8)
                assert torch.equal(stored, rows[token, head])
                stored.fill_(torch.nan)
    assert slab.data.isnan().all()


def read(slab: KvSlab, layer: int, plane: int, head: int, slot: int) -> torch.Tensor:
    place = layer, plane, head, slot // slab.layout.block_size, slot % slab.layout.block_size
    return row(slab, *place).float() * scale(slab, *place)


def nearest(values: torch.Tensor, slab: KvSlab) -> torch.Tensor:
    """To every element the nearest of all that can be stored with its row's scale."""
    largest = slab.layout.format.largest
    assert largest is not None
    codes = torch.arange(256, dtype=torch.uint8).view(slab.data.dtype).double()
    codes = codes[codes.abs() <= largest]  # neither NaN nor infinite, nor int8's -128
    reachable = codes * (values.double().abs().max() / largest)
    return reachable[(values.double()[:, None] - reachable).abs().argmin(-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", QUANTISED)
def test_a_quantised_write_is_the_nearest_and_touches_nothing_else(
    format: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    spec = make_spec(kv_heads=3, head_dim=24, value_dim=40)
    slab = make_slab(spec, num_blocks=4, block_size=8, format=format)
    slots = random_slots(num_tokens=13, num_slots=32)
    k, v = torch.randn(13, 3, 24).to(dtype), torch.randn(13, 3, 40).to(dtype)
    k[0], k[1], v[0], v[1] = k[0] * 1e30, k[1] * 1e-25, v[0] * 1e-3, -v[1] * 1e3
    v[3, 0, 1:] = 0.0
    KERNELS.write_kv(k, v, slab, 2, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot == NO_SLOT:
            continue
        for head in range(3):
            for plane, rows in ((0, k), (1, v)):
                values, stored = rows[token, head], read(slab, 2, plane, head, slot)
                error, least = stored - values, nearest(values, slab) - values
                assert (error.abs() <= least.abs() + 2e-6 * values.abs().max()).all()
                for part in (row, scale):
                    part(slab, 2, plane, head, slot // 8, slot % 8).view(torch.uint8).fill_(0xFF)
    assert (slab.data.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("format", QUANTISED)
def test_rows_without_a_finite_scale(format: str) -> None:
    """Zeros are read as zeros, and nothing hides an infinity or a NaN."""
    spec = make_spec(kv_heads=1, head_dim=16)
    slab = make_slab(spec, num_blocks=1, format=format)
    k = torch.randn(6, 1, 16)
    k[0], k[1] = 0.0, torch.full((16,), 1e-40)
    k[2, 0, 5], k[3, 0, 5], k[4, 0, 5] = torch.inf, -torch.inf, torch.nan
    k[5], k[5, 0, 3] = 0.0, torch.nan
    KERNELS.write_kv(k, k, slab, 0, torch.arange(6))
    for plane in (0, 1):
        for slot in (0, 1):
            assert torch.equal(read(slab, 0, plane, 0, slot), torch.zeros(16))
        for slot in (2, 3, 4, 5):
            assert read(slab, 0, plane, 0, slot).isnan().all()


@pytest.mark.parametrize("format", QUANTISED)
def test_keys_are_quantised_after_norm_and_rotation(format: str) -> None:
    spec = make_spec(heads=4, kv_heads=2, head_dim=32)
    plain, slab = make_slab(spec, num_blocks=3), make_slab(spec, num_blocks=3, format=format)
    angles = torch.rand(90, 16)
    rotary = Rotary(angles.cos(), angles.sin())
    norm = HeadNorm(torch.rand(32), torch.rand(32), 1e-5)
    slots, positions, qkv = random_slots(11, 48), torch.arange(11) * 7, torch.randn(11, 8 * 32)
    KERNELS.rotate_and_write(qkv, positions, rotary, norm, spec, plain, 0, slots)
    KERNELS.rotate_and_write(qkv, positions, rotary, norm, spec, slab, 0, slots)
    for slot in slots[slots != NO_SLOT].tolist():
        for head, plane in ((0, 0), (1, 0), (1, 1)):
            exact = row(plain, 0, plane, head, slot // 16, slot % 16)
            stored, least = read(slab, 0, plane, head, slot), nearest(exact, slab)
            error = (stored - exact).abs() - (least - exact).abs()
            assert error.max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_and_head_norm_are_transformers(with_norm: bool, partial: float) -> None:
    spec = make_spec(heads=4, kv_heads=2, head_dim=32)
    rotary_dim = int(spec.head_dim * partial)
    config = LlamaConfig(hidden_size=4 * rotary_dim, num_attention_heads=4)
    positions = torch.randint(0, 900, (11,))
    full_cos, full_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(900)[None])
    rotary = Rotary(full_cos[0, :, : rotary_dim // 2], full_sin[0, :, : rotary_dim // 2])
    norm = HeadNorm(torch.rand(32), torch.rand(32), 1e-5) if with_norm else None
    slab = make_slab(spec, num_blocks=3)
    slots = random_slots(11, 48)
    qkv = torch.randn(11, 8 * 32)
    q = KERNELS.rotate_and_write(qkv, positions, rotary, norm, spec, slab, 0, slots)

    expected_q, expected_k, expected_v = torch.tensor_split(qkv.view(11, 8, 32), (4, 6), dim=1)
    if norm is not None:
        expected_q = _llama_norm(expected_q, norm.q_weight)
        expected_k = _llama_norm(expected_k, norm.k_weight)
    turned_q, turned_k = apply_rotary_pos_emb(
        expected_q[..., :rotary_dim],
        expected_k[..., :rotary_dim],
        full_cos[0, positions],
        full_sin[0, positions],
    )
    torch.testing.assert_close(q[..., :rotary_dim], turned_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q[..., rotary_dim:], expected_q[..., rotary_dim:])
    for token in (slots != NO_SLOT).nonzero().flatten().tolist():
        slot = int(slots[token])
        k, v = (row(slab, 0, plane, 1, slot // 16, slot % 16) for plane in (0, 1))
        torch.testing.assert_close(k[:rotary_dim], turned_k[token, 1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(k[rotary_dim:], expected_k[token, 1, rotary_dim:])
        assert torch.equal(v, expected_v[token, 1])


def _llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    module = LlamaRMSNorm(x.shape[-1], eps=1e-5)
    module.weight.data = weight
    out: torch.Tensor = module(x)
    return out.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_transformers(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    weight = torch.rand(48)
    total = x + residual
    out = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = _llama_norm(total.float(), weight).to(dtype)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(KERNELS.rms_norm(total, weight, 1e-5), out, rtol=0, atol=0)


@pytest.mark.parametrize("activation", list(Activation))
def test_activations_are_transformers(activation: Activation) -> None:
    gate, up = torch.randn(5, 24), torch.randn(5, 24)
    out = KERNELS.gated_activation(torch.cat((gate, up), -1), activation)
    torch.testing.assert_close(out, ACT2FN[activation.value](gate) * up, rtol=1e-5, atol=1e-5)


def test_linear_reduces_in_fp32() -> None:
    weight, bias = torch.randn(8, 4096).bfloat16(), torch.randn(8).bfloat16()
    x = torch.randn(3, 4096).bfloat16()
    exact = F.linear(x.double(), weight.double(), bias.double())
    out = KERNELS.linear(weight, bias)(x)
    torch.testing.assert_close(out, exact.bfloat16(), rtol=1e-2, atol=1e-2)

"""KERPLE, FIRE, CoPE, DeBERTa, selective and multi-token attention: engines, offsets, padding, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DebertaV2Config, XLNetConfig, XLNetModel
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention,
    build_relative_position,
    make_log_bucket_position,
)
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

import regard
from regard import AuxRequest, masks
from regard.nn import (
    ContextualPositions,
    DisentangledPositions,
    FireBias,
    KerpleBias,
    KVCache,
    MultiTokenAttention,
    SelectiveBias,
    SelfAttention,
    TransformerXLPositions,
)

BIASES: dict[str, Any] = {
    "log": lambda: KerpleBias(3),
    "power": lambda: KerpleBias(3, "power"),
    "fire": lambda: FireBias(3, 5, threshold=2.2),
}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name: str) -> Any:
    torch.manual_seed(1)
    layer = BIASES[name]().double()
    with torch.no_grad():
        for each in layer.parameters():
            each += 0.2 * torch.randn_like(each)
    return layer


@pytest.mark.parametrize("name", BIASES)
def test_engines_and_offsets_agree(name: str) -> None:
    layer, x = built(name), rows(2, 3, 9, 4)
    whole = regard.attention(x, x, x, masks.causal() & layer(), engine="reference")
    tiled = regard.attention(x, x, x, masks.causal() & layer(), engine="streaming")
    torch.testing.assert_close(tiled, whole)
    offset = torch.tensor([5, 5])
    for where in (5, offset):
        step = regard.attention(x[:, :, 5:6], x, x, masks.causal(offset=where) & layer(where))
        torch.testing.assert_close(step, whole[:, :, 5:6])
    last = regard.attention(x[:, :, 7:], x, x, masks.causal("lower_right") & layer(align="lower_right"))
    torch.testing.assert_close(last, whole[:, :, 7:])


@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_tiles(name: str) -> None:
    layer, x = built(name), rows(1, 3, 5, 4)

    def pulled(engine: Any) -> list[Tensor]:
        layer.zero_grad()
        regard.attention(x, x, x, masks.causal() & layer(), engine=engine).square().sum().backward()
        return [each.grad.clone() for each in layer.parameters()]

    for a, b in zip(pulled("streaming"), pulled("reference")):
        torch.testing.assert_close(a, b)


def test_a_bias_can_be_asked_for_one_pair() -> None:
    layer = built("fire")
    mask = layer().bind(masks.Extent(1, 3, 6, 6), torch.device("cpu"))
    whole = mask.bias(
        torch.zeros(1, 1, 1, 1).long(), torch.arange(3).view(3, 1, 1), torch.arange(6)[:, None], torch.arange(6)
    )
    one = mask.bias(*(torch.tensor(i) for i in (0, 2, 4, 1)))
    torch.testing.assert_close(one, whole[2, 4, 1])


def test_contextual_positions_begin_as_none() -> None:
    q, k = rows(2, 4, 7, 8), rows(2, 2, 7, 8, seed=1)
    right = regard.attention(q, k, k, masks.causal(), enable_gqa=True)
    cope = ContextualPositions(8, 5).double()
    torch.testing.assert_close(regard.attention(q, k, k, masks.causal() & cope(q, k), enable_gqa=True), right)


def test_transformer_xl_positions_are_those_of_xlnet() -> None:
    torch.manual_seed(4)
    config = XLNetConfig(d_model=12, n_head=3, d_inner=4, n_layer=1, vocab_size=5)
    theirs, model = XLNetRelativeAttention(config).double().eval(), XLNetModel(config)
    ours = TransformerXLPositions(3, 4, max_distance=7).double()
    x, v = rows(2, 3, 6, 4), rows(2, 3, 6, 4, seed=1)
    with torch.no_grad():
        for each in (theirs.r, theirs.r_w_bias, theirs.r_r_bias):
            each.normal_()
        ours.weight.copy_(theirs.r.permute(1, 2, 0).flatten(0, 1))
        ours.content_bias.copy_(theirs.r_w_bias)
        ours.position_bias.copy_(theirs.r_r_bias)
        waves = model.relative_positional_encoding(6, 6, 2).double()
        sequences_first = [t.permute(2, 0, 1, 3) for t in (x, x, v)]
        expected = theirs.rel_attn_core(*sequences_first, torch.einsum("ibh,hnd->ibnd", waves, theirs.r))
        query, bias = ours(x)
        found = regard.attention(query, x, v, bias)
    # Their sinusoids are float32.
    torch.testing.assert_close(found, expected.permute(1, 2, 0, 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("buckets", "reach", "length"), [(None, 6, 9), (8, 32, 40)])
def test_disentangled_positions_are_those_of_deberta(buckets: int | None, reach: int, length: int) -> None:
    torch.manual_seed(4)
    half = buckets or reach
    config = DebertaV2Config(
        hidden_size=12,
        num_attention_heads=3,
        relative_attention=True,
        position_buckets=buckets or -1,
        max_relative_positions=reach,
        pos_att_type=["c2p", "p2c"],
    )
    theirs = DisentangledSelfAttention(config).double().eval()
    ours = DisentangledPositions(3, 4, reach, None if buckets is None else 2 * buckets).double()
    x, real = rows(2, length, 12), torch.arange(length) < torch.tensor([[length], [length // 2]])
    with torch.no_grad():
        ours.weight.normal_()
        for name, projection in (("key", theirs.pos_key_proj), ("query", theirs.pos_query_proj)):
            getattr(ours, f"{name}_weight").copy_(projection.weight)
            getattr(ours, f"{name}_bias").copy_(projection.bias.normal_())
        pairs = real[:, None, :, None] & real[:, None, None, :]
        expected, _ = theirs(x, pairs, rel_embeddings=ours.weight)
        projections = theirs.query_proj, theirs.key_proj, theirs.value_proj
        q, k, v = (project(x).unflatten(-1, (3, 4)).transpose(1, 2) for project in projections)
        found = regard.attention(q, k, v, masks.key_padding(real) & ours(q, k), scale=ours.scale)
    # Their scale is float32.
    torch.testing.assert_close(found.transpose(1, 2).flatten(2)[real], expected[real], rtol=1e-6, atol=1e-6)
    ends = torch.arange(length)
    theirs_places = build_relative_position(q, k, buckets or -1, reach)[0][
        [*[0] * length, *ends], [*ends, *[0] * length]
    ]
    found_places = [ours.bucket(int(gap)) for gap in (*-ends, *ends)]
    assert found_places == (theirs_places + half).clamp(0, 2 * half - 1).tolist()


def test_buckets_of_deberta_v3() -> None:
    layer, gaps = DisentangledPositions(1, 2, 512, 512), torch.arange(-600, 601)
    theirs = make_log_bucket_position(gaps, 256, 512).long() + 256
    assert [layer.bucket(int(gap)) for gap in gaps] == theirs.clamp(0, 511).tolist()


def test_a_step_with_disentangled_positions() -> None:
    torch.manual_seed(2)
    x, layer = rows(2, 3, 7, 8), DisentangledPositions(3, 8, 12, 16).double()
    torch.nn.init.normal_(layer.weight)
    whole = regard.attention(x, x, x, masks.causal() & layer(x, x), scale=layer.scale)
    step = regard.attention(x[:, :, 6:], x, x, layer(x[:, :, 6:], x, 6), scale=layer.scale)
    torch.testing.assert_close(step, whole[:, :, 6:])


@pytest.mark.parametrize("where", [{"offset": torch.tensor([3, 6])}, {"offset": 2}, {"align": "lower_right"}], ids=str)
def test_one_query_has_the_biases_of_several(where: dict[str, Any]) -> None:
    torch.manual_seed(2)
    layer = DisentangledPositions(4, 8, 12, 16).double()
    torch.nn.init.normal_(layer.weight)
    query, key = rows(2, 4, 1, 8).requires_grad_(), rows(2, 2, 7, 8).requires_grad_()
    offset = 6 if "align" in where else where["offset"]

    def step(query: Tensor, key: Tensor) -> Tensor:
        return regard.attention(query, key, key, layer(query, key, **where), scale=layer.scale, enable_gqa=True)

    twice = torch.cat([query, query], 2)
    several = regard.attention(twice, key, key, layer(twice, key, offset), scale=layer.scale, enable_gqa=True)
    answers = [step(query, key), several[:, :, :1]]
    for a, b in zip(*(torch.autograd.grad(each.square().sum(), [query, key, *layer.parameters()]) for each in answers)):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(*answers)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), answers[0])


def test_a_window_of_a_cache_has_no_distances() -> None:
    layer = SelfAttention(8, 2, disentangled=DisentangledPositions(2, 4, 9))
    with pytest.raises(ValueError, match="SelfAttention: cache must have no window with disentangled positions"):
        layer(rows(1, 1, 8).float(), cache=KVCache(window=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_buckets": 10}, "num_buckets must be a multiple of 4, got 10"),
        ({"num_buckets": 4}, "num_buckets must be an int of at least 8 or None, got 4"),
        ({"num_buckets": 16, "max_distance": 8}, "max_distance must be an int of at least 9, got 8"),
    ],
)
def test_settings_of_disentangled_positions(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DisentangledPositions(**({"num_heads": 3, "head_dim": 4, "max_distance": 9} | arguments))


def test_disentangled_positions_need_the_calls_queries_and_keys() -> None:
    q, k = rows(2, 3, 5, 4), rows(2, 2, 6, 4)
    layer = DisentangledPositions(3, 4, 5).double()
    with pytest.raises(ValueError, match="key must have a number of heads that divides 3, got 2"):
        layer(q, k)
    with pytest.raises(ValueError, match="the query and key of the attention call"):
        regard.attention(q, q, q, layer(q, rows(2, 3, 6, 4), 0))


def test_a_step_with_contextual_positions() -> None:
    torch.manual_seed(2)
    x, cope = rows(2, 3, 7, 8), ContextualPositions(8, 4).double()
    torch.nn.init.normal_(cope.weight)
    whole = regard.attention(x, x, x, masks.causal() & cope(x, x))
    step = regard.attention(x[:, :, 6:], x, x, cope(x[:, :, 6:], x, 6))
    torch.testing.assert_close(step, whole[:, :, 6:])


@pytest.mark.parametrize(
    "layer",
    [ContextualPositions(8, 4), SelectiveBias(), DisentangledPositions(3, 8, 4)],
    ids=lambda each: each._get_name(),
)
def test_padding_has_no_influence(layer: Any) -> None:
    layer = layer.double()
    for each in layer.parameters():
        torch.nn.init.normal_(each)
    real = torch.arange(7) < 5

    def run(garbage: float) -> list[Tensor]:
        q = rows(1, 3, 7, 8, seed=1).requires_grad_()
        k = torch.where(real.unsqueeze(-1), rows(1, 3, 7, 8), garbage).requires_grad_()
        out = regard.attention(q, k, k, masks.causal() & masks.key_padding(real) & layer(q, k))
        grads = torch.autograd.grad(out[:, :, :5].square().sum(), [q, k, *layer.parameters()])
        return [out, *grads]

    for a, b in zip(run(torch.nan), run(0.0)):
        torch.testing.assert_close(a, b)


def test_selection_gradients() -> None:
    q, k = (rows(1, 2, 4, 3, seed=i).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(
        lambda q, k: regard.attention(q, k, k, masks.causal() & SelectiveBias(1)(q, k)), (q, k)
    )


def test_multi_token_attention_begins_as_self_attention() -> None:
    layer = MultiTokenAttention(16, 4, 3, 4, head_kernel=2, num_kv_heads=2, dtype=torch.float64)
    plain = SelfAttention(16, 4, num_kv_heads=2, dtype=torch.float64)
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if name not in ("kernel", "mixing")})
    x, lengths = rows(2, 6, 16), masks.padding(torch.tensor([4, 6]))
    torch.testing.assert_close(layer(x, lengths, is_causal=True), plain(x, lengths, is_causal=True))
    garbage = x.clone()
    garbage[0, 4:] = torch.nan
    found = layer(garbage, lengths, is_causal=True)
    torch.testing.assert_close(found[0, :4], layer(x, lengths, is_causal=True)[0, :4])
    output, aux = layer(x, is_causal=True, return_aux=AuxRequest(weights=True))
    assert torch.equal(output, layer(x, is_causal=True)) and aux.weights.shape == (2, 4, 6, 6)


def test_multi_token_attention_does_not_look_ahead() -> None:
    torch.manual_seed(3)
    layer, x = MultiTokenAttention(16, 4, 3, 5, head_kernel=4, dtype=torch.float64), rows(1, 7, 16)
    torch.nn.init.normal_(layer.kernel)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(layer(changed, is_causal=True)[:, :4], layer(x, is_causal=True)[:, :4])


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: KerpleBias(2, "square"), "KerpleBias: kind must be one of 'log', 'power', got 'square'"),
        (
            lambda: regard.attention(*[rows(1, 3, 4, 2)] * 3, KerpleBias(2)()),
            "KerpleBias: num_heads must be the number of query heads of the call, 3, got (2,).",
        ),
        (
            lambda: regard.attention(*[rows(1, 3, 4, 2)] * 3, FireBias(2)()),
            "FireBias: num_heads must be the number of query heads of the call, 3, got 2.",
        ),
        (lambda: ContextualPositions(4, 1), "ContextualPositions: max_positions must be an int of at least 2, got 1."),
        (
            lambda: ContextualPositions(4)(rows(1, 3, 5, 4), rows(1, 2, 5, 4)),
            "ContextualPositions: key must have a number of heads that divides 3, got 2.",
        ),
        (
            lambda: SelectiveBias(4)(rows(1, 3, 5, 4), rows(1, 3, 5, 4)),
            "SelectiveBias: head must be below the number of heads, 3, got 4.",
        ),
        (
            lambda: SelectiveBias()(rows(1, 3, 1, 4), rows(1, 3, 5, 4)),
            "SelectiveBias: key must have shape (1, G, 1, 4), got (1, 3, 5, 4).",
        ),
        (
            lambda: MultiTokenAttention(8, 4, head_kernel=3),
            "MultiTokenAttention: head_kernel must divide num_heads 4, got 3.",
        ),
    ],
)
def test_arguments_that_do_not_fit(run: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        run()
    assert str(error.value).startswith(sentence)


def test_multi_token_attention_refuses_steps() -> None:
    layer, cache = MultiTokenAttention(8, 2), KVCache()
    with torch.no_grad():
        layer(torch.zeros(1, 3, 8), is_causal=True, cache=cache)
        with pytest.raises(ValueError, match="MultiTokenAttention: x must be a whole sequence, as scores of earlier"):
            layer(torch.zeros(1, 1, 8), cache=cache)

"""Layers with a decaying state: caches, documents, padding, effective weights, and transformers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.regard.nn.layer_samples import recurrent, trained
from torch import Tensor

from regard import AuxRequest, masks, nn
from regard.nn.linear.layout import Layout
from regard.nn.linear.log_linear import log_linear_recurrence
from regard.nn.linear.recurrent_attention import RecurrentAttention

F64 = torch.float64
LAYERS = recurrent.LAYERS | trained.LAYERS
NAMES = [name for name in LAYERS if name != "ShortConvolution"]
every_layer = pytest.mark.parametrize("name", NAMES)
linear_layer = pytest.mark.parametrize("name", [name for name in NAMES if name not in trained.LAYERS])
close = torch.testing.assert_close


def made(name: str, **where: Any) -> RecurrentAttention:
    torch.manual_seed(0)
    layer = next(iter(LAYERS[name][0].values()))(**{"dtype": F64} | where)
    assert isinstance(layer, RecurrentAttention)
    return layer


def layer_state(layer: RecurrentAttention, x: Tensor) -> Tensor:
    cache = nn.LinearCache()
    layer(x, cache=cache)
    assert cache.state is not None
    return cache.state[0]


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@every_layer
@pytest.mark.parametrize("parts", [[1] * 9, [4, 1, 4], [8, 1], [0, 9, 0]])
def test_a_cache_continues_a_sequence(name: str, parts: list[int]) -> None:
    layer, x, cache = made(name), rows(2, 9, 8), nn.LinearCache()
    found = torch.cat([layer(part, cache=cache) for part in x.split(parts, 1)], 1)
    close(found, layer(x))
    assert len(cache) == 9
    sizes = [each.shape for each in cache.state]
    layer(x, cache=cache)
    assert [each.shape for each in cache.state] == sizes  # constant memory


def test_several_steps_of_the_delta_rule_for_each_token() -> None:
    torch.manual_seed(0)
    layer = nn.GatedDeltaNet(8, 2, num_steps=3, negative_eigenvalues=True, dtype=F64)
    x, cache, ids = rows(2, 9, 8), nn.LinearCache(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    whole = layer(x)
    close(torch.cat([layer(part, cache=cache) for part in x.split([4, 1, 4], 1)], 1), whole)
    assert cache.state.matrix.shape == (2, 2, 4, 8)
    close(layer(x, masks.document(ids))[:, 4:7], layer(x[:, 4:7]))
    close(layer(x, valid_lens=torch.tensor([5, 9]))[0, :5], whole[0, :5])
    found, aux = layer(x, return_aux=AuxRequest(weights=True))
    close(found, whole)
    assert aux.weights is not None and aux.weights.shape == (2, 2, 9, 9) and not aux.weights.triu(1).any()
    with pytest.raises(ValueError, match="GatedDeltaNet: num_steps must be"):
        nn.GatedDeltaNet(8, 2, num_steps=0)


@pytest.mark.parametrize("delta", [False, True])
def test_levels_weigh_what_a_recurrence_keeps_of_each_step(delta: bool) -> None:
    B, G, H, L, K, V, N = 2, 2, 4, 150, 4, 3, 9
    query, key = rows(B, G, L, K), torch.nn.functional.normalize(rows(B, G, L, K, seed=2), dim=-1)
    value, levels = rows(B, H, L, V, seed=3), rows(B, H, L, N, seed=4)
    gates: dict[str, Any] = {"log_decay": -rows(B, H, L, seed=5).abs() / 9, "rate": rows(B, H, L, seed=6).sigmoid()}
    gates |= {"delta": delta, "scale": 0.7}
    whole = nn.gated_recurrence_weights(query, key, num_heads=H, **gates)
    steps = range(L)
    level = torch.tensor([[(t ^ j).bit_length() for j in steps] for t in steps]).expand(B, H, L, L)
    expected = (whole * levels.gather(-1, level)) @ value
    close(log_linear_recurrence(query, key, value, levels, **gates, layout=Layout()), expected)
    plain = log_linear_recurrence(query, key, value, torch.ones_like(levels), **gates, layout=Layout())
    close(plain, nn.gated_recurrence(query, key, value, **gates))
    # The same in parts, with a state between them; some end within a block of each level.
    found, state, before = [], None, 0
    for first, last in ((0, 1), (1, 5), (5, 64), (64, 128), (128, 150)):
        parts = (each[:, :, first:last] for each in (query, key, value, levels))
        cut = gates | {name: gates[name][:, :, first:last] for name in ("log_decay", "rate")}
        made = log_linear_recurrence(*parts, **cut, layout=Layout(), before=before, state=state, return_state=True)
        found, state, before = [*found, made[0]], made[1], last
    close(torch.cat(found, 2), expected)


def test_a_log_linear_layer_refuses_more_steps_than_it_has_levels_for() -> None:
    layer, cache = nn.LogLinearGatedDeltaNet(8, 2, max_len=5, dtype=F64), nn.LinearCache()
    assert layer.num_levels == 4 and nn.LogLinearMamba2(8, 2).num_levels == 15
    layer(rows(1, 4, 8), cache=cache)
    layer(rows(1, 1, 8), cache=cache)
    with pytest.raises(ValueError, match="LogLinearGatedDeltaNet: x must bring the steps to at most max_len 5, got 6"):
        layer(rows(1, 1, 8), cache=cache)
    with pytest.raises(ValueError, match="LogLinearMamba2: max_len must be an int of at least 2, got 1"):
        nn.LogLinearMamba2(8, 2, max_len=1)


def test_conjugate_gradients_approach_the_solution_of_mesa_net() -> None:
    layer, x, errors = nn.MesaNet(8, 2, head_dim=6, dtype=F64), rows(2, 40, 8), []
    exact = layer(x)
    (gradient,) = torch.autograd.grad(exact.square().sum(), layer.qk.weight)
    for layer.iterations in (1, 3, 6):
        errors.append(float((layer(x) - exact).abs().max()))
    assert errors[0] > 10 * errors[1] > 100 * errors[2] and errors[2] < 1e-9
    (approximate,) = torch.autograd.grad(layer(x).square().sum(), layer.qk.weight)
    close(approximate, gradient, rtol=1e-6, atol=1e-8)
    one, cache = nn.MesaNet(8, 2, iterations=9, dtype=F64), nn.LinearCache()
    close(torch.cat([one(part, cache=cache) for part in x.split([1, 20, 19], 1)], 1), one(x))


@pytest.mark.parametrize("iterations", [None, 3])
def test_second_derivatives_of_mesa_net(iterations: int | None) -> None:
    torch.manual_seed(0)
    layer = nn.MesaNet(2, 1, iterations=iterations, dtype=F64)
    torch.autograd.gradgradcheck(layer, (rows(1, 3, 2).requires_grad_(),))


def test_atlas_without_its_own_parts_is_titans_memory() -> None:
    titans, x = nn.TitansMemory(8, 2, block_size=3, dtype=F64), rows(2, 7, 8)
    atlas = nn.Atlas(8, 2, degree=1, window=1, muon=False, block_size=3, dtype=F64)
    with torch.no_grad():
        atlas.coefficients[0] = 0
        titans.rates.weight[:2] = 0  # one rate for all steps: there it is that of what enters the momentum
        for ours, theirs in zip(atlas.initial, titans.initial):
            ours[:, 1:] = theirs.normal_()
        atlas.rates.weight[:6], atlas.rates.bias[:6] = titans.rates.weight, titans.rates.bias
        atlas.rates.weight[6:], atlas.rates.bias[6:] = 0, 50  # γ = 1
        for name in ("qkv", "gate", "out"):
            getattr(atlas, name).load_state_dict(getattr(titans, name).state_dict())
        atlas.conv.load_state_dict(titans.conv.state_dict())
    close(atlas(x), titans(x))


def test_titans_memory_generalizes_the_delta_rule() -> None:
    layer, x = nn.TitansMemory(8, 2, dtype=F64), rows(2, 40, 8)
    terms, _ = layer.terms(x, None, Layout(), None)
    terms = terms._replace(log_decay=torch.zeros_like(terms.rate), log_momentum=torch.full_like(terms.rate, -1e4))
    with torch.no_grad():
        layer.memory[0].zero_()
    found, _ = layer.recur(terms, Layout(), 0)
    close(found, nn.gated_recurrence(terms.query, terms.key, terms.value, rate=terms.rate, delta=True, scale=1.0))


def test_an_exported_memory_of_titans_is_for_any_length() -> None:
    layer, length = made("TitansMemory").eval(), torch.export.Dim("length", min=2, max=99)
    program = torch.export.export(layer, (rows(2, 9, 8),), dynamic_shapes=({1: length},)).module()
    for x in (rows(2, 5, 8), rows(2, 70, 8)):
        close(program(x), layer(x))


@pytest.mark.parametrize("name", trained.LAYERS)
def test_a_network_learns_each_document_anew(name: str) -> None:
    layer, x = made(name), rows(2, 6, 8)
    how = {"valid_lens": recurrent.LENGTHS, "documents": recurrent.DOCUMENTS}
    close(layer(x, **how), torch.tensor(LAYERS[name][1](layer, x, **how)))


def test_layers_that_learn_print_their_blocks() -> None:
    assert repr(nn.TTTLinear(8, 2)).startswith("TTTLinear(\n  8, num_heads=2, head_dim=4, block_size=16\n")
    assert "head_dim=4, depth=2, block_size=16, window=64\n" in repr(nn.TitansMAG(8, 2, depth=2))
    assert "head_dim=4, depth=1, segment=5\n" in repr(nn.TitansMAC(8, 2, segment=5))


@pytest.mark.parametrize("name", ["TTTLinear", "TTTMLP", "TitansMemory"])
def test_second_derivatives_of_a_network_that_learns(name: str) -> None:
    kind = getattr(nn, name)
    torch.manual_seed(0)
    layer = kind(2, 1, block_size=2, dtype=F64)
    torch.autograd.gradgradcheck(layer, (rows(1, 3, 2).requires_grad_(),))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LaCT(4, 2, num_memories=1, chunk_size=2, window=2, dtype=F64),
        nn.Atlas(4, 1, key_dim=1, value_dim=2, window=2, block_size=2, depth=2, dtype=F64),
    ],
    ids=["LaCT", "Atlas"],
)
def test_gradients_through_orthogonal_steps(layer: nn.LaCT | nn.Atlas) -> None:
    x = rows(1, 5, 4).requires_grad_()
    with torch.no_grad():  # rates that make a difference
        layer.rates.bias.fill_(0.5)
    weights = [*layer.initial, *layer.rates.parameters()]
    torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *weights))


@pytest.mark.parametrize("name", trained.LAYERS)
def test_a_network_that_learns_has_no_effective_weights(name: str) -> None:
    message = f"{name}: return_aux must be None, as a network that learns has no effective weights of steps"
    with pytest.raises(ValueError, match=message):
        made(name)(rows(2, 5, 8), return_aux=AuxRequest(weights=True))


def test_a_row_that_is_not_finite_does_not_look_like_one_that_is() -> None:
    layer, x = nn.MesaNet(8, 2, dtype=F64), rows(1, 5, 8)
    x[:, 3] = torch.nan
    assert layer(x)[:, 3:].isnan().all()


@every_layer
def test_a_cache_is_reordered_and_emptied(name: str) -> None:
    layer, x, cache = made(name), rows(3, 5, 8), nn.LinearCache()
    layer(x[:, :4], cache=cache)
    cache.reorder(torch.tensor([2, 0]))
    close(layer(x[[2, 0], 4:], cache=cache), layer(x)[[2, 0], 4:])
    one = nn.LinearCache()
    layer(x[:, :4], cache=one)
    alone = nn.LinearCache()
    alone.advance(one.sequence(1), 4)
    close(layer(x[1:2, 4:], cache=alone), layer(x)[1:2, 4:])
    one.truncate(0)
    close(layer(x, cache=one), layer(x))


@every_layer
def test_documents_do_not_see_each_other(name: str) -> None:
    layer, x = made(name), rows(1, 9, 8)
    ids = torch.tensor([3, 3, 3, 3, 1, 1, 1, 1, 5])
    found = layer(x, documents=ids)
    close(found, layer(x, masks.document(ids)))
    close(found, layer(x, masks.from_cu_seqlens(torch.tensor([0, 4, 8, 9]))))
    close(found, torch.cat([layer(part) for part in x.split([4, 4, 1], 1)], 1))
    cache = nn.LinearCache()  # an earlier step belongs to the first document, the state to the last
    layer(x[:, :2], cache=cache)
    close(layer(x[:, 2:6], documents=ids[2:6], cache=cache), found[:, 2:6])
    close(layer(x[:, 6:], documents=ids[6:], cache=cache), found[:, 6:])


@every_layer
def test_padding_on_either_side(name: str) -> None:
    layer, x = made(name), rows(2, 9, 8)
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    right = layer(x, masks.key_padding(keep))
    close(right[1, :5], layer(x[1:, :5])[0])
    close(right, layer(x, masks.padding(torch.tensor([9, 5]))))
    close(right, layer(x, valid_lens=torch.tensor([9, 5])))
    left = layer(x.flip(1), masks.key_padding(keep.flip(1)))
    close(left[1, 4:], layer(x.flip(1)[1:, 4:])[0])
    # The state is that after the last real step, with documents, too.
    for documents in (None, torch.tensor([[0] * 9, [0, 0, 1, 1, 1, 9, 9, 9, 9]])):
        cache, alone = nn.LinearCache(), nn.LinearCache()
        layer(x, valid_lens=torch.tensor([9, 5]), documents=documents, cache=cache)
        own = None if documents is None else documents[1:, :5]
        layer(x[1:, :5], documents=own, cache=alone)
        for a, b in zip(cache.state, alone.state):
            close(a[1:], b)
        then = rows(2, 2, 8)  # padding before these does not count
        last = None if documents is None else documents[:, -1:].expand(2, 2)
        close(
            layer(then, cache=cache, documents=last)[1:],
            layer(then[1:], cache=alone, documents=last if last is None else last[1:]),
        )
    nothing = layer(torch.full_like(x, torch.nan), valid_lens=torch.tensor([0, 0]))
    assert nothing.isfinite().all()


@pytest.mark.parametrize("layer", [nn.Mamba(8, bias=True, dtype=F64), nn.Mamba2(8, 2, bias=True, dtype=F64)])
def test_a_bias_before_the_convolution_is_not_read_from_padding(layer: nn.Mamba | nn.Mamba2) -> None:
    torch.nn.init.ones_(layer.proj.bias)
    x = rows(1, 6, 8)
    close(layer(x, masks.key_padding(torch.arange(6)[None] >= 2))[:, 2:], layer(x[:, 2:]))


@every_layer
def test_what_is_not_finite_changes_no_earlier_row(name: str) -> None:
    layer, x = made(name), rows(2, 9, 8)
    right, ids = layer(x), torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])
    apart = layer(x, documents=ids)
    x[0, 5] = torch.inf
    close(layer(x)[:, :5], right[:, :5])
    close(layer(x)[1], right[1])
    close(layer(x, documents=ids)[:, 7:], apart[:, 7:])


@every_layer
def test_lengths_beyond_the_sequence_are_refused(name: str) -> None:
    layer, x = made(name), rows(2, 4, 8)
    message = f"{name}: valid_lens must be from 0 to 4, the length of the sequences, got -1"
    with pytest.raises(ValueError, match=message):
        layer(x, valid_lens=torch.tensor([4, -1]))
    with pytest.raises(ValueError, match=f"{name}: lengths of attn_mask must be from 0 to 4, .* got 5"):
        layer(x, masks.padding(torch.tensor([4, 5])))
    cache = nn.LinearCache()
    layer(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match=f"{name}: lengths of attn_mask must be from 0 to 4, .* got 5"):
        layer(x[:, 3:], masks.padding(torch.tensor([4, 5])), cache=cache)


@every_layer
def test_a_sequence_that_ended_before_the_step(name: str) -> None:
    layer, x, cache, lengths = made(name), rows(2, 6, 8), nn.LinearCache(), torch.tensor([3, 6])
    found = [layer(x[:, t : t + 2], masks.padding(lengths.clamp(max=t + 2)), cache=cache) for t in (0, 2, 4)]
    found, whole = torch.cat(found, 1), layer(x, masks.padding(lengths))
    close(found[0, :3], whole[0, :3])
    close(found[1], whole[1])


@every_layer
def test_no_steps_and_no_sequences(name: str) -> None:
    layer = made(name)
    assert layer(rows(2, 0, 8)).shape == (2, 0, 8)
    assert layer(rows(0, 5, 8)).shape == (0, 5, 8)


@linear_layer
@pytest.mark.parametrize("documents", [None, torch.tensor([0, 0, 0, 1, 1, 1, 1])])
def test_the_effective_weights_are_the_recurrence_as_a_matrix(name: str, documents: Tensor | None) -> None:
    layer, x, read = made(name), rows(2, 7, 8), []
    finish = layer.finish

    def watched(found: Tensor, x: Tensor, terms: Any) -> Tensor:
        skip = layer.D.view(-1, 1) * terms.value.transpose(1, 2) if isinstance(layer, nn.Mamba | nn.Mamba2) else 0
        read.append((found + skip, terms.value))
        return finish(found, x, terms)

    layer.finish = watched  # type: ignore[method-assign]
    plain = layer(x, documents=documents)
    out, aux = layer(x, documents=documents, return_aux=AuxRequest(weights=True))
    assert torch.equal(out, plain)
    found, value = read[-1]
    close(aux.weights @ value, found.transpose(1, 2))
    assert aux.weights.triu(1).count_nonzero() == 0
    if documents is not None:
        assert aux.weights[..., 3:, :3].count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "width"), [("MesaNet", 4), ("GatedSlotAttention", 4), ("Comba", 0), ("LogLinearGatedDeltaNet", 0)]
)
def test_effective_weights_after_earlier_steps(name: str, width: int) -> None:
    """They are those of the new values, as earlier keys change them: what values added to the state is cleared."""
    layer, x, cache, read = made(name), rows(2, 7, 8), nn.LinearCache(), list[Tensor]()
    layer(x[:, :3], cache=cache)
    kept = torch.arange(cache.state.matrix.shape[-1]) < width
    cache.advance(cache.state._replace(matrix=cache.state.matrix * kept), 0)
    finish = layer.finish

    def watched(found: Tensor, x: Tensor, terms: Any) -> Tensor:
        read.extend((found.transpose(1, 2), terms.value))
        return finish(found, x, terms)

    layer.finish = watched  # type: ignore[method-assign]
    _, aux = layer(x[:, 3:], cache=cache, return_aux=AuxRequest(weights=True))
    close(aux.weights @ read[1], read[0])


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_weights_against_products_of_transitions(delta: bool, channels: bool) -> None:
    """W_ij = scale · q_iᵀ (Π_{t=j+1…i} (I − β_t k_t k_tᵀ) D_t) β_j k_j, multiplied out."""
    B, H, L, K = 2, 3, 6, 4
    query, key = rows(B, H, L, K), torch.nn.functional.normalize(rows(B, H, L, K, seed=2), dim=-1)
    decay = -rows(B, H, L, *([K] if channels else []), seed=3).abs()
    rate = rows(B, H, L, seed=4).sigmoid()
    found = nn.gated_recurrence_weights(query, key, log_decay=decay, rate=rate, delta=delta)
    expected = torch.zeros(B, H, L, L, dtype=F64)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        for j in range(L):
            reached = rate[b, h, j] * key[b, h, j]
            for i in range(j, L):
                if i > j:
                    k = key[b, h, i]
                    reached = decay[b, h, i].exp() * reached
                    reached = reached - (rate[b, h, i] * k * (k @ reached) if delta else 0)
                expected[b, h, i, j] = K**-0.5 * query[b, h, i] @ reached
    close(found, expected)


@pytest.mark.campaign(keep=5)
@every_layer
def test_gradients_are_those_of_differences(name: str) -> None:
    layer, x = made(name), rows(1, 4, 8).requires_grad_()
    lens, documents = torch.tensor([3]), torch.tensor([0, 0, 1, 1])
    torch.autograd.gradcheck(lambda x: layer(x, valid_lens=lens, documents=documents), (x,))


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_summed_in_single_precision(name: str, dtype: torch.dtype) -> None:
    layer, x, cache = made(name, dtype=torch.float32), rows(2, 300, 8).float(), nn.LinearCache()
    narrow = made(name, dtype=dtype)
    narrow.load_state_dict(layer.state_dict())
    found, right = narrow(x.to(dtype), cache=cache), layer(x)
    assert found.dtype == dtype and cache.state.matrix.dtype == torch.float32
    assert (found.float() - right).abs().max() < 40 * torch.finfo(dtype).eps * right.abs().max()


@every_layer
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    layer, x = made(name), rows(2, 5, 8)
    for arguments, sentence in (
        ({"attn_mask": masks.causal()}, r"attn_mask must be None, masks\.document\(ids\), a padding mask, or both, as"),
        ({"attn_mask": torch.ones(5, 5).bool()}, r"attn_mask must be None, masks\.document\(ids\), a padding mask"),
        ({"attn_mask": masks.key_padding(torch.ones(2, 4).bool())}, r"attn_mask must keep keys of shape \(2, 5\), got"),
        ({"valid_lens": torch.tensor([1, 2, 3])}, r"valid_lens must have shape \(2,\), got \(3,\)"),
        ({"documents": torch.zeros(2, 4).long()}, r"documents must be an integer tensor \(L,\) or \(B, L\), here"),
        ({"return_aux": AuxRequest(lse=True)}, "return_aux must ask for weights alone, as there are no scores"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"{type(layer).__name__}: {sentence}"):
            layer(x, **arguments)
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}: x must have shape \(B, L, 8\)"):
        layer(rows(2, 5, 7))


def test_wrong_sizes_are_refused() -> None:
    for build, sentence in (
        (lambda: nn.GatedDeltaNet(8, 4, num_key_heads=3), "Net: num_key_heads must divide num_heads 4, got 3"),
        (lambda: nn.GatedDeltaNet(8, 3), "GatedDeltaNet: num_heads must divide embed_dim 8, got 3"),
        (lambda: nn.Mamba2(8, 4, num_groups=3), "Mamba2: num_groups must divide num_heads 4, got 3"),
        (lambda: nn.Mamba2(8, 3), "Mamba2: num_heads must divide 2 · embed_dim 16, got 3"),
        (lambda: nn.GatedLinearAttention(8, 8), "GatedLinearAttention: num_heads must divide embed_dim / 2, 4, got 8"),
        (lambda: nn.MesaNet(8, 2, iterations=0), "MesaNet: iterations must be"),
        (lambda: nn.MesaNet(8, 2, least_ridge=1.0), "MesaNet: least_ridge must be"),
        (lambda: nn.MesaNet(8, 3), "MesaNet: num_heads must divide embed_dim 8, got 3"),
        (lambda: nn.Mamba(8, state_dim=0), "Mamba: state_dim must be"),
        (lambda: nn.TTTLinear(8, 2, block_size=0), "TTTLinear: block_size must be"),
        (lambda: nn.TTTLinear(8, 2, head_dim=3), "TTTLinear: head_dim must be even with rotary positions, got 3"),
        (lambda: nn.TTTMLP(8, 2, learning_rate=0.0), "TTTMLP: learning_rate must be"),
        (lambda: nn.TTTMLP(8, 3), "TTTMLP: num_heads must divide embed_dim 8, got 3"),
        (lambda: nn.TitansMemory(8, 2, depth=0), "TitansMemory: depth must be"),
        (lambda: nn.TitansMAC(8, 2, segment=0), "TitansMAC: segment must be"),
        (lambda: nn.TitansMAG(8, 2, window=0), "TitansMAG: window must be"),
        (lambda: nn.TitansMAL(6, 2), "TitansMAL: num_heads must give heads of an even width, .*, got 3"),
        (lambda: nn.HGRN2(8, 2, lower_bound=1.0), "HGRN2: lower_bound must be"),
        (lambda: nn.Comba(8, 4, num_key_heads=3), "Comba: num_key_heads must divide num_heads 4, got 3"),
        (lambda: nn.Comba(8, 2, correction=float("nan")), "Comba: correction must be"),
        (lambda: nn.GatedSlotAttention(8, 3), "GatedSlotAttention: num_heads must divide embed_dim 8, got 3"),
        (lambda: nn.GatedSlotAttention(8, 2, num_slots=0), "GatedSlotAttention: num_slots must be"),
        (lambda: nn.GatedSlotAttention(8, 2, damping=0.0), "GatedSlotAttention: damping must be"),
        (lambda: nn.LaCT(6, 2), "LaCT: num_heads must give heads of an even width, .*, got 3"),
        (lambda: nn.LaCT(8, 2, num_memories=3), "LaCT: num_memories must divide embed_dim 8, got 3"),
        (lambda: nn.LaCT(8, 2, chunk_size=0), "LaCT: chunk_size must be"),
        (lambda: nn.LaCT(8, 2, window=0), "LaCT: window must be"),
        (lambda: nn.Atlas(8, 3), "Atlas: num_heads must divide embed_dim 8, got 3"),
        (lambda: nn.Atlas(8, 2, degree=0), "Atlas: degree must be"),
        (lambda: nn.Atlas(8, 2, window=0), "Atlas: window must be"),
        (lambda: nn.ShortConvolution(8, 0), "ShortConvolution: width must be"),
        (lambda: nn.ShortConvolution(8)(rows(2, 3, 8), state=rows(2, 2, 8)), "state must be a tensor of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build()


# transformers' layers with the same weights ---------------------------------------------------------------------------


def weights_of(theirs: torch.nn.Module) -> None:
    torch.manual_seed(7)
    for each in theirs.parameters():
        torch.nn.init.normal_(each, std=0.4)


@torch.no_grad()
def test_gated_delta_net_of_qwen3_next_and_olmo_hybrid() -> None:
    from transformers import OlmoHybridConfig, Qwen3_5TextConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    sizes: dict[str, Any] = {"hidden_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "num_hidden_layers": 2, "num_attention_heads": 2}
    x = rows(2, 70, 16).float()
    for negative, config, kind in (
        (False, Qwen3_5TextConfig(**sizes), Qwen3_5GatedDeltaNet),
        (True, OlmoHybridConfig(**sizes), OlmoHybridGatedDeltaNet),
    ):
        theirs = kind(config, 0).eval()
        weights_of(theirs)
        eps = 1e-5 if negative else 1e-6
        ours = nn.GatedDeltaNet(
            16, 4, num_key_heads=2, key_dim=5, value_dim=3, negative_eigenvalues=negative, norm_eps=eps
        )
        if negative:
            pairs = {"qkv": ("q_proj", "k_proj", "v_proj"), "rates": ("b_proj", "a_proj"), "gate": ("g_proj",)}
            pairs |= {"conv": ("conv1d",), "norm": ("o_norm",), "out": ("o_proj",)}
        else:
            pairs = {"qkv": ("in_proj_qkv",), "rates": ("in_proj_b", "in_proj_a"), "gate": ("in_proj_z",)}
            pairs |= {"conv": ("conv1d",), "norm": ("norm",), "out": ("out_proj",)}
        copied = {f"{a}.weight": torch.cat([getattr(theirs, each).weight for each in b]) for a, b in pairs.items()}
        ours.load_state_dict(copied | {"A_log": theirs.A_log, "dt_bias": theirs.dt_bias})
        close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_kimi_delta_attention_of_kimi_linear() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(hidden_size=16, linear_head_dim=5, linear_num_heads=3, num_hidden_layers=2)
    theirs = KimiLinearDeltaAttention(config, 0).eval()
    weights_of(theirs)
    ours = nn.KimiDeltaAttention(16, 3, head_dim=5, norm_eps=config.rms_norm_eps)
    copied = {
        "qkv.weight": torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]),
        "conv.weight": theirs.conv1d.weight,
        "rate.weight": theirs.b_proj.weight,
        "decay_down.weight": theirs.forget_gate.f_a_proj.weight,
        "decay_up.weight": theirs.forget_gate.f_b_proj.weight,
        "A_log": theirs.forget_gate.A_log.flatten(),
        "dt_bias": theirs.forget_gate.dt_bias,
        "gate_down.weight": theirs.g_a_proj.weight,
        "gate_up.weight": theirs.g_b_proj.weight,
        "norm.weight": theirs.o_norm.weight,
        "out.weight": theirs.o_proj.weight,
    }
    ours.load_state_dict(copied)
    x = rows(2, 70, 16).float()
    close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mamba_of_transformers() -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    sizes: dict[str, Any] = {"hidden_size": 16, "state_size": 5, "time_step_rank": 3, "num_hidden_layers": 2}
    theirs = MambaMixer(MambaConfig(**sizes), 0).eval()
    weights_of(theirs)
    ours = nn.Mamba(16, state_dim=5, step_rank=3)
    names = {"in_proj.": "proj.", "conv1d.": "conv.", "x_proj.": "selected.", "dt_proj.": "step.", "out_proj.": "out."}
    copied = {}
    for name, each in theirs.state_dict().items():
        for a, b in names.items():
            name = name.replace(a, b)
        copied[name] = each
    ours.load_state_dict(copied)
    x = rows(2, 70, 16).float()
    close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_of_transformers(groups: int) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes: dict[str, Any] = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": groups}
    theirs = Mamba2Mixer(Mamba2Config(**sizes, num_hidden_layers=2, chunk_size=16), 0).eval()
    weights_of(theirs)
    ours = nn.Mamba2(16, 4, head_dim=8, state_dim=6, num_groups=groups)
    names = {"in_proj.": "proj.", "conv1d.": "conv.", "out_proj.": "out.", "norm.weight": "norm_weight"}
    copied = {}
    for name, each in theirs.state_dict().items():
        for a, b in names.items():
            name = name.replace(a, b)
        copied[name] = each
    ours.load_state_dict(copied)
    x = rows(2, 70, 16).float()
    close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    keep = torch.arange(70) < torch.tensor([[70], [40]])
    padded = theirs(x, attention_mask=keep.flip(1).long())
    close(ours(x, masks.key_padding(keep.flip(1)))[keep.flip(1)], padded[keep.flip(1)], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_lightning_attention_of_minimax() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 3, "head_dim": 6, "num_hidden_layers": 3}
    config = MiniMaxConfig(**sizes, block_size=8, num_key_value_heads=3, layer_types=["linear_attention"] * 3)
    theirs = MiniMaxLightningAttention(config, 1).eval()
    for each in (theirs.qkv_proj, theirs.out_proj, theirs.output_gate, theirs.norm):
        weights_of(each)
    slope = float(theirs.slope_rate[0, 0, 0]) / 2 ** (-8 / 3)
    ours = nn.LightningAttention(16, 3, head_dim=6, slope=slope, norm_eps=theirs.norm.variance_epsilon)
    stacked = theirs.qkv_proj.weight.view(3, 3, 6, 16).transpose(0, 1).reshape(54, 16)  # theirs lie head by head
    copied = {"qkv.weight": stacked, "gate.weight": theirs.output_gate.weight, "out.weight": theirs.out_proj.weight}
    ours.load_state_dict(copied | {"norm.weight": theirs.norm.weight})
    x = rows(2, 30, 16).float()
    close(ours(x), theirs(x, None, None)[0], rtol=1e-4, atol=1e-5)


def test_rwkv7_reads_the_first_layers_values_step_by_step() -> None:
    torch.manual_seed(0)
    first, second = nn.RWKV7Attention(8, 2, dtype=F64), nn.RWKV7Attention(8, 2, value_residual=True, dtype=F64)
    x, ids = rows(2, 9, 8), torch.tensor([0, 0, 0, 4, 4, 4, 4, 4, 4])
    whole = second(x, documents=ids, first_values=first.values(x, documents=ids))
    caches, parts = (nn.LinearCache(), nn.LinearCache()), []
    for part, own in zip(x.split([2, 2, 5], 1), ids.split([2, 2, 5])):
        values = first.values(part, documents=own, cache=caches[0])
        first(part, documents=own, cache=caches[0])
        parts.append(second(part, documents=own, first_values=values, cache=caches[1]))
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    ("residual", "first", "got"),
    [(False, (1, 3, 8), "a float64 tensor"), (True, None, "None"), (True, (1, 2, 8), "a float64 tensor")],
)
def test_rwkv7_refuses_values_that_do_not_fit(residual: bool, first: tuple[int, ...] | None, got: str) -> None:
    layer, x = nn.RWKV7Attention(8, 2, value_residual=residual, dtype=F64), rows(1, 3, 8)
    expected = r"have shape \(1, 3, 8\)" if residual else "be None without value_residual"
    with pytest.raises(ValueError, match=f"RWKV7Attention: first_values must {expected}, got {got}"):
        layer(x, first_values=None if first is None else rows(*first))
    with pytest.raises(ValueError, match="value_rank must be None without value_residual, got 3"):
        nn.RWKV7Attention(8, 2, value_rank=3)

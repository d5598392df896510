"""Kinds of attention in a decoder: causal, the same step by step, and refused where they would ignore something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from regard import AuxRequest, masks
from regard_lab.generation import GenerationOptions, generate
from regard_lab.models import DecoderLM, DecoderLMConfig, load, save
from regard_lab.models.mixers import MIXERS
from regard_lab.models.slot_cache import Slots

KINDS = sorted(MIXERS)
#: Layers of different kinds, whose caches count tokens, blocks or segments.
MIXED = ["titans-mac,softmax", "retention,ttt", "titans-mag,fox"]
#: Numbers that a layer of 4 heads of width 8 caches of each token.
CACHED = {"fox": 68, "gta": 36, "laser": 64, "mfa": 16, "mla": 40, "path": 100, "path-fox": 104, "tpa": 48}


def model(kind: str, **changes: object) -> DecoderLM:
    torch.manual_seed(0)
    turned = "rotary" if MIXERS[kind.split(",", maxsplit=1)[0]].rotary else "none"
    sizes: dict[str, object] = {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "block": 4,
        "blocks_chosen": 3,
        "keys_chosen": 5,
        "positions": turned,
    }
    return DecoderLM(DecoderLMConfig(50, attention=kind, **{**sizes, **changes})).eval().double()


def tokens(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_knows_none_that_comes_later(kind) -> None:
    made, text = model(kind), tokens(13)
    other = text.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 50
    first, second = made(text), made(other)
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first[:, 9:], second[:, 9:])


@pytest.mark.parametrize("kind", [*KINDS, *MIXED])
@torch.no_grad()
def test_steps_are_the_whole_also_of_a_stored_model(kind, tmp_path) -> None:
    made, text = model(kind), tokens(13)
    save(made.float(), tmp_path)
    stored, made = load(tmp_path).double(), made.double()
    caches = stored.caches()
    steps = [stored(part, caches=caches) for part in text.split([6, 1, 1, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), made(text), rtol=1e-6, atol=1e-6)
    if kind in CACHED:
        assert [sum(each[0, :, 0].numel() for each in (cache.key, cache.value)) for cache in caches] == [
            CACHED[kind]
        ] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind) -> None:
    made, losses = model(kind).train(), []
    features = made.features(tokens(13), losses=losses, index_loss="selected")
    sum(losses, made.logits(features).square().sum()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_forget_gates_begin_open() -> None:
    for kind, name in (("fox", "gate"), ("path-fox", "forget")):
        gates = getattr(model(kind).blocks[1].attention, name)
        assert (gates.bias == 5).all() and gates.weight.std() < 0.03


@pytest.mark.parametrize("kind", [kind for kind in KINDS if MIXERS[kind].causal])
def test_masks_that_would_be_ignored_are_refused(kind) -> None:
    made, text = model(kind), tokens(6)
    with pytest.raises(ValueError, match=r"DecoderLM: mask must be None with .*, which makes its mask itself"):
        made(text, mask=masks.document(torch.tensor([0, 0, 0, 1, 1, 1])))
    with pytest.raises(ValueError, match=r"DecoderLM: return_aux must be None with"):
        made.features(text, aux=[], return_aux=AuxRequest(weights=True))
    for changes in ({"window": 4}, {"positions": "alibi"}, {"attention_dropout": 0.5}):
        with pytest.raises(ValueError, match=r"DecoderLMConfig: (window|positions|attention_dropout) must be"):
            model(kind, **changes)


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_layers_that_would_ignore_a_context_refuse_it(kind) -> None:
    made = model(f"softmax,{kind}")
    made.set_context(None)
    with pytest.raises(ValueError, match=r"DecoderLM: context must be None with \w+, which needs the whole sequence"):
        made.set_context(object())
    assert made.context is None and made.blocks[0].attention.context is None


def test_a_warm_up_of_indexers_teaches_nothing_else() -> None:
    made, losses = model("dsa,softmax").train(), []
    made.features(tokens(13), losses=losses, index_loss="all")
    (loss,) = losses
    loss.backward()
    learned = {name for name, parameter in made.named_parameters() if parameter.grad is not None}
    assert learned and all(name.startswith("blocks.0.attention.indexer.") for name in learned)
    # The divergence of the indexer's softmax from the mean weights, written out.
    layer, x = made.blocks[0].attention, made.blocks[0].attention_norm(made.embedding(tokens(13)))
    rotation = made.rotary.rotation(torch.arange(13), x.dtype)
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    asked, weights = layer.indexer.queries(x, x, rotation)
    guess = (asked @ layer.indexer.keys(x, rotation).mT * 8**-0.5).relu()
    guess = (weights.unsqueeze(-1) * guess).sum(1).masked_fill(hidden, -torch.inf).log_softmax(-1)
    scores = layer._queries(x, rotation) @ layer._keys_and_values(layer._rows(x, rotation))[0].mT * layer.scale
    target = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
    right = torch.where(target > 0, target * (target.log() - guess), 0.0).sum(-1).mean()
    torch.testing.assert_close(loss, right)


# Layers with and without rotary positions (iRoPE) ---------------------------------------------------------------------


def test_layers_with_rotary_positions_see_their_chunk_and_the_others_all() -> None:
    made = model("softmax", layers=3, rotary_layers="rotary,none,rotary", chunk=4)
    text, x = tokens(11), made.embedding(tokens(11))
    place, causal = torch.arange(11), torch.ones(11, 11, dtype=torch.bool).tril()
    rotation = made.rotary.rotation(place, x.dtype)
    for i, block in enumerate(made.blocks):
        rows = block.attention.qkv(block.attention_norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2)
        query, key, value = rows.split(4, 1)
        seen = causal
        if i != 1:
            query, key = made.rotary.turn(query, rotation), made.rotary.turn(key, rotation)
            seen = causal & (place[:, None] // 4 == place // 4)
        read = scaled_dot_product_attention(query, key, value, seen)
        x = x + block.attention.out(read.transpose(1, 2).flatten(2))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(made(text), made.norm(x) @ made.embedding.weight.T)
    with torch.no_grad():
        caches = made.caches()
        steps = [made(part, caches=caches) for part in text.split([3, 1, 1, 2, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), made(text))


@torch.no_grad()
def test_slots_of_other_lengths_know_their_chunks() -> None:
    made, slots = model("softmax", rotary_layers="rotary,none", chunk=4), Slots()
    slots.lengths, texts = [6, 3], [tokens(7, 1), tokens(4, 1)]
    caches = made.slot_caches(slots)
    for row, text in enumerate(texts):
        own = made.caches()
        made(text[:, :-1], caches=own)
        for slot, cache in zip(caches, own):
            slot.load(row, *cache.sequence(0))
    found = made(torch.cat([text[:, -1:] for text in texts]), caches=caches)
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[row], made(text)[0, -1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_layers": "rotary,learned"}, "rotary_layers must name 'rotary' and 'none'"),
        ({"positions": "none", "chunk": 4}, "chunk must be left out unless positions is 'rotary'"),
        ({"rotary_layers": "none", "attention": "mla"}, "rotary_layers must be 'rotary' unless all layers are of kind"),
        ({"chunk": 4, "window": 3}, "chunk must be left out with a window"),
        ({"positions": "rotary", "attention": "path"}, "positions must be .* in attention 'path', got 'rotary'"),
        (
            {"rotary_fraction": 0.25, "attention": "gta"},
            "Rotary: head_dim . fraction must be even and at least 2, got 1",
        ),
    ],
)
def test_positions_of_layers_that_cannot_be(changes, message) -> None:
    with pytest.raises(ValueError, match=f"(DecoderLMConfig: )?{message}"):
        model(**{"kind": changes.pop("attention", "softmax"), **changes})


# Disentangled positions of DeBERTa ------------------------------------------------------------------------------------


_DISTANT: dict[str, Any] = {"positions": "disentangled", "distance_buckets": 8, "max_distance": 6, "kv_heads": 2}


def distant(kind: str, **changes: Any) -> DecoderLM:
    made = model(kind, **_DISTANT, **changes)
    for each in made.parameters():
        each.data.copy_(0.3 * torch.randn(each.shape))
    return made


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("softmax", {}), ("softmax", {"window": 5, "sinks": 1}), ("softmax", {"share_keys_values": 2}),
        ("order1", {}), ("laser", {}), ("gated-delta,softmax", {}),
    ],
    ids=str,
)  # fmt: skip
def test_steps_with_disentangled_positions_are_the_whole(kind, changes) -> None:
    made, text = distant(kind, **changes), tokens(13)
    whole = made(text)
    other = text.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 50
    torch.testing.assert_close(made(other)[:, :9], whole[:, :9])
    assert made.keeps_all == (kind != "gated-delta,softmax")
    with torch.no_grad():
        caches = made.caches(sliding=True)
        steps = [made(part, caches=caches) for part in text.split([6, 1, 1, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    made.train()(text).square().sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in made.parameters())
    assert all(name.grad.count_nonzero() for name in made.blocks[-1].attention.disentangled.parameters())


def test_decoders_have_the_distances_of_deberta() -> None:
    """The first layer, its scores written out."""
    made, text = distant("softmax"), tokens(11)
    block, x = made.blocks[0], made.embedding(text)
    q, k, v = block.attention.qkv(block.attention_norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    places = block.attention.disentangled
    asked, held = (
        torch.nn.functional.linear(places.weight, *pair).unflatten(-1, (4, 8)).transpose(0, 1)
        for pair in ((places.key_weight, places.key_bias), (places.query_weight, places.query_bias))
    )
    scores = torch.full((2, 4, 11, 11), -torch.inf, dtype=torch.float64)
    for i in range(11):
        for j in range(i + 1):
            n = places.bucket(i - j)
            pairs = (q[:, :, i], k[:, :, j]), (q[:, :, i], asked[:, n]), (k[:, :, j], held[:, n])
            scores[:, :, i, j] = sum((a * b).sum(-1) for a, b in pairs) / 24**0.5
    x = x + block.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    x = x + block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(made.blocks[0](made.embedding(text), masks.causal(), None).rows, x)


@pytest.mark.parametrize("window", [None, 5])
def test_texts_of_other_lengths_know_their_distances(window) -> None:
    made = distant("softmax", window=window, share_keys_values=2)
    start = tokens(70, 1)[0].tolist()  # long enough to be stored once
    prompts = [[*start, 3, 1, 4], [*start, 1], start[:66] + [5] * 9]
    options = GenerationOptions(max_new_tokens=4)
    together = generate(made, prompts, options, log_probabilities=True)
    for prompt, found in zip(prompts, together):
        (alone,) = generate(made, [prompt], options, log_probabilities=True)
        assert found.numbers == alone.numbers
        for each in (found, alone):
            whole = made(torch.tensor([prompt + found.numbers]))[0].log_softmax(-1)[len(prompt) - 1 : -1]
            right = whole.gather(1, torch.tensor(found.numbers)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.log_probabilities).double(), right.detach(), check_dtype=False)


# Keys and values that layers share ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "owners"), [(2, [0, 2]), ([0, 1, 1, 1], [0, 1]), ("0,0,2,0", [0, 2])], ids=str)
def test_layers_share_keys_and_values(shared, owners) -> None:
    made, alone = (
        model("softmax", layers=4, kv_heads=2, qk_norm="head", window=7, share_keys_values=each) for each in (shared, 1)
    )
    text = tokens(13)
    sizes = []
    for each, count in ((made, len(owners)), (alone, 4)):
        for sliding in (False, True):
            with torch.no_grad():
                caches = each.caches(sliding=sliding)
                steps = [each(part, caches=caches) for part in text.split([6, 1, 1, 1, 4], 1)]
            torch.testing.assert_close(torch.cat(steps, 1), each(text))
            assert len(caches) == count
        sizes.append(sum(tensor.numel() for cache in caches for tensor in cache.sequence(0)))
    assert made.owners == owners and sizes[0] * 4 == sizes[1] * len(owners)
    made.train().checkpoint_activations = True
    made(text).square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_shared_keys_are_those_of_the_first_layer() -> None:
    made, text = model("softmax", kv_heads=2, positions="none", share_keys_values=2), tokens(9)
    x, keys = made.embedding(text), []
    for block in made.blocks:
        rows = block.attention.qkv(block.attention_norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2)
        query, *own = rows.split([4, 2, 2] if not keys else [4], 1)
        keys = keys or own
        read = scaled_dot_product_attention(query, *keys, is_causal=True, enable_gqa=True)
        x = x + block.attention.out(read.transpose(1, 2).flatten(2))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(made(text), made.norm(x) @ made.embedding.weight.T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_keys_values": "two"}, "share_keys_values must be a number of layers, or the indices of layers"),
        ({"share_keys_values": [0, 0]}, "share_keys_values must be one number, or one for each of 4 layers"),
        ({"share_keys_values": [0, 0, 1, 3]}, "share_keys_values must name for layer 2 itself or an earlier layer"),
        ({"share_keys_values": [0, 2, 2, 3]}, "share_keys_values must name for layer 1 itself or an earlier layer"),
        (
            {"share_keys_values": [0, 0, 2, 3], "attention": "mla"},
            "share_keys_values must be '1' unless layers that share are of kind softmax or order1",
        ),
        ({"share_keys_values": [0, 0, 2, 3], "attention": "laser"}, "share_keys_values must be '1' unless layers"),
    ],
)
def test_what_layers_cannot_share(changes, message) -> None:
    with pytest.raises(ValueError, match=f"DecoderLMConfig: {message}"):
        model(**{"kind": changes.pop("attention", "softmax"), "layers": 4, **changes})


def test_shared_keys_are_planned_and_saved(tmp_path) -> None:
    from regard_lab.models import load, save
    from regard_lab.planner import cache_memory, shape_of

    made = model("softmax", share_keys_values=2, norm="rms", activation="silu", gated=True, bias=False).float()
    shape, alone = shape_of(made.config), shape_of(replace(made.config, share_keys_values="1"))
    assert shape.parameters == sum(each.numel() for each in made.parameters()) < alone.parameters
    assert cache_memory(shape, 7) == cache_memory(alone, 7) / 2
    save(made, tmp_path)
    torch.testing.assert_close(load(tmp_path)(tokens(5)), made(tokens(5)))
    assert '"share_keys_values": "2"' in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if MIXERS[kind].causal), *MIXED])
def test_texts_of_other_lengths_are_written_as_alone(kind) -> None:
    made, start = model(kind), tokens(70, 1)[0].tolist()  # long enough to be stored once
    options = GenerationOptions(max_new_tokens=5)
    for prompts in ([[*start, 3, 1, 4], [*start, 1], start[:66] + [5] * 4], [[7, 7, 7], [1], [2, 3, 4]]):
        together = generate(made, prompts, options, log_probabilities=True)
        for prompt, found in zip(prompts, together):
            whole = made(torch.tensor([prompt + found.numbers]))[0].log_softmax(-1)[len(prompt) - 1 : -1]
            assert found.numbers == whole.argmax(-1).tolist()
            right = whole.gather(1, torch.tensor(found.numbers)[:, None])[:, 0].detach()
            torch.testing.assert_close(torch.tensor(found.log_probabilities), right, check_dtype=False)

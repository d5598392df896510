"""How a config.json and its tensors map to our models: each key with transformers' default, each tensor's place.

A key that is missing has transformers' default. A key that is read may have any value; of others, a value that we do
not implement is refused, and so is a key that neither a family nor :data:`IGNORED` lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.encoder_lm import EncoderLM, EncoderLMConfig
from regard_lab.models.language_blocks import LanguageConfig
from regard_lab.models.vision_transformer import VisionTransformer, VisionTransformerConfig

# The keys of a config.json: transformers' default of each, and the values that we implement ---------------------------


#: A folder's config as JSON.
Described = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """One key of a family's config.

    Attributes
    ----------
    default : object
        What transformers takes where the key is missing.
    only : tuple, optional
        The values that we implement; any value where it is None.
    extra : bool, default False
        Whether transformers reads the key although its config class has no such field.
    """

    default: Any
    only: tuple[Any, ...] | None = None
    extra: bool = False


Keys = Mapping[str, Key]


def _fixed(value: Any, *others: Any, extra: bool = False) -> Key:
    return Key(value, (value, *others), extra)


#: Keys of every config.
_COMMON: dict[str, Key] = {
    "architectures": Key(None),
    "chunk_size_feed_forward": _fixed(0),
    "id2label": Key(None),
    "is_encoder_decoder": _fixed(False),
    "num_labels": Key(2, extra=True),
    "per_layer_config": _fixed(None, {}, extra=True),
    "problem_type": Key(None),
    "tie_word_embeddings": Key(True, extra=True),
}
_BERT: dict[str, Key] = _COMMON | {
    "add_cross_attention": _fixed(False),
    "attention_probs_dropout_prob": Key(0.1),
    "hidden_act": Key("gelu"),
    "hidden_dropout_prob": Key(0.1),
    "hidden_size": Key(768),
    "intermediate_size": Key(3072),
    "is_decoder": _fixed(False),
    "layer_norm_eps": Key(1e-12),
    "max_position_embeddings": Key(512),
    "num_attention_heads": Key(12),
    "num_hidden_layers": Key(12),
    "pad_token_id": Key(0),
    "position_embedding_type": _fixed("absolute", None, extra=True),
    "tie_word_embeddings": Key(True),
    "type_vocab_size": Key(2),
    "vocab_size": Key(30522),
}
_ROBERTA: dict[str, Key] = _BERT | {"pad_token_id": Key(1), "vocab_size": Key(50265)}
_CAMEMBERT: dict[str, Key] = _ROBERTA | {"vocab_size": Key(30522)}
_ALBERT: dict[str, Key] = {
    name: key for name, key in _BERT.items() if name not in ("add_cross_attention", "is_decoder")
}
_ALBERT |= {
    "attention_probs_dropout_prob": Key(0.0),
    "embedding_size": Key(128),
    "hidden_act": Key("gelu_new"),
    "hidden_dropout_prob": Key(0.0),
    "hidden_size": Key(4096),
    "inner_group_num": _fixed(1),
    "intermediate_size": Key(16384),
    "num_attention_heads": Key(64),
    "num_hidden_groups": _fixed(1),
    "vocab_size": Key(30000),
}
_GPT2: dict[str, Key] = _COMMON | {
    "activation_function": Key("gelu_new"),
    "add_cross_attention": _fixed(False),
    "attn_pdrop": Key(0.1),
    "layer_norm_epsilon": Key(1e-5),
    "n_embd": Key(768),
    "n_head": Key(12),
    "n_inner": Key(None),
    "n_layer": Key(12),
    "n_positions": Key(1024),
    "pad_token_id": Key(None),
    "resid_pdrop": Key(0.1),
    "scale_attn_by_inverse_layer_idx": _fixed(False),
    "scale_attn_weights": _fixed(True),
    "tie_word_embeddings": Key(True),
    "vocab_size": Key(50257),
}
_LLAMA: dict[str, Key] = _COMMON | {
    "attention_bias": Key(False),
    "attention_dropout": Key(0.0),
    "head_dim": Key(None),
    "hidden_act": Key("silu"),
    "hidden_size": Key(4096),
    "intermediate_size": Key(11008),
    "max_position_embeddings": Key(2048),
    "mlp_bias": Key(False),
    "num_attention_heads": Key(32),
    "num_hidden_layers": Key(32),
    "num_key_value_heads": Key(None),
    "pad_token_id": Key(None),
    "partial_rotary_factor": Key(None, extra=True),
    "rms_norm_eps": Key(1e-6),
    "rope_interleaved": _fixed(False, extra=True),
    "rope_parameters": Key(None),
    "rope_scaling": Key(None, extra=True),
    "rope_theta": Key(10000.0, extra=True),
    "tie_word_embeddings": Key(False),
    "vocab_size": Key(32000),
}
_WITHOUT_BIAS = {name: key for name, key in _LLAMA.items() if name not in ("attention_bias", "mlp_bias")}
_MISTRAL: dict[str, Key] = _WITHOUT_BIAS | {
    "intermediate_size": Key(14336),
    "max_position_embeddings": Key(131072),
    "num_key_value_heads": Key(8),
    "sliding_window": Key(4096),
}
_QWEN2: dict[str, Key] = _WITHOUT_BIAS | {
    "head_dim": Key(None, extra=True),
    "intermediate_size": Key(22016),
    "layer_types": Key(None),
    "max_position_embeddings": Key(32768),
    "max_window_layers": Key(28),
    "num_key_value_heads": Key(32),
    "sliding_window": Key(4096),
    "use_sliding_window": Key(False),
    "vocab_size": Key(151936),
}
_RECURRENT: dict[str, Key] = _WITHOUT_BIAS | {
    "attention_bias": Key(False),
    "full_attention_interval": Key(4, extra=True),
    "layer_types": Key(None),
    "linear_conv_kernel_dim": Key(4),
    "linear_key_head_dim": Key(128),
    "linear_num_key_heads": Key(16),
    "linear_num_value_heads": Key(32),
    "linear_value_head_dim": Key(128),
    "max_position_embeddings": Key(32768),
    "num_attention_heads": Key(16),
}
_QWEN3_5: dict[str, Key] = _RECURRENT | {
    "head_dim": Key(256),
    "hidden_size": Key(4096),
    "intermediate_size": Key(12288),
    "num_hidden_layers": Key(32),
    "num_key_value_heads": Key(4),
    "partial_rotary_factor": Key(0.25, extra=True),
    "vocab_size": Key(248320),
}
_QWEN3_NEXT: dict[str, Key] = _QWEN3_5 | {
    "decoder_sparse_step": Key(1),
    "hidden_size": Key(2048),
    "intermediate_size": Key(5632),
    "mlp_only_layers": Key(None),
    "moe_intermediate_size": Key(512),
    "norm_topk_prob": Key(True),
    "num_experts": Key(512),
    "num_experts_per_tok": Key(10),
    "num_hidden_layers": Key(48),
    "num_key_value_heads": Key(2),
    "output_router_logits": Key(False),
    "router_aux_loss_coef": Key(0.001),
    "shared_expert_intermediate_size": Key(512),
    "vocab_size": Key(151936),
}
_OLMO_HYBRID: dict[str, Key] = _RECURRENT | {
    "head_dim": Key(None, extra=True),
    "hidden_size": Key(3840),
    "intermediate_size": Key(11008),
    "linear_a_log_max": Key(16.0),
    "linear_a_log_min": Key(0.0),
    "linear_allow_neg_eigval": Key(True),
    "linear_dt_init_floor": Key(1e-4),
    "linear_dt_max": Key(0.1),
    "linear_dt_min": Key(0.001),
    "linear_key_head_dim": Key(None),
    "linear_num_key_heads": Key(None),
    "linear_num_value_heads": Key(None),
    "linear_value_head_dim": Key(None),
    "max_position_embeddings": Key(65536),
    "num_attention_heads": Key(30),
    "pad_token_id": Key(100277),
    "vocab_size": Key(100352),
}
_KIMI: dict[str, Key] = _COMMON | {
    "attention_bias": Key(False),
    "attention_dropout": Key(0.0),
    "first_k_dense_replace": Key(1, extra=True),
    "head_dim": Key(None, extra=True),
    "hidden_act": _fixed("silu"),
    "hidden_size": Key(2304),
    "intermediate_size": Key(9216),
    "kv_lora_rank": Key(512),
    "layer_types": Key(None),
    "linear_attn_config": Key(None, extra=True),
    "linear_conv_kernel_dim": Key(4),
    "linear_head_dim": Key(128),
    "linear_num_heads": Key(32),
    "mlp_layer_types": Key(None),
    "model_max_length": Key(1048576, extra=True),
    "moe_intermediate_size": Key(1024),
    "moe_renormalize": Key(True, extra=True),
    "num_attention_heads": Key(32),
    "num_expert_group": _fixed(1, extra=True),
    "num_experts": Key(256, extra=True),
    "num_experts_per_token": Key(8, extra=True),
    "num_hidden_layers": Key(27),
    "num_key_value_heads": Key(32),
    "num_shared_experts": Key(1, extra=True),
    "output_router_logits": Key(False),
    "pad_token_id": Key(163839),
    "q_lora_rank": Key(None),
    "qk_head_dim": Key(None, extra=True),
    "qk_nope_head_dim": Key(128),
    "qk_rope_head_dim": Key(64),
    "rms_norm_eps": Key(1e-5),
    "routed_scaling_factor": Key(2.446),
    "tie_word_embeddings": Key(False),
    "topk_group": _fixed(1),
    "v_head_dim": Key(128),
    "vocab_size": Key(163840),
}
_MAMBA2: dict[str, Key] = _COMMON | {
    "chunk_size": Key(256),
    "conv_kernel": Key(4),
    "expand": Key(2),
    "head_dim": Key(64),
    "hidden_act": _fixed("silu", "swish"),
    "hidden_size": Key(4096),
    "layer_norm_epsilon": Key(1e-5),
    "n_groups": Key(8),
    "num_heads": Key(128),
    "num_hidden_layers": Key(64),
    "pad_token_id": Key(1),
    "rescale_prenorm_residual": Key(False),
    "residual_in_fp32": Key(True),
    "state_size": Key(128),
    "tie_word_embeddings": Key(False),
    "time_step_floor": Key(1e-4),
    "time_step_limit": Key((0.0, math.inf), ((0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}])),
    "time_step_max": Key(0.1),
    "time_step_min": Key(0.001),
    "time_step_rank": Key("auto"),
    "use_bias": Key(False),
    "use_conv_bias": _fixed(True),
    "vocab_size": Key(32768),
}
_VIT: dict[str, Key] = _COMMON | {
    "attention_probs_dropout_prob": Key(0.0),
    "hidden_act": Key("gelu"),
    "hidden_dropout_prob": Key(0.0),
    "hidden_size": Key(768),
    "image_size": Key(224),
    "intermediate_size": Key(3072),
    "layer_norm_eps": Key(1e-12),
    "num_attention_heads": Key(12),
    "num_channels": Key(3),
    "num_hidden_layers": Key(12),
    "patch_size": Key(16),
    "pooler_act": _fixed("tanh"),
    "pooler_output_size": Key(None),
    "qkv_bias": Key(True),
}

#: Keys by ``model_type``.
KEYS: dict[str, Keys] = {
    "albert": _ALBERT,
    "bert": _BERT,
    "camembert": _CAMEMBERT,
    "deit": _VIT,
    "gpt2": _GPT2,
    "kimi_linear": _KIMI,
    "llama": _LLAMA,
    "mamba2": _MAMBA2,
    "mistral": _MISTRAL,
    "olmo_hybrid": _OLMO_HYBRID,
    "qwen2": _QWEN2,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _QWEN3_NEXT,
    "roberta": _ROBERTA,
    "vit": _VIT,
    "xlm-roberta": _CAMEMBERT,
}
#: Families in which a key overrides its alias.
_KEYS_FIRST = frozenset({"kimi_linear"})
#: transformers' aliases of keys, by ``model_type``; an alias overrides the key, except in :data:`_KEYS_FIRST`.
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "kimi_linear": {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
    },
}
#: Keys that do not affect a model's output in evaluation mode: its origin, initialization and training, additional
#: outputs, text generation, heads that are not loaded, and keys that no model uses.
IGNORED = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "dtype",
        "experts_implementation",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
        "use_return_dict",
        "classifier_dropout",
        "classifier_dropout_prob",
        "embd_pdrop",
        "encoder_stride",
        "finetuning_task",
        "gradient_checkpointing",
        "initializer_range",
        "pretraining_tp",
        "problem_type_used",
        "pruned_heads",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tf_legacy_loss",
        "use_bfloat16",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "cls_token_id",
        "compile_config",
        "constraints",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "penalty_alpha",
        "prefill_chunk_size",
        "prefix_token_id",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "token_healing",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "use_mtp",
        "watermarking_config",
        "adapters",
        "directionality",
        "down_scale_factor",
        "gap_size",
        "ln_type",
        "n_ctx",
        "net_structure_type",
        "num_memory_blocks",
        "output_past",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ]
)


def completed(described: Described, kind: str) -> Described:
    """Return a config with every key of its family: as it says, or with transformers' default.

    Raises
    ------
    ValueError
        For a key that is not known, or a value that is not implemented; the message names both.
    """
    keys, aliases = KEYS[kind], ALIASES.get(kind, {})
    made: Described = {name: key.default for name, key in keys.items()} | {"model_type": kind}
    for name, value in sorted(
        described.items(), key=lambda each: (each[0] in aliases) != (kind in _KEYS_FIRST)
    ):  # the last one counts
        name = aliases.get(name, name)
        if name in keys:
            if (only := keys[name].only) is not None and not any(_same(value, each) for each in only):
                raise ValueError(f"have {name} {' or '.join(map(repr, only))}, got {value!r}")
            made[name] = value
        elif name not in IGNORED:
            raise ValueError(f"have keys of {kind} that are known here, got {name!r}: {value!r}")
    return made


def _same(value: Any, known: Any) -> bool:
    """Return whether a value is another: 1 is not True."""
    return bool(value == known) and isinstance(value, bool) == isinstance(known, bool)


# Mapping from the tensors of a Hugging Face folder to our parameters --------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One parameter of ours, and the tensors of theirs that it is made of.

    Attributes
    ----------
    ours : str
    theirs : tuple of str
        One, or several that stand below each other in ours, of ``sizes`` rows.
    sizes : tuple of int
        The rows of each, where there are several.
    transposed : bool
        Whether theirs is (inputs, outputs).
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False

    def expected(self, tensor: Tensor, found: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes that theirs must have, of ours and those that they have."""
        return tuple(tuple(part.shape) for part in self.split(tensor))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return theirs of ours."""
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        return tuple(part.t() if self.transposed else part for part in parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ours of theirs."""
        turned = [part.t() if self.transposed else part for part in parts]
        return turned[0] if len(turned) == 1 else torch.cat(turned)


@dataclass(frozen=True)
class Rows(Rule):
    """One parameter of ours that is made of some rows of theirs, in any order; for reading only.

    Attributes
    ----------
    shapes : tuple of tuple of int
        The shape of each of theirs.
    taken : tuple of sequence of int
        Rows of each that ours has; theirs are flattened to one dimension or two before.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    taken: tuple[Sequence[int], ...] = ()

    def expected(self, tensor: Tensor, found: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes of theirs."""
        return self.shapes

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ours of theirs."""
        flat = [part if part.dim() == 2 else part.flatten() for part in parts]
        return torch.cat([part[torch.tensor(rows)] for part, rows in zip(flat, self.taken)])


@dataclass(frozen=True)
class Cut(Rule):
    """One parameter of ours that theirs make together, wherever it is cut.

    transformers cuts the convolutions of OLMo-hybrid into equal parts when saving; released models have one part each
    for queries, keys and values.
    """

    def expected(self, tensor: Tensor, found: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of theirs."""
        fits = all(shape[1:] == tuple(tensor.shape[1:]) for shape in found) and all(found)
        return (
            tuple(found)
            if fits and sum(shape[0] for shape in found) == len(tensor)
            else super().expected(tensor, found)
        )


@dataclass(frozen=True)
class Stacked(Rule):
    """One parameter of ours that holds matrices of theirs in its first dimension; for reading only.

    Attributes
    ----------
    part : tuple of int
        The shape of each of theirs.
    count : int
        The size of the first dimension.
    """

    part: tuple[int, ...] = ()
    count: int = 1

    def expected(self, tensor: Tensor, found: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes of theirs."""
        return (self.part,) * len(self.theirs)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ours of theirs."""
        stacked = torch.stack(list(parts))
        return stacked.view(self.count, -1, self.part[-1])  # those that share an index lie below each other


def same(names: Mapping[str, str], ends: Sequence[str] = ("weight", "bias"), **options: Any) -> Iterator[Rule]:
    """Yield the rules of modules, ours by theirs, that have these parameters."""
    for ours, theirs in names.items():
        for end in ends:
            yield Rule(f"{ours}.{end}", (f"{theirs}.{end}",), **options)


@dataclass(frozen=True)
class Family:
    """The models of one shape.

    Attributes
    ----------
    types : tuple of str
        What ``model_type`` may be.
    trunk : str
        What the names of tensors begin with where there is a head; they begin without it where there is none.
    read : callable
        ``read(described, names)`` returns our config of one that has every key of its family; ``names`` are those of
        the tensors, without the trunk's prefix. It raises ValueError, whose text says what the config must be, for what
        our models are not.
    write : callable
        ``write(config)`` returns the described config, or None where the family has no such model.
    rules : callable
        ``rules(config)`` yields the rules; theirs are names without the trunk's prefix, or whole names after "/".
    ignored : tuple of str
        Ends of names of tensors that hold nothing of their own.
    model : type
    renamed : tuple of (str, str)
        Parts of names in released models, and what the rules call them.
    """

    types: tuple[str, ...]
    trunk: str
    read: Callable[[Described, set[str]], Any]
    write: Callable[[Any], Described | None]
    rules: Callable[[Any], Iterator[Rule]]
    model: type[DecoderLM] | type[EncoderLM] | type[VisionTransformer]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def name(self, theirs: str) -> str:
        """Return what the rules call a tensor."""
        for old, new in self.renamed:
            theirs = theirs.replace(old, new)
        return theirs


def kept(rules: Iterator[Rule], model: nn.Module) -> list[Rule]:
    """Return the rules whose parameters a model has."""
    names = set(model.state_dict())
    return [rule for rule in rules if rule.ours in names]


class BrokenConfigError(ValueError):
    """A config that no library, not even transformers, can turn into a working model."""


#: Names of nonlinearities, theirs and ours; the first of theirs is used when saving.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


def activation_read(described: Described, key: str = "hidden_act") -> str:
    """Return our name of the nonlinearity that a key names."""
    name = described[key]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"name one of the activations {', '.join(_ACTIVATIONS)} as {key}, got {name!r}")
    return _ACTIVATIONS[name]


def activation_written(name: str) -> str:
    """Return their name of a nonlinearity."""
    return next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == name)


def is_plain(config: DecoderLMConfig | EncoderLMConfig | VisionTransformerConfig) -> bool:
    """Return whether layers are what every family has: softmax of scaled dot products, and a feed-forward network."""
    if isinstance(config, LanguageConfig) and (config.qk_norm != "none" or config.output_gate or not config.hidden):
        return False
    if isinstance(config, DecoderLMConfig) and (set(config.kinds) != {"softmax"} or config.softmax_norm != "before"):
        return False
    if isinstance(config, DecoderLMConfig) and (config.experts or len(set(config.sources)) < config.layers):
        return False
    if isinstance(config, DecoderLMConfig) and (config.chunk is not None or config.rotary_layers != "rotary"):
        return False
    return config.score == "scaled_dot" and config.normalizer == "softmax"

"""Folders of the shapes of Qwen3-Next, the text model of Qwen3.5, Kimi-Linear, OLMo-hybrid and Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from regard_lab.models.decoder_lm import DecoderLM, DecoderLMConfig
from regard_lab.models.hugging_face.rules import Cut, Described, Family, Rows, Rule, Stacked, activation_read, same
from regard_lab.models.mixers import pattern_of

#: Our names of the kinds of layers in ``layer_types``.
_KINDS = {"full_attention": "softmax", "linear_attention": "gated-delta"}


def _never_written(config: DecoderLMConfig) -> None:
    """Return None: these models are saved in regard's own format."""


def _pattern(described: Described, usual: list[str]) -> str:
    """Return the pattern of the kinds of all layers."""
    return pattern_of(_kinds(described | {"layer_types": described["layer_types"] or usual}))


def _kinds(described: Described) -> list[str]:
    """Return the kinds of all layers."""
    listed, layers = described["layer_types"], described["num_hidden_layers"]
    if not isinstance(listed, list) or len(listed) != layers:
        raise ValueError(f"have layer_types of {layers} layers, got {listed!r}")
    if wrong := [each for each in listed if each not in _KINDS]:
        raise ValueError(f"have layer_types {' and '.join(_KINDS)}, got {wrong[0]!r}")
    if described["hidden_act"] not in ("silu", "swish"):
        raise ValueError(f"have hidden_act 'silu' with layers of linear_attention, got {described['hidden_act']!r}")
    return [_KINDS[each] for each in listed]


def _rotary(described: Described, partial: bool) -> dict[str, Any]:
    """Return the config fields of rotary positions of the default kind; none where there is no base.

    A share of the columns may be turned alone where ``partial`` is True; the others ignore the key.
    """
    given = described["rope_scaling"] or described["rope_parameters"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"have a table of rope_parameters, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ValueError(f"have a rope_type 'default', got {kind!r}")
    # Sections of positions in images and videos differ from those of text for these alone.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"have rope_parameters that are known here, got {name!r}: {value!r}")
    base = given.get("rope_theta", described["rope_theta"])
    if base is None:
        return {"positions": "none"}
    share = given.get("partial_rotary_factor", described["partial_rotary_factor"]) if partial else None
    return {"positions": "rotary", "rotary_base": base, "rotary_fraction": 1.0 if share is None else share}


def _shared(described: Described) -> dict[str, Any]:
    """Return the fields that Qwen3-Next, Qwen3.5 and OLMo-hybrid share."""
    biased = bool(described["attention_bias"])
    groups = described["num_key_value_heads"]
    return {
        "vocabulary": described["vocab_size"],
        "width": described["hidden_size"],
        "layers": described["num_hidden_layers"],
        "heads": described["num_attention_heads"],
        "kv_heads": described["num_attention_heads"] if groups is None else groups,
        "head_width": described["head_dim"],
        "feedforward": described["intermediate_size"],
        "max_length": described["max_position_embeddings"],
        "norm_eps": described["rms_norm_eps"],
        "activation": activation_read(described),
        "gated": True,
        "bias": False,
        "qkv_bias": biased,
        "out_bias": biased,
        "tied": bool(described["tie_word_embeddings"]),
        "attention_dropout": described["attention_dropout"],
        "recurrent_heads": described["linear_num_value_heads"],
        "recurrent_key_heads": described["linear_num_key_heads"],
        "recurrent_key_width": described["linear_key_head_dim"],
        "recurrent_value_width": described["linear_value_head_dim"],
        "convolution": described["linear_conv_kernel_dim"],
    }


# Qwen3-Next and the text model of Qwen3.5 ---------------------------------------------------------------------------


def _read_qwen(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    layers, interval, usual = described["num_hidden_layers"], described["full_attention_interval"], []
    if not described["layer_types"]:
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"have a full_attention_interval of at least 1, got {interval!r}")
        usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    shared = _shared(described) | _rotary(described, partial=True)
    if described["model_type"] == "qwen3_next" and described["num_experts"]:
        dense, step = described["mlp_only_layers"] or [], described["decoder_sparse_step"]
        if described["num_experts_per_tok"] > described["num_experts"]:
            got = described["num_experts_per_tok"]
            raise ValueError(f"have num_experts_per_tok of at most num_experts, {described['num_experts']}, got {got}")
        sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
        shared |= {
            "experts": described["num_experts"] if any(sparse) else 0,
            "experts_chosen": described["num_experts_per_tok"],
            "expert_width": described["moe_intermediate_size"],
            "expert_layers": pattern_of(["experts" if each else "dense" for each in sparse]),
            "shared_width": described["shared_expert_intermediate_size"],
            "shared_gate": True,
            "router_normalized": bool(described["norm_topk_prob"]),
        }
    kinds = _pattern(described, usual)
    if "softmax" in kinds:
        shared |= {"qk_norm": "head", "output_gate": True}
    else:
        shared["positions"] = "none"
    return DecoderLMConfig(
        **shared,
        attention=kinds,
        norm="rms_zero",
        recurrent_eps=described["rms_norm_eps"],
    )


def _qwen_rules(config: DecoderLMConfig, fused: bool) -> Iterator[Rule]:
    yield from _trunk(config)
    for i, kind in enumerate(config.kinds):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in norms.items()}, ["weight"])
        if kind == "softmax":
            yield from _gated_attention(config, f"{ours}.attention", f"{theirs}.self_attn")
        else:
            yield from _delta(config, f"{ours}.attention", f"{theirs}.linear_attn", fused)


def _gated_attention(config: DecoderLMConfig, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of attention whose queries lie with their gates, head by head: D rows of each."""
    D, keys = config.head, config.groups * config.head
    queries = [2 * D * h + d for h in range(config.heads) for d in range(D)]
    for end, inner in (("weight", (config.width,)), ("bias", ())):
        whole = (2 * config.heads * D, *inner)
        stacked = tuple(f"{theirs}.{name}_proj.{end}" for name in "qkv")
        shapes, rows = (whole, (keys, *inner), (keys, *inner)), (queries, range(keys), range(keys))
        yield Rows(f"{ours}.qkv.{end}", stacked, shapes=shapes, taken=rows)
        gates = [row + D for row in queries]
        yield Rows(f"{ours}.output_gate.gate.{end}", stacked[:1], shapes=(whole,), taken=(gates,))
    yield from same({f"{ours}.out": f"{theirs}.o_proj"})
    yield from _head_norms(ours, theirs)


def _head_norms(ours: str, theirs: str) -> Iterator[Rule]:
    names = {"query": "q_norm", "key": "k_norm"}
    yield from same({f"{ours}.qk_norm.{a}": f"{theirs}.{b}" for a, b in names.items()}, ["weight"])


def _delta(config: DecoderLMConfig, ours: str, theirs: str, fused: bool) -> Iterator[Rule]:
    """Yield the rules of Gated DeltaNet; Qwen3-Next has the rows of a key head's projections side by side."""
    H, G, K, V = _sizes(config)
    E, R = config.width, H // G
    if fused:
        each = 2 * K + 2 * R * V  # a key head's query, key, values and gates
        pieces = ((0, K), (K, K), (2 * K, R * V), (2 * K + R * V, R * V))
        q, k, v, z = ([each * g + start + i for g in range(G) for i in range(n)] for start, n in pieces)
        name, shape = (f"{theirs}.in_proj_qkvz.weight",), ((G * each, E),)
        yield Rows(f"{ours}.qkv.weight", name, shapes=shape, taken=([*q, *k, *v],))
        yield Rows(f"{ours}.gate.weight", name, shapes=shape, taken=(z,))
        rates, decays = ([2 * R * g + start + i for g in range(G) for i in range(R)] for start in (0, R))
        name, shape = (f"{theirs}.in_proj_ba.weight",), ((2 * H, E),)
        yield Rows(f"{ours}.rates.weight", name, shapes=shape, taken=([*rates, *decays],))
    else:
        yield from same({f"{ours}.qkv": f"{theirs}.in_proj_qkv", f"{ours}.gate": f"{theirs}.in_proj_z"}, ["weight"])
        both = tuple(f"{theirs}.in_proj_{name}.weight" for name in "ba")
        yield Rule(f"{ours}.rates.weight", both, (H, H))
    yield from same({f"{ours}.conv": f"{theirs}.conv1d", f"{ours}.norm": f"{theirs}.norm"}, ["weight"])
    yield from same({f"{ours}.out": f"{theirs}.out_proj"}, ["weight"])
    yield from (Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("A_log", "dt_bias"))


def _sizes(config: DecoderLMConfig) -> tuple[int, int, int, int]:
    """Return H, G, K and V of Gated DeltaNet."""
    sizes = (config.recurrent_heads, config.recurrent_key_heads)
    widths = (config.recurrent_key_width, config.recurrent_value_width)
    assert None not in (*sizes, *widths), "read from the folder"
    return *sizes, *widths  # type: ignore[return-value]


def _trunk(config: DecoderLMConfig) -> Iterator[Rule]:
    """Yield the rules of embeddings, the last norm, the output and feed-forward networks."""
    yield from same({"embedding": "embed_tokens", "norm": "norm", "output": "/lm_head"}, ["weight"])
    for i, sparse in enumerate(config.sparse):
        ours, theirs = f"blocks.{i}.feed_forward", f"layers.{i}.mlp"
        if sparse:
            yield from _experts(config, ours, theirs)
        else:
            yield from same({f"{ours}.{name}": f"{theirs}.{name}_proj" for name in _MLP}, ["weight"])


_MLP = ("gate", "up", "down")


def _experts(config: DecoderLMConfig, ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a mixture of experts, whose matrices stand in the folder one by one."""
    E, F, count = config.width, config.expert_width or config.hidden, config.experts
    each = [f"{theirs}.experts.{i}" for i in range(count)]
    up = tuple(f"{a}.{b}_proj.weight" for a in each for b in ("gate", "up"))
    yield Stacked(f"{ours}.up", up, part=(F, E), count=count)
    yield Stacked(f"{ours}.down", tuple(f"{a}.down_proj.weight" for a in each), part=(E, F), count=count)
    yield from same({f"{ours}.router": f"{theirs}.gate"}, ["weight"])
    pairs = {f"{ours}.shared.{name}": f"{theirs}.shared_expert.{name}_proj" for name in _MLP}
    yield from same(pairs | {f"{ours}.shared_gate": f"{theirs}.shared_expert_gate"}, ["weight"])


# OLMo-hybrid ----------------------------------------------------------------------------------------------------------


def _read_olmo(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    layers, heads = described["num_hidden_layers"], described["num_attention_heads"]
    usual = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    usual = usual if "full_attention" in usual else [*usual[:-1], "full_attention"]
    filled = dict(described)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        filled[name] = heads if described[name] is None else described[name]
    if filled["linear_key_head_dim"] is None:
        filled["linear_key_head_dim"] = int(0.75 * described["hidden_size"] / filled["linear_num_key_heads"])
    if filled["linear_value_head_dim"] is None:
        filled["linear_value_head_dim"] = 2 * filled["linear_key_head_dim"]
    shared = _shared(filled) | _rotary(described, partial=False)
    return DecoderLMConfig(
        **shared,
        attention=_pattern(described, usual),
        norm="rms",
        qk_norm="all",
        softmax_norm="added",
        negative_eigenvalues=bool(described["linear_allow_neg_eigval"]),
        recurrent_eps=1e-5,  # whatever rms_norm_eps is
    )


def _olmo_rules(config: DecoderLMConfig) -> Iterator[Rule]:
    yield from _trunk(config)
    keys = config.groups * config.head
    H, G, K, V = _sizes(config)
    for i, kind in enumerate(config.kinds):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        if kind == "softmax":
            norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in norms.items()}, ["weight"])
        ours, theirs = f"{ours}.attention", f"{theirs}.{'self' if kind == 'softmax' else 'linear'}_attn"
        if kind == "softmax":
            for end in ("weight", "bias"):
                stacked = tuple(f"{theirs}.{name}_proj.{end}" for name in "qkv")
                yield Rule(f"{ours}.qkv.{end}", stacked, (config.heads * config.head, keys, keys))
            yield from same({f"{ours}.out": f"{theirs}.o_proj"})
            yield from _head_norms(ours, theirs)
            continue
        stacked = tuple(f"{theirs}.{name}_proj.weight" for name in "qkv")
        yield Rule(f"{ours}.qkv.weight", stacked, (G * K, G * K, H * V))
        yield Rule(f"{ours}.rates.weight", tuple(f"{theirs}.{name}_proj.weight" for name in "ba"), (H, H))
        yield Cut(
            f"{ours}.conv.weight", tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv"), (G * K, G * K, H * V)
        )
        pairs = {"gate": "g_proj", "norm": "o_norm", "out": "o_proj"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in pairs.items()}, ["weight"])
        yield from (Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("A_log", "dt_bias"))


# Kimi-Linear ----------------------------------------------------------------------------------------------------------


def _read_kimi(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    layers, heads = described["num_hidden_layers"], described["num_attention_heads"]
    given: Any = described["linear_attn_config"] or {}
    if not isinstance(given, dict):
        raise ValueError(f"have a table as linear_attn_config, got {given!r}")
    if described["num_key_value_heads"] not in (None, heads):
        raise ValueError(f"have num_key_value_heads {heads}, got {described['num_key_value_heads']}")
    listed = described["layer_types"]
    if listed is None:
        full = given.get("full_attn_layers", [i + 1 for i in range(layers) if i and i % 4 == 0])  # counted from 1
        listed = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    dense = described["first_k_dense_replace"]
    sparse = described["mlp_layer_types"] or ["dense" if i < dense else "sparse" for i in range(layers)]
    if not isinstance(sparse, list) or len(sparse) != layers or set(sparse) - {"dense", "sparse"}:
        raise ValueError(f"have mlp_layer_types dense and sparse of {layers} layers, got {sparse!r}")
    if described["num_experts_per_token"] > described["num_experts"]:
        got = described["num_experts_per_token"]
        raise ValueError(f"have num_experts_per_token of at most num_experts, {described['num_experts']}, got {got}")
    ours = {"gated-delta": "kimi-delta", "softmax": "mla"}
    kinds = [ours[kind] for kind in _kinds(described | {"layer_types": listed})]
    return DecoderLMConfig(
        vocabulary=described["vocab_size"],
        width=described["hidden_size"],
        layers=layers,
        heads=heads,
        head_width=described["qk_nope_head_dim"],
        value_width=described["v_head_dim"],
        latent_width=described["kv_lora_rank"],
        latent_query_width=described["q_lora_rank"],
        latent_shared_width=described["qk_rope_head_dim"],
        feedforward=described["intermediate_size"],
        max_length=described["model_max_length"],
        positions="none",
        norm="rms",
        norm_eps=described["rms_norm_eps"],
        activation="silu",
        gated=True,
        bias=False,
        qkv_bias=bool(described["attention_bias"]),
        tied=False,  # transformers ties nothing here, whatever the key says
        attention_dropout=described["attention_dropout"] if "mla" in kinds else 0.0,
        attention=pattern_of(kinds),
        recurrent_heads=given.get("num_heads", described["linear_num_heads"]),
        recurrent_key_width=given.get("head_dim", described["linear_head_dim"]),
        recurrent_eps=described["rms_norm_eps"],
        convolution=cast(int, given.get("short_conv_kernel_size", described["linear_conv_kernel_dim"])),
        experts=described["num_experts"] if "sparse" in sparse else 0,
        experts_chosen=described["num_experts_per_token"],
        expert_width=described["moe_intermediate_size"],
        expert_layers=pattern_of(["experts" if each == "sparse" else "dense" for each in sparse]),
        shared_width=described["moe_intermediate_size"] * described["num_shared_experts"],
        router="sigmoid",
        router_normalized=bool(described["moe_renormalize"]),
        router_scale=described["routed_scaling_factor"],
    )


def _kimi_rules(config: DecoderLMConfig) -> Iterator[Rule]:
    yield from _trunk(config)
    H, D = config.recurrent_heads, config.recurrent_key_width
    assert H is not None and D is not None, "read from the folder"
    for i, kind in enumerate(config.kinds):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in norms.items()}, ["weight"])
        yield Rule(f"{ours}.feed_forward.correction", (f"{theirs}.mlp.gate.e_score_correction_bias",))
        ours, theirs = f"{ours}.attention", f"{theirs}.self_attn"
        if kind == "mla":
            pairs = {"latent": "kv_a_proj_with_mqa", "latent_norm": "kv_a_layernorm", "key_value": "kv_b_proj"}
            pairs |= {"query": "q_proj"} if config.latent_query_width is None else _LATENT_QUERIES
            yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in pairs.items()}, ["weight"])
            biased = {"latent": "kv_a_proj_with_mqa", "query_latent": "q_a_proj"}
            yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in biased.items()}, ["bias"])
            yield from same({f"{ours}.out": f"{theirs}.o_proj"})
            continue
        stacked = tuple(f"{theirs}.{name}_proj.weight" for name in "qkv")
        yield Rule(f"{ours}.qkv.weight", stacked, (H * D,) * 3)
        yield Cut(f"{ours}.conv.weight", tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv"), (H * D,) * 3)
        pairs = {"rate": "b_proj", "decay_down": "f_a_proj", "decay_up": "f_b_proj", "norm": "o_norm", "out": "o_proj"}
        pairs |= {"gate_down": "g_a_proj", "gate_up": "g_b_proj"}
        yield from same({f"{ours}.{a}": f"{theirs}.{b}" for a, b in pairs.items()}, ["weight"])
        yield Rule(f"{ours}.dt_bias", (f"{theirs}.dt_bias",))
        yield Rows(f"{ours}.A_log", (f"{theirs}.A_log",), shapes=((1, 1, H, 1),), taken=(range(H),))


_LATENT_QUERIES = {"query_latent": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj"}
_KIMI_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".shared_experts.", ".shared_expert."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


# Mamba-2 --------------------------------------------------------------------------------------------------------------


def _read_mamba(described: Described, names: set[str]) -> DecoderLMConfig:  # noqa: ARG001
    if described["expand"] * described["hidden_size"] != described["num_heads"] * described["head_dim"]:
        got = f"{described['num_heads']} and {described['head_dim']}"
        raise ValueError(f"have num_heads · head_dim equal to expand · hidden_size, got {got}")
    return DecoderLMConfig(
        vocabulary=described["vocab_size"],
        width=described["hidden_size"],
        layers=described["num_hidden_layers"],
        heads=1,
        feedforward=0,
        positions="none",
        norm="rms",
        norm_eps=described["layer_norm_epsilon"],
        bias=bool(described["use_bias"]),
        tied=bool(described["tie_word_embeddings"]),
        attention="mamba2",
        recurrent_heads=described["num_heads"],
        recurrent_key_heads=described["n_groups"],
        recurrent_key_width=described["state_size"],
        recurrent_value_width=described["head_dim"],
        recurrent_eps=described["layer_norm_epsilon"],
        convolution=described["conv_kernel"],
        max_length=1 << 20,
    )


def _mamba_rules(config: DecoderLMConfig) -> Iterator[Rule]:
    yield from same({"embedding": "embeddings", "norm": "norm_f", "output": "/lm_head"}, ["weight"])
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.attention", f"layers.{i}.mixer"
        yield from same({f"blocks.{i}.attention_norm": f"layers.{i}.norm"}, ["weight"])
        yield from same({f"{ours}.proj": f"{theirs}.in_proj", f"{ours}.out": f"{theirs}.out_proj"})
        yield from same({f"{ours}.conv": f"{theirs}.conv1d"})
        yield from (Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("A_log", "dt_bias", "D"))
        yield Rule(f"{ours}.norm_weight", (f"{theirs}.norm.weight",))


def _qwen_family(kind: str) -> Family:
    def rules(config: DecoderLMConfig) -> Iterator[Rule]:
        return _qwen_rules(config, fused=kind == "qwen3_next")

    return Family((kind,), "model.", _read_qwen, _never_written, rules, DecoderLM)


QWEN3_NEXT, QWEN3_5 = _qwen_family("qwen3_next"), _qwen_family("qwen3_5_text")
_OLMO_NAMES = (
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
)
OLMO_HYBRID = Family(
    ("olmo_hybrid",), "model.", _read_olmo, _never_written, _olmo_rules, DecoderLM, renamed=_OLMO_NAMES
)
KIMI_LINEAR = Family(
    ("kimi_linear",), "model.", _read_kimi, _never_written, _kimi_rules, DecoderLM, renamed=_KIMI_NAMES
)
MAMBA2 = Family(("mamba2",), "backbone.", _read_mamba, _never_written, _mamba_rules, DecoderLM)

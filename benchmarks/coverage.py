"""What other libraries call mechanisms, and what regard calls them: docs/coverage.md, written by ``make docs``.

``python -m benchmarks.coverage FOLDER`` reads their names from the sources of flash-linear-attention and x-transformers
in a folder of installed packages, and keeps them in coverage_names.json. A test requires one row for each name, a
reason where nothing of ours exists, and that the masks of patterns show what the formula next to them says.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch

import regard
from regard import masks, nn, normalizers, scores
from regard.masks import Mask

NAMES = Path(__file__).with_name("coverage_names.json")


class Row(NamedTuple):
    """Names of theirs, and what they are called here.

    Attributes
    ----------
    theirs : str
        Names, or patterns (``*``), separated by spaces.
    ours : tuple of str
        Names of regard without ``regard.``; ``name(argument=)`` is an argument.
    note : str
        What to know where at least one of ours exists.
    why : str
        Why there is none.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    note: str = ""
    why: str = ""

    def fits(self, name: str) -> bool:
        """Return whether this row is for a name of theirs."""
        return any(fnmatchcase(name, pattern) for pattern in self.theirs.split())

    def found(self) -> list[str]:
        """Return the names of ours that exist."""
        return [name for name in self.ours if exists(name)]

    @property
    def answer(self) -> str:
        """The cells with the names of ours, and with what to know."""
        ours = ", ".join(f"`{'' if name.startswith('attention') else 'regard.'}{name}`" for name in self.found())
        return f"{ours or '–'} | {self.note if ours else self.why}"


_ONLY = "the recurrence, not the layer"
_NEW = "no published comparison uses it so far"
_COMBA = "the paper's order; theirs norms q and p after the correction, so that σ(b) changes its query alone"
_CONJUGATE = "exact, or with `iterations=`, the paper's conjugate gradients"

#: Layers of flash-linear-attention.
LAYERS = (
    Row("ABCAttention", why="comparisons use its successor, gated slot attention"),
    Row("Attention", ("nn.SelfAttention",), "`window_size` is `masks.window`"),
    Row("BasedLinearAttention", ("nn.LinearAttention",), "with the feature map of 1 + s + s²/2, a callable"),
    Row("BitAttention", why="not a mechanism: ternary weights around ordinary attention"),
    Row("Comba", ("nn.Comba",), _COMBA),
    Row("CyclicFlowAttention", why=_NEW),
    Row("DeltaFormerAttention", why="its values need a triangular solve over all pairs"),
    Row("DeltaNet", ("nn.DeltaNet", "nn.FastWeights"), "the delta rule"),
    Row("ForgettingAttention", ("nn.ForgettingAttention",)),
    Row("GatedDeltaNet", ("nn.GatedDeltaNet",)),
    Row("GatedDeltaNet2", ("nn.gated_recurrence(erase=)",), _ONLY),
    Row("GatedDeltaProduct", ("nn.GatedDeltaNet(num_steps=)",)),
    Row("GatedLinearAttention", ("nn.GatedLinearAttention",)),
    Row("GatedSlotAttention", ("nn.GatedSlotAttention",), "a head has keys of its own"),
    Row("HGRN2Attention", ("nn.HGRN2",)),
    Row("HGRNAttention", ("nn.gated_recurrence(log_decay=)",), f"{_ONLY}: a head of width 1 for each channel"),
    Row("KimiDeltaAttention", ("nn.KimiDeltaAttention",)),
    Row("LightNetAttention", ("nn.gated_recurrence(log_decay=)",), _ONLY),
    Row("LinearAttention", ("nn.LinearAttention", "nn.LinearSelfAttention")),
    Row("LogLinearMamba2", ("nn.LogLinearMamba2",)),
    Row("Mamba", ("nn.Mamba",)),
    Row("Mamba2", ("nn.Mamba2",)),
    Row("Mamba3", why=_NEW),
    Row("MesaNet", ("nn.MesaNet",), _CONJUGATE),
    Row(
        "MoBA MixtureOfBlockAttention",
        ("nn.MixtureOfBlockAttention", "masks.selected"),
        "`masks.selected` takes keys chosen elsewhere",
    ),
    Row("MomAttention", why="it routes tokens to several memories, each a Gated DeltaNet"),
    Row("MomentumDeltaNet", why=_NEW),
    Row("MultiScaleRetention", ("nn.Retention",)),
    Row("MultiheadLatentAttention", ("nn.MultiheadLatentAttention",)),
    Row(
        "NativeSparseAttention",
        ("nn.NativeSparseAttention", "masks.selected"),
        "`masks.selected` takes keys chosen elsewhere",
    ),
    Row(
        "Parallax",
        ("attention(order=)",),
        "`order=1` is the local linear attention that it parameterizes",
    ),
    Row("PaTHAttention", ("nn.PathAttention",), "theirs scales the log gates of `forget=True`, too"),
    Row("Precond*", why=_NEW),
    Row("RWKV6Attention", ("nn.RWKV6Attention",)),
    Row("RWKV7Attention", ("nn.RWKV7Attention",)),
    Row("Raven", why="unpublished"),
    Row("ReBasedLinearAttention", ("nn.LinearAttention",), "with the feature map of (q·k)², a callable"),
    Row("RodimusAttention", ("nn.gated_recurrence(log_decay=)",), _ONLY),
    Row(
        "SlidingWindowSharedKeyAttention",
        ("attention", "masks.window"),
        "one key head and several value heads are a call of `attention`",
    ),
    Row("StickBreakingAttention", ("normalizers.StickBreaking",)),
    Row("WallAttention", why="unpublished"),
    Row("YOCOCrossAttention", ("nn.CrossLayerAttention",)),
    Row("YOCOGatedRetention", ("nn.gated_recurrence(log_decay=)",), _ONLY),
    Row("YOCOSharedKVBuilder", why="not a mechanism: projections"),
)

_SHAPE = "not a mechanism: sizes of the module and its projections"

#: Arguments of x-transformers' Attention.
ARGUMENTS = (
    Row(
        "dim dim_head heads dim_context dim_out project_out output_proj_depth zero_init_output sublayer_dropout",
        why=_SHAPE,
    ),
    Row("causal", ("attention(is_causal=)", "masks.causal")),
    Row(
        "flash flash_pack_seq attend_sdp_kwargs custom_attn_fn onnxable",
        ("attention(engine=)", "masks.from_cu_seqlens"),
        "how a call is run, not what it computes",
    ),
    Row("dropout", ("attention(dropout_p=)",)),
    Row(
        "one_kv_head kv_heads value_dim_head",
        ("attention(enable_gqa=)", "nn.SelfAttention(num_kv_heads=)"),
        "theirs gives query head h key head h mod G, ours h // (H/G)",
    ),
    Row(
        "pre_talking_heads post_talking_heads pre_scale_post_talking_heads",
        ("normalizers.TalkingHeads",),
    ),
    Row("head_scale", ("nn.SelfAttention(head_scale=)", "nn.HeadScale")),
    Row(
        "sparse_topk sparse_topk_straight_through",
        ("masks.selected",),
        "takes the keys of each query; exact top-k of all scores needs them at once",
    ),
    Row(
        "num_mem_kv",
        ("masks.sinks",),
        "concatenate learned keys and values in front, which `masks.sinks` shows to all queries",
    ),
    Row("on_attn", why="a gated linear unit after the read; output gates replaced it"),
    Row(
        "gate_value_heads gate_values gate_values_* output_gate output_gate_* swiglu_values low_rank_silu_gates",
        ("nn.SelfAttention(output_gate=)", "nn.OutputGate"),
    ),
    Row("hard", ("normalizers.Argmax", "nn.HardAttention")),
    Row("gumbel_softmax gumbel_softmax_*", ("normalizers.Gumbel",)),
    Row("max_attend_past", ("masks.window",), "`masks.window(n, 0)` shows n + 1 keys, as theirs"),
    Row("qk_norm qk_norm_*", ("nn.SelfAttention(qk_norm=)", "scores.Cosine", "nn.CosineAttention")),
    Row("qk_rmsnorm k_rmsnorm", ("nn.SelfAttention(qk_norm=)", "nn.QueryKeyNorm")),
    Row("value_rmsnorm", why="normalize values before `attention`"),
    Row("l2_distance", ("scores.Gaussian",), "with σ² = √E / 2"),
    Row("sigmoid", ("normalizers.Sigmoid",)),
    Row("selective", ("nn.SelectiveBias",)),
    Row("cog_signed", ("normalizers.Cog",)),
    Row("hybrid_*", why="run `nn.SelfAttention` beside a recurrent layer, and add their normalized outputs"),
    Row(
        "add_zero_kv",
        ("nn.MultiheadAttention(add_zero_attn=)", "normalizers.SoftmaxSink"),
        "a key of zeros is a sink of 0",
    ),
    Row("head_learned_sink", ("normalizers.SoftmaxSink",)),
    Row("rotate_num_heads", ("nn.Rotary",), "rotate the first heads only, before `attention`"),
    Row("data_dependent_alibi data_dependent_alibi_kwargs", ("nn.ForgettingAttention", "masks.forgetting")),
    Row(
        "data_dependent_alibi_per_row data_dependent_alibi_per_row_*",
        why="unpublished; each bias is a running sum of a second score",
    ),
    Row(
        "use_rel_proj_pos_bias rel_proj_*", ("nn.RelativePositions",), "a bias from the query and a table of distances"
    ),
    Row("use_cope cope_*", ("nn.ContextualPositions",)),
    Row(
        "softclamp_logits logit_softclamp_value", ("attention(softcap=)",), "theirs clamps after the bias, ours before"
    ),
    Row("learned_value_residual_mix", ("nn.SelfAttention(value_residual=)", "nn.ValueResidual")),
    Row(
        "orthog_projected_values orthog_projected_values_per_head",
        ("nn.SelfAttention(exclusive=)", "nn.ExclusiveOutput"),
        "removes a token's own value; theirs the span of all heads",
    ),
    Row("laser laser_*", ("nn.LaserAttention",), "theirs limits values by a tanh, ours clips them at ±60"),
    Row("qkv_receive_diff_residuals", ("nn.AttentionResidual",), "one for each of queries, keys and values"),
    Row(
        "use_latent_q use_latent_kv dim_latent_q dim_latent_kv latent_rope_subheads",
        ("nn.MultiheadLatentAttention",),
    ),
    Row("inverted_attention", ("nn.SlotAttention",), "a softmax over queries"),
)

#: What recent papers call what they compare with, by kind.
BASELINES: dict[str, tuple[Row, ...]] = {
    "recurrences": (
        Row("RetNet", ("nn.Retention",)),
        Row("GLA", ("nn.GatedLinearAttention",), "gated linear attention; for grouped latent attention see below"),
        Row("Mamba-2", ("nn.Mamba2",)),
        Row("HGRN2", ("nn.HGRN2",)),
        Row("Lightning Attention, MiniMax-01", ("nn.LightningAttention",)),
        Row("RWKV-6", ("nn.RWKV6Attention",)),
        Row("RWKV-7", ("nn.RWKV7Attention",)),
        Row("DeltaNet", ("nn.DeltaNet",)),
        Row("Gated DeltaNet, GDN", ("nn.GatedDeltaNet",)),
        Row("KDA, Kimi Linear", ("nn.KimiDeltaAttention",)),
        Row("DeltaProduct", ("nn.GatedDeltaNet(num_steps=)",)),
        Row("Comba", ("nn.Comba",), _COMBA),
        Row("GSA", ("nn.GatedSlotAttention",)),
        Row("Based", ("nn.LinearAttention",), "with the feature map of 1 + s + s²/2, a callable"),
        Row("Log-Linear Attention", ("nn.LogLinearMamba2", "nn.LogLinearGatedDeltaNet")),
        Row("MesaNet", ("nn.MesaNet",), _CONJUGATE),
        Row("TTT, TTT-Linear, TTT-MLP", ("nn.TTTLinear", "nn.TTTMLP"), "the layer of its Mamba backbone"),
        Row(
            "Titans, LMM",
            ("nn.TitansMemory",),
            "the paper's loss; others norm the memory's output, as TTT does",
        ),
        Row(
            "Titans: MAC, MAG, MAL",
            ("nn.TitansMAC", "nn.TitansMAG", "nn.TitansMAL"),
            "what is recalled has a causal mask, too",
        ),
        Row(
            "ATLAS, OmegaNet",
            ("nn.Atlas",),
            "OmegaNet is `muon=False`; the memory without windowed attention beside it",
        ),
        Row("LaCT", ("nn.LaCT",), "the memory has no positions"),
        Row("Mamba, S6", ("nn.Mamba",)),
    ),
    "softmax attention": (
        Row("Transformer++, LLaMA", ("nn.SelfAttention",), "with `rotary=`, RMS norms and SwiGLU around it"),
        Row("GQA, MQA", ("nn.SelfAttention(num_kv_heads=)",)),
        Row("SWA", ("masks.window",)),
        Row("Differential Transformer", ("nn.DifferentialAttention",)),
        Row("FoX, Forgetting Transformer", ("nn.ForgettingAttention",)),
        Row("PaTH, PaTH-FoX", ("nn.PathAttention",)),
        Row("MTA, Multi-Token Attention", ("nn.MultiTokenAttention",)),
        Row("SSMax", ("normalizers.ScalableSoftmax",)),
        Row("Stick-breaking", ("normalizers.StickBreaking",)),
        Row("Selective Attention", ("nn.SelectiveBias",)),
        Row("CoPE", ("nn.ContextualPositions",)),
        Row("LASER", ("nn.LaserAttention",)),
        Row("Gated attention", ("nn.SelfAttention(output_gate=)",)),
        Row("gpt-oss sinks, off-by-one softmax", ("normalizers.SoftmaxSink",)),
        Row("Local linear attention, LLA", ("attention(order=)",), "`order=1`"),
        Row("DeBERTa", ("nn.DisentangledPositions",)),
    ),
    "chosen keys": (
        Row("NSA", ("nn.NativeSparseAttention",)),
        Row("MoBA", ("nn.MixtureOfBlockAttention",)),
        Row("DSA, DeepSeek-V3.2", ("nn.DeepSeekSparseAttention",)),
        Row("StreamingLLM", ("masks.sinks", "masks.window"), "see the patterns below"),
        Row("Reformer", ("nn.LSHAttention",)),
    ),
    "compact keys and values": (
        Row("MLA", ("nn.MultiheadLatentAttention",)),
        Row(
            "GLA, grouped latent attention",
            ("nn.MultiheadLatentAttention",),
            "the sum of one layer for each latent, with its share of the heads",
        ),
        Row("GTA", ("nn.GroupedTiedAttention",)),
        Row("TPA", ("nn.TensorProductAttention",)),
        Row("MFA", ("nn.MultiMatrixFactorizationAttention",)),
        Row("CLA, YOCO", ("nn.CrossLayerAttention",)),
    ),
}

#: The libraries: where the names stand in the sources (a class, or None for all names of a module), and the rows.
LIBRARIES: dict[str, tuple[str, str | None, tuple[Row, ...]]] = {
    "flash-linear-attention": ("fla/layers/__init__.py", None, LAYERS),
    "x-transformers": ("x_transformers/x_transformers.py", "Attention", ARGUMENTS),
}


class Pattern(NamedTuple):
    """A pattern of sparse attention as a mask, and by its formula; w, n, l, C are sizes."""

    name: str
    mask: str
    formula: str


#: Patterns that need no class. A test compares mask and formula.
PATTERNS = (
    Pattern(
        "Longformer: a window of 2w + 1 keys, n global tokens",
        "masks.window(w, w) | masks.sinks(n) | masks.as_mask(lambda b, h, q, k: q < n)",
        "|q − k| ≤ w or k < n or q < n",
    ),
    Pattern(
        "… with dilation l", "masks.window(l * w, l * w) & masks.dilated(l)", "|q − k| ≤ l·w and (q − k) mod l = 0"
    ),
    Pattern(
        "StreamingLLM: n sinks, w earlier keys",
        "masks.causal() & (masks.window(w, 0) | masks.sinks(n))",
        "k ≤ q and (q − k ≤ w or k < n)",
    ),
    Pattern(
        "Sparse Transformer, strided",
        "masks.causal() & (masks.window(l - 1, 0) | masks.dilated(l))",
        "k ≤ q and (q − k < l or (q − k) mod l = 0)",
    ),
    Pattern(
        "Sparse Transformer, fixed",
        "masks.causal() & (masks.document(torch.arange(L) // l) | masks.key_padding(torch.arange(L) % l >= l - n))",
        "k ≤ q and (⌊k / l⌋ = ⌊q / l⌋ or k mod l ≥ l − n)",
    ),
    Pattern(
        "Chunked attention (Llama 4), chunks of C",
        "masks.causal() & masks.document(torch.arange(L) // C)",
        "k ≤ q and ⌊k / C⌋ = ⌊q / C⌋",
    ),
    Pattern(
        "Block-causal (block diffusion), blocks of C",
        "masks.as_mask(lambda b, h, q, k: k // C <= q // C)",
        "⌊k / C⌋ ≤ ⌊q / C⌋",
    ),
    Pattern("Prefix language model, n tokens", "masks.causal() | masks.prefix(n)", "k ≤ q or k < n"),
    Pattern(
        "Star: neighbours, and a hub in front",
        "masks.window(1, 1) | masks.sinks(1) | masks.as_mask(lambda b, h, q, k: q < 1)",
        "|q − k| ≤ 1 or k = 0 or q = 0",
    ),
)

PAGE = """# Names in other libraries

What layers of flash-linear-attention and arguments of x-transformers' `Attention` are called here, or why there is no
such thing. Conventions may differ; docstrings state ours. Every pattern of sparse attention is a mask.

{tables}

## Baselines of papers

What recent papers call the attention that they compare with.

{baselines}

## Patterns of sparse attention

A mask is composed of parts, and engines skip what it hides. Queries and keys are numbered q and k, both up to L.

{patterns}
"""


def exists(name: str) -> bool:
    """Return whether a name of regard, or an argument of it, exists."""
    path, _, argument = name.removesuffix("=)").partition("(")
    module, _, last = path.rpartition(".")
    where = {"": regard, "nn": nn, "masks": masks, "normalizers": normalizers, "scores": scores}[module]
    thing = getattr(where, last, None)
    return thing is not None and (not argument or argument in inspect.signature(thing).parameters)


def made(pattern: Pattern, **sizes: int) -> Mask:
    """Return the mask of a pattern with these sizes (w, n, l, C, L)."""
    found: Mask = eval(pattern.mask, {"masks": masks, "torch": torch, **sizes})
    return found


def read(folder: Path, library: str) -> dict[str, Any]:
    """Return the version of a library, and the names in its sources."""
    file, class_name, _ = LIBRARIES[library]
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    if class_name is None:
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names = sorted({alias.asname or alias.name for node in imports for alias in node.names})
    else:
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
        init = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        names = [each.arg for each in (*init.args.args[1:], *init.args.kwonlyargs)]
    version = next(each.version for each in distributions(path=[str(folder)]) if each.name == library)
    return {"version": version, "names": names}


def page() -> str:
    """Return docs/coverage.md."""
    tables = []
    for library, found in json.loads(NAMES.read_text(encoding="utf-8")).items():
        lines = [f"## {library} {found['version']}", "", "| theirs | here | |", "| --- | --- | --- |"]
        for row in LIBRARIES[library][2]:
            theirs = ", ".join(f"`{name}`" for name in found["names"] if row.fits(name))
            lines.append(f"| {theirs} | {row.answer} |")
        tables.append("\n".join(lines))
    baselines = ["| theirs | kind | here | |", "| --- | --- | --- | --- |"]
    for kind, rows in BASELINES.items():
        baselines += [f"| {row.theirs} | {kind} | {row.answer} |" for row in rows]
    cells = [(each.name, f"`{each.mask}`".replace("|", "\\|"), each.formula.replace("|", "\\|")) for each in PATTERNS]
    patterns = ["| pattern | mask | q sees k if |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in cells)]
    parts = {"tables": "\n\n".join(tables), "baselines": "\n".join(baselines), "patterns": "\n".join(patterns)}
    return PAGE.format(**parts)


def main(arguments: list[str]) -> int:
    """Read the names from a folder of installed packages, and keep them."""
    if len(arguments) != 1:
        print(
            "usage: python -m benchmarks.coverage FOLDER (where fla and x_transformers are installed)", file=sys.stderr
        )
        return 2
    found = {library: read(Path(arguments[0]), library) for library in LIBRARIES}
    NAMES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

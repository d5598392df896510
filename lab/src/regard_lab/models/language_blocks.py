"""What decoder-only and encoder-only language models share: sizes, and the stack of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard._utils.errors import rejected, unknown_name
from regard._utils.tracing import values_unavailable
from regard.engines.aux import Aux, AuxRequest
from regard.masks import MaskLike
from regard.nn import DisentangledPositions, FeedForward, KeysValues, KVCache, LinearCache, Rotary, SinusoidalPositions
from regard.nn.heads.causal import CausalSelfAttention
from regard.nn.heads.self_attention import SequenceContext
from regard.nn.positions.rotary import Rotation
from regard.nn.positions.rotary_scaling import RotaryScaling
from regard.nn.transformer import ACTIVATIONS
from regard_lab._options import Options, option
from regard_lab.models.attending import DEEPEST, LARGEST, SCORES, share, size
from regard_lab.models.experts import Experts
from regard_lab.models.slot_cache import SlotCache
from regard_lab.models.transformer import NORMALIZERS

# What the configs of decoder-only and encoder-only language models share ----------------------------------------------


NORMS = ("layer", "rms", "rms_zero")
POSITIONS = ("learned", "rotary", "sinusoidal", "alibi", "disentangled", "none")
#: Maximum vocabulary size.
VOCABULARY = 1 << 24
#: A default hidden width is rounded up to a multiple of this.
_GRAIN = 64


@dataclass(frozen=True)
class LanguageConfig(Options, ABC):
    """Sizes and parts of a stack of self-attention and feed-forward blocks over one sequence of tokens."""

    vocabulary: int = size(MISSING, "size N of the vocabulary", VOCABULARY)
    width: int = size(256, "width E of the rows")
    layers: int = size(4, "blocks, one after the other", 2 * DEEPEST)
    heads: int = size(4, "heads H of queries")
    kv_heads: int | None = size(None, "heads G of keys and values, which divide the others; as many by default")
    head_width: int | None = size(None, "width D of a head; E/H by default")
    feedforward: int | None = option(
        None, "width F of the hidden layers; 4·E by default, 8/3·E with a gate, rounded up to a multiple of 64; 0 for "
        "none", kind=int, ge=0, le=1 << 20)  # fmt: skip
    max_length: int = size(1024, "positions that the model was made for; learned ones know no others", 1 << 24)
    positions: str = option("learned", "what tells positions", choices=POSITIONS)
    rotary_base: float = option(10000.0, "the base of rotary wavelengths", gt=0)
    rotary_fraction: float = option(1.0, "share of a head's columns that are turned", gt=0, le=1)
    rotary_factor: float = option(1.0, "divides rotary angles, for longer sequences", ge=1)
    rotary_original: int | None = size(None, "positions trained on, where only slow waves are divided", 1 << 24)
    rotary_low: float = option(1.0, "turns within rotary_original below which a wave is slow", gt=0)
    rotary_high: float = option(4.0, "turns within rotary_original above which a wave is kept", gt=0)
    #: He 2021, arXiv 2006.03654; also the next option.
    distance_buckets: int | None = option(None, "buckets of distances between tokens with disentangled positions; one "
                                          "for each distance by default", kind=int, ge=8, le=1 << 16)  # fmt: skip
    max_distance: int | None = size(
        None, "distance from which on tokens share a bucket; max_length by default", 1 << 20
    )
    norm: str = option("layer", "layer normalization, or of root mean squares alone, with a scale that is stored as it "
                       "is or less 1 (Gemma, Qwen3-Next)", choices=NORMS)  # fmt: skip
    norm_eps: float = option(1e-5, "added to the variance", gt=0)
    activation: str = option("gelu", "of the hidden layers", choices=tuple(ACTIVATIONS))
    gated: bool = option(False, "whether hidden features are multiplied by another projection (SwiGLU, GEGLU)")
    bias: bool = option(True, "whether projections have a bias")
    qkv_bias: bool | None = option(None, "of queries, keys and values; as bias by default", kind=bool)
    out_bias: bool | None = option(None, "of the heads' outputs; as bias by default", kind=bool)
    #: Press & Wolf 2017, arXiv 1608.05859.
    tied: bool = option(True, "whether the embedding also scores the vocabulary")
    score: str = option("scaled_dot", "how queries and keys compare within a head", choices=SCORES)
    normalizer: str = option("softmax", "of the scores", choices=NORMALIZERS)
    qk_norm: str = option("none", "norm of queries and keys: within each head (Qwen3), or over all heads (OLMo 2)",
                          choices=("none", "head", "all"))  # fmt: skip
    #: Qiu 2025, arXiv 2505.06708.
    output_gate: bool = option(False, "whether the output of heads is multiplied by a gate for each channel")
    dropout: float = share(0.0, "share zeroed of embeddings and of what each block adds")
    attention_dropout: float = share(0.0, "share zeroed of attention weights")

    @classmethod
    @abstractmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return the named settings."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the config of this name, with other fields in place of the preset's."""
        known = cls.presets()
        if name not in known:
            raise unknown_name(cls.__name__, "preset", str(name), known)
        return cls(**{**known[name], **changes})

    def check(self) -> None:
        """Raise where fields contradict each other."""
        if self.head_width is None and self.width % self.heads:
            raise self.refused("heads", f"divide width {self.width}", self.heads)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise self.refused("kv_heads", f"divide heads {self.heads}", self.kv_heads)
        if self.positions == "rotary" and (self.turned % 2 or not self.turned):
            raise self.refused("head_width · rotary_fraction", "be even where positions is 'rotary'", self.turned)
        if self.rotary_original is not None and not self.rotary_low < self.rotary_high:
            raise self.refused("rotary_high", f"be above rotary_low, {self.rotary_low:g}", self.rotary_high)
        if self.hidden > LARGEST << 4:
            raise self.refused("feedforward", f"be at most {LARGEST << 4:,}", self.hidden)
        if self.positions == "disentangled":
            return
        for name in ("distance_buckets", "max_distance"):
            if getattr(self, name) is not None:
                raise self.refused(name, "be left out unless positions is 'disentangled'", getattr(self, name))

    @property
    def head(self) -> int:
        """Width D of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def groups(self) -> int:
        """Heads G of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sources(self) -> Sequence[int]:
        """The layer whose keys and values each layer reads."""
        return range(self.layers)

    @property
    def distances(self) -> DisentangledPositions | None:
        """New disentangled positions for a layer; None with other positions."""
        if self.positions != "disentangled":
            return None
        reach = self.max_length if self.max_distance is None else self.max_distance
        return DisentangledPositions(self.heads, self.head, reach, self.distance_buckets, embed_dim=self.width)

    @property
    def turning(self) -> Sequence[bool]:
        """Whether each layer has rotary positions, if it takes any."""
        return [self.positions == "rotary"] * self.layers

    @property
    def hidden(self) -> int:
        """Width F of the hidden layers."""
        if self.feedforward is not None:
            return self.feedforward
        return -(-8 * self.width // 3 // _GRAIN) * _GRAIN if self.gated else 4 * self.width

    @property
    def turned(self) -> int:
        """How many columns of a head rotary positions turn."""
        return int(self.head * self.rotary_fraction + 1e-9)

    @property
    def scaling(self) -> RotaryScaling | None:
        """How rotary angles are scaled."""
        if self.rotary_factor == 1:
            return None
        return RotaryScaling(self.rotary_factor, self.rotary_original, self.rotary_low, self.rotary_high)

    def refused(self, name: str, expected: str, got: object) -> Exception:
        """Return the error to raise for a field."""
        return rejected(type(self).__name__, name, expected, got)


# The block of language models: self-attention and a feed-forward network with residual connections -------------------


#: Standard deviation of initial weights and embeddings (Radford 2019).
STD = 0.02


#: What a block returns, by the argument of the attention that requests it, in the order of answers.
_FIELDS = {"return_aux": "aux", "return_keys": "keys", "loss": "loss"}


class BlockOutput(NamedTuple):
    """What a block returns.

    Attributes
    ----------
    rows : Tensor (B, L, E)
        The new hidden states.
    aux, keys, loss : optional
        What was requested of the attention: auxiliary outputs, its keys and values, the loss of its indexer.
    """

    rows: Tensor
    aux: Aux | None = None
    keys: KeysValues | None = None
    loss: Tensor | None = None


class Block(nn.Module):
    """Pre-norm: ``x ← x + A(N(x))``, ``x ← x + F(N(x))``. Post-norm: ``x ← N(x + A(x))``, ``x ← N(x + F(x))``.

    With norms of what is added (OLMo 2) it is ``x ← x + N(A(x))``, ``x ← x + N(F(x))``.

    Parameters
    ----------
    config : LanguageConfig
    place : {"before", "after", "added"}
        Where norms are: of what attention and feed-forward network read, of the sums, or of what is added to them.
    attention : Module
        Self-attention or what stands in its place; see :mod:`regard_lab.models.mixers`.
    experts : Experts, optional
        What stands in the place of the feed-forward network.

    Attributes
    ----------
    checkpoints : bool
        Activation checkpointing: store only the block's input, and recompute the rest in the backward pass.
    """

    def __init__(
        self, config: LanguageConfig, place: str, attention: nn.Module, experts: Experts | None = None
    ) -> None:
        super().__init__()
        self.place, self.checkpoints = place, False
        self.attention: Any = attention
        self.feed_forward: FeedForward | Experts | None = experts
        if experts is None and config.hidden:
            self.feed_forward = FeedForward(
                config.width, config.hidden, config.activation, gated=config.gated, bias=config.bias
            )
        self.attention_norm = norm(config)
        self.feed_forward_norm = None if self.feed_forward is None else norm(config)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def ends(self) -> list[Tensor]:
        """The last matrices of what is added to the rows."""
        last = [self.attention.out.weight]
        if isinstance(self.feed_forward, FeedForward):
            last.append(self.feed_forward.down.weight)
        elif self.feed_forward is not None:
            shared = self.feed_forward.shared
            last += [self.feed_forward.down, *([] if shared is None else [shared.down.weight])]
        return last

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None,
        rotation: Rotation | None,
        cache: KVCache | SlotCache | LinearCache | None = None,
        return_aux: AuxRequest | None = None,
        keys: KeysValues | None = None,
        return_keys: bool = False,
        loss: str | None = None,
    ) -> BlockOutput:
        """Return the new hidden states, and what is requested of the attention.

        ``keys`` are those of another layer, which the attention reads if it has none of its own; ``loss`` is the
        argument of :class:`regard.nn.DeepSeekSparseAttention`.
        """
        how = (x, mask, rotation, cache, return_aux, keys, return_keys, loss)
        if self.checkpoints and cache is None and return_aux is None and torch.is_grad_enabled():
            # Checkpoint inside the module, so that FSDP gathers its parameters in both passes.
            outcome: BlockOutput = checkpoint(self._run, *how, use_reentrant=False)
            return outcome
        return self._run(*how)

    def _run(
        self,
        x: Tensor,
        mask: MaskLike | None,
        rotation: Rotation | None,
        cache: KVCache | SlotCache | LinearCache | None,
        return_aux: AuxRequest | None,
        keys: KeysValues | None,
        return_keys: bool,
        loss: str | None,
    ) -> BlockOutput:
        read = self.attention_norm(x) if self.place == "before" else x
        # What some kinds of attention do not know is passed only where it is requested.
        asked: dict[str, Any] = {"return_aux": return_aux, "return_keys": return_keys or None, "loss": loss}
        asked = {name: each for name, each in asked.items() if each is not None}
        if keys is not None:
            found: Any = self.attention(read, keys, mask, rotation=rotation, **asked)
        elif (
            isinstance(self.attention, CausalSelfAttention)
            and isinstance(cache, SlotCache)
            and cache.slots.visible is not None
        ):
            found = self._by_length(read, rotation, cache)
        else:
            found = self.attention(read, mask, rotation=rotation, cache=cache, **asked)
        added, *rest = found if isinstance(found, tuple) else (found,)
        given = {_FIELDS[name]: each for name, each in zip(asked, rest, strict=True)}
        x = self._sum(x, added, self.attention_norm)
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            read = self.feed_forward_norm(x) if self.place == "before" else x
            x = self._sum(x, self.feed_forward(read), self.feed_forward_norm)
        return BlockOutput(x, **given)

    def _by_length(self, read: Tensor, rotation: Rotation | None, cache: SlotCache) -> Tensor:
        """Return what attention that makes its masks itself adds to a step (B, 1, E) of several lengths."""
        groups, found = cache.by_length(), torch.empty_like(read)
        for each in groups:
            turned = None if rotation is None else tuple(waves[each.rows] for waves in rotation)
            found[each.rows] = self.attention(read[each.rows], rotation=turned, cache=each)
        return found

    def _sum(self, x: Tensor, added: Tensor, norm: nn.Module) -> Tensor:
        """Return the sum of rows and what is added to them, with the norm of either."""
        added = norm(added) if self.place == "added" else added
        x = x + (self.dropout(added) if self.training else added)
        return norm(x) if self.place == "after" else x


class BlockStack(nn.Module):
    """Base class of language models: sequence parallelism and activation checkpointing for all blocks.

    Attributes
    ----------
    blocks : sequence of Block
    context : SequenceContext, optional
        Splits sequences across processes; None if each process holds whole sequences.
    """

    blocks: Sequence[Block]
    context: SequenceContext | None = None

    def set_context(self, context: SequenceContext | None) -> None:
        """Split sequences across processes, or stop doing so.

        Parameters
        ----------
        context : SequenceContext or None
            For example :class:`regard.distributed.ContextParallel`. Pass this process's slice of the tokens (and of
            positions, if given), but masks for the whole sequence. Parameter gradients then cover only this process's
            tokens; ``context.sum_gradients`` adds them up.

        Raises
        ------
        ValueError
            If a layer needs the whole sequence.
        """
        attentions = [block.attention for block in self.blocks]
        whole = [each for each in attentions if not hasattr(each, "context")]
        if context is not None and whole:
            expected = f"be None with {type(whole[0]).__name__}, which needs the whole sequence"
            raise rejected(type(self).__name__, "context", expected, type(context).__name__)
        self.context = context
        for each in attentions:
            if each not in whole:
                each.context = context

    @property
    def checkpoint_activations(self) -> bool:
        """Whether blocks store only their input, and recompute the rest in the backward pass."""
        return bool(self.blocks) and all(block.checkpoints for block in self.blocks)

    @checkpoint_activations.setter
    def checkpoint_activations(self, wanted: bool) -> None:
        for block in self.blocks:
            block.checkpoints = wanted

    def _whole(self, length: int) -> int:
        """Return the length of the whole sequence if this process holds ``length`` tokens of it."""
        return length if self.context is None else length * self.context.size

    def _places(self, tokens: Tensor) -> Tensor:
        """Return the default positions of this process's tokens (B, L)."""
        if self.context is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        return self.context.positions(self._whole(tokens.shape[1]), tokens.device)


class PositionEmbedding(nn.Module):
    """Add learned or sinusoidal position embeddings; nothing for positions of another kind.

    Parameters
    ----------
    config : LanguageConfig
    first : int, default 0
        Index of the first position in the learned table.
    width : int, optional
        Embedding size; the config's by default.
    """

    def __init__(self, config: LanguageConfig, first: int = 0, width: int | None = None) -> None:
        super().__init__()
        E = config.width if width is None else width
        self.first, self.max_length = first, config.max_length
        self.learned = nn.Embedding(first + config.max_length, E) if config.positions == "learned" else None
        self.waves = SinusoidalPositions(E) if config.positions == "sinusoidal" else None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings (B, L, E) with the embeddings of ``positions`` (L,) or (B, L) added."""
        if self.waves is not None:
            return x + self.waves.waves(positions).to(x.dtype)
        if self.learned is None:
            return x
        if not values_unavailable(positions) and positions.numel() and int(positions.max()) >= self.max_length:
            expected = f"have positions below {self.max_length:,}, the number of learned positions"
            raise rejected("language model", "tokens", expected, int(positions.max()))
        return x + self.learned(positions + self.first if self.first else positions)


def embedded(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return the embeddings (B, L, E) of tokens (B, L); raise if one is not in the vocabulary."""
    try:
        return embedding(tokens)
    except IndexError:
        expected = f"be ids from 0 to {embedding.num_embeddings - 1:,}, below the vocabulary size"
        wrong = tokens[(tokens < 0) | (tokens >= embedding.num_embeddings)]
        raise rejected("language model", "tokens", expected, int(wrong[0]) if len(wrong) else "others") from None


def rotary(config: LanguageConfig, width: int | None = None) -> Rotary | None:
    """Return the rotary embedding of so many columns of queries and keys, those of a head by default.

    None without rotary positions.
    """
    if config.positions != "rotary":
        return None
    return Rotary(width or config.head, config.rotary_base, fraction=config.rotary_fraction, scaling=config.scaling)


def norm(config: LanguageConfig, width: int | None = None) -> nn.Module:
    """Return a LayerNorm or RMSNorm over ``width`` features; the config's hidden size by default."""
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "rms_zero": ZeroCenteredRMSNorm}[config.norm]
    return kind(config.width if width is None else width, eps=config.norm_eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """An RMSNorm whose weight is its scale less 1, so that weight decay pulls the scale to 1 (Gemma, Qwen3-Next)."""

    def reset_parameters(self) -> None:
        """Set the weight to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows, computed in at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


def draw(model: nn.Module, blocks: Iterable[Block], layers: int) -> None:
    """Initialize a model: weights and embeddings with standard deviation 0.02, biases with 0, norms with 1.

    The last linear layer of each residual branch is scaled by 1/√(2·layers) (Radford 2019). Biases within an attention
    are what its ``reset_parameters`` sets, such as open forget gates.
    """
    blocks = list(blocks)
    attentions = {module for block in blocks for module in block.attention.modules()}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, Block):
            module.attention.reset_parameters()
        elif isinstance(module, Experts):
            module.draw(STD)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None and module not in attentions:
            nn.init.zeros_(module.bias)
    for block in blocks:
        for end in block.ends:
            nn.init.normal_(end, std=STD / (2 * layers) ** 0.5)

"""What the configs of decoder-only and encoder-only language models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Self

from regard._utils.errors import rejected, unknown_name
from regard._utils.options import Options, option
from regard.nn.positions.rotary import RotaryScaling
from regard.nn.transformer import ACTIVATIONS
from regard_lab.models._parts import DEEPEST, LARGEST, share, size
from regard_lab.models.attending import SCORES
from regard_lab.models.transformer_config import NORMALIZERS

NORMS, POSITIONS = ("layer", "rms"), ("learned", "rotary", "sinusoidal", "alibi", "none")
#: No vocabulary is larger.
VOCABULARY = 1 << 24
#: The hidden layer's width is a multiple of this where it follows from the model's.
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
    feedforward: int | None = size(
        None, "width F of the hidden layers; 4·E by default, 8/3·E with a gate, rounded up to a multiple of 64", 1 << 20
    )
    longest: int = size(1024, "positions that the model was made for; learned ones know no others", 1 << 24)
    positions: str = option("learned", "what tells positions", known=POSITIONS)
    rotary_base: float = option(10000.0, "the base of rotary wavelengths", above=0)
    rotary_fraction: float = option(1.0, "share of a head's columns that are turned", above=0, most=1)
    rotary_factor: float = option(1.0, "divides rotary angles, for longer sequences", least=1)
    rotary_original: int | None = size(None, "positions trained on, where only slow waves are divided", 1 << 24)
    rotary_low: float = option(1.0, "turns within rotary_original below which a wave is slow", above=0)
    rotary_high: float = option(4.0, "turns within rotary_original above which a wave is kept", above=0)
    norm: str = option("layer", "layer normalization, or of root mean squares alone", known=NORMS)
    norm_eps: float = option(1e-5, "added to the variance", above=0)
    activation: str = option("gelu", "of the hidden layers", known=tuple(ACTIVATIONS))
    gated: bool = option(False, "whether hidden features are multiplied by another projection (SwiGLU, GEGLU)")
    bias: bool = option(True, "whether projections have a bias")
    qkv_bias: bool | None = option(None, "of queries, keys and values; as bias by default", kind=bool)
    out_bias: bool | None = option(None, "of the heads' outputs; as bias by default", kind=bool)
    #: Press & Wolf 2017, arXiv 1608.05859.
    tied: bool = option(True, "whether the embedding also scores the vocabulary")
    score: str = option("scaled_dot", "how queries and keys compare within a head", known=SCORES)
    normalizer: str = option("softmax", "of the scores", known=NORMALIZERS)
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

    @property
    def head(self) -> int:
        """Width D of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def groups(self) -> int:
        """Heads G of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

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

"""Layers: every mechanism of the catalogue as a ``torch.nn.Module``, built from the parts of :func:`regard.attention`.

Sequences are (B, N, E), images (B, C, H, W). ``valid_lens`` (B,) or (B, L) is the number of valid keys.
"""

from regard.nn.convert import convert
from regard.nn.heads.decomposable import DecomposableAttention
from regard.nn.heads.local import LocalAttention
from regard.nn.heads.multihead import MultiheadAttention
from regard.nn.heads.scored import (
    AdditiveAttention,
    ConcatAttention,
    CosineAttention,
    DotProductAttention,
    GeneralAttention,
    KernelAttention,
    LocationAttention,
    ScoredAttention,
    masked_softmax,
)
from regard.nn.heads.self_attention import SelfAttention
from regard.nn.heads.stochastic import HardAttention
from regard.nn.heads.synthesizer import FactorizedPositionalAttention, PositionalAttention
from regard.nn.image.channels import (
    CBAM,
    ECA,
    ChannelAttention,
    MultiheadConvAttention,
    SpatialAttention,
    SqueezeExcitation,
)
from regard.nn.image.non_local import NonLocalBlock, SelfAttention2d
from regard.nn.kv_cache import KVCache
from regard.nn.linear.attention import LinearAttention, linear_attention
from regard.nn.linear.cache import LinearCache
from regard.nn.linear.fast_weights import FastWeights, fast_weights
from regard.nn.linear.recurrence import LinearState
from regard.nn.linear.self_attention import LinearSelfAttention
from regard.nn.memory.addressing import ContentAddressing, MemoryMaps
from regard.nn.memory.dnc import DifferentiableNeuralComputer, DNCReadHead, DNCState, DNCWriteHead
from regard.nn.memory.intra import IntraAttention, IntraState
from regard.nn.memory.ntm import NeuralTuringMachine, NTMReadHead, NTMState, NTMWriteHead
from regard.nn.positions.encodings import LearnedPositions, SinusoidalPositions
from regard.nn.positions.relative import AlibiBias, RelativeBias, RelativePositions
from regard.nn.positions.rotary import Rotary, RotaryScaling
from regard.nn.sets import ISAB, MAB, PMA, SAB
from regard.nn.transformer import (
    FeedForward,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "CBAM",
    "ECA",
    "ISAB",
    "MAB",
    "PMA",
    "SAB",
    "AdditiveAttention",
    "AlibiBias",
    "ChannelAttention",
    "ConcatAttention",
    "ContentAddressing",
    "CosineAttention",
    "DNCReadHead",
    "DNCState",
    "DNCWriteHead",
    "DecomposableAttention",
    "DifferentiableNeuralComputer",
    "DotProductAttention",
    "FactorizedPositionalAttention",
    "FastWeights",
    "FeedForward",
    "GeneralAttention",
    "HardAttention",
    "IntraAttention",
    "IntraState",
    "KVCache",
    "KernelAttention",
    "LearnedPositions",
    "LinearAttention",
    "LinearCache",
    "LinearSelfAttention",
    "LinearState",
    "LocalAttention",
    "LocationAttention",
    "MemoryMaps",
    "MultiheadAttention",
    "MultiheadConvAttention",
    "NTMReadHead",
    "NTMState",
    "NTMWriteHead",
    "NeuralTuringMachine",
    "NonLocalBlock",
    "PositionalAttention",
    "RelativeBias",
    "RelativePositions",
    "Rotary",
    "RotaryScaling",
    "ScoredAttention",
    "SelfAttention",
    "SelfAttention2d",
    "SinusoidalPositions",
    "SpatialAttention",
    "SqueezeExcitation",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "convert",
    "fast_weights",
    "linear_attention",
    "masked_softmax",
]

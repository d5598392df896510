"""Layers: every mechanism of the catalogue as a ``torch.nn.Module``, made of the parts of :func:`regard.attention`.

Sequences are (B, N, E), images (B, C, H, W). ``valid_lens`` (B,) or (B, L) says how many keys are real.
"""

from regard.nn._recurrence import LinearState
from regard.nn._scored import ScoredAttention
from regard.nn.beam_cache import BeamCache
from regard.nn.channels import CBAM, ECA, ChannelAttention, SpatialAttention, SqueezeExcitation
from regard.nn.conv_attention import MultiheadConvAttention
from regard.nn.convert import convert
from regard.nn.decomposable import DecomposableAttention
from regard.nn.dnc import DifferentiableNeuralComputer, DNCReadHead, DNCState, DNCWriteHead
from regard.nn.encoder_decoder import Transformer
from regard.nn.fast_weights import FastWeights, fast_weights
from regard.nn.feed_forward import FeedForward
from regard.nn.intra import IntraAttention, IntraState
from regard.nn.kernel import KernelAttention
from regard.nn.kv_cache import KVCache
from regard.nn.linear import LinearAttention, linear_attention
from regard.nn.linear_cache import LinearCache
from regard.nn.linear_self_attention import LinearSelfAttention
from regard.nn.local import LocalAttention
from regard.nn.masked import masked_softmax
from regard.nn.memory import ContentAddressing, MemoryMaps
from regard.nn.multihead import MultiheadAttention
from regard.nn.non_local import NonLocalBlock, SelfAttention2d
from regard.nn.ntm import NeuralTuringMachine, NTMReadHead, NTMState, NTMWriteHead
from regard.nn.positional import FactorizedPositionalAttention, PositionalAttention
from regard.nn.positional_encodings import LearnedPositions, SinusoidalPositions
from regard.nn.relative_positions import AlibiBias, RelativeBias, RelativePositions
from regard.nn.rotary import Rotary, RotaryScaling
from regard.nn.scored import (
    AdditiveAttention,
    ConcatAttention,
    CosineAttention,
    DotProductAttention,
    GeneralAttention,
    LocationAttention,
)
from regard.nn.self_attention import SelfAttention
from regard.nn.set_transformer import ISAB, MAB, PMA, SAB
from regard.nn.stochastic_attention import HardAttention
from regard.nn.transformer import (
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
    "BeamCache",
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

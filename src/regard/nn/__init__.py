"""Layers: every mechanism of the catalogue as a ``torch.nn.Module``, built from the parts of :func:`regard.attention`.

Sequences are (B, N, E), images (B, C, H, W). ``valid_lens`` (B,) or (B, L) is the number of valid keys.
"""

from inspect import ismodule as _ismodule

from regard.nn.convert import convert as convert
from regard.nn.heads.blocks import MixtureOfBlockAttention as MixtureOfBlockAttention
from regard.nn.heads.blocks import NativeSparseAttention as NativeSparseAttention
from regard.nn.heads.clip import qk_clip_ as qk_clip_
from regard.nn.heads.decomposable import DecomposableAttention as DecomposableAttention
from regard.nn.heads.forgetting import ForgettingAttention as ForgettingAttention
from regard.nn.heads.indexed import DeepSeekSparseAttention as DeepSeekSparseAttention
from regard.nn.heads.indexed import LightningIndexer as LightningIndexer
from regard.nn.heads.latent import MultiheadLatentAttention as MultiheadLatentAttention
from regard.nn.heads.local import LocalAttention as LocalAttention
from regard.nn.heads.multihead import MultiheadAttention as MultiheadAttention
from regard.nn.heads.scored import AdditiveAttention as AdditiveAttention
from regard.nn.heads.scored import ConcatAttention as ConcatAttention
from regard.nn.heads.scored import CosineAttention as CosineAttention
from regard.nn.heads.scored import DotProductAttention as DotProductAttention
from regard.nn.heads.scored import GeneralAttention as GeneralAttention
from regard.nn.heads.scored import KernelAttention as KernelAttention
from regard.nn.heads.scored import LocationAttention as LocationAttention
from regard.nn.heads.scored import ScoredAttention as ScoredAttention
from regard.nn.heads.scored import masked_softmax as masked_softmax
from regard.nn.heads.self_attention import SelfAttention as SelfAttention
from regard.nn.heads.stochastic import HardAttention as HardAttention
from regard.nn.heads.synthesizer import FactorizedPositionalAttention as FactorizedPositionalAttention
from regard.nn.heads.synthesizer import PositionalAttention as PositionalAttention
from regard.nn.image.channels import CBAM as CBAM
from regard.nn.image.channels import ECA as ECA
from regard.nn.image.channels import ChannelAttention as ChannelAttention
from regard.nn.image.channels import MultiheadConvAttention as MultiheadConvAttention
from regard.nn.image.channels import SpatialAttention as SpatialAttention
from regard.nn.image.channels import SqueezeExcitation as SqueezeExcitation
from regard.nn.image.non_local import NonLocalBlock as NonLocalBlock
from regard.nn.image.non_local import SelfAttention2d as SelfAttention2d
from regard.nn.kv_cache import KVCache as KVCache
from regard.nn.linear.attention import LinearAttention as LinearAttention
from regard.nn.linear.attention import linear_attention as linear_attention
from regard.nn.linear.fast_weights import FastWeights as FastWeights
from regard.nn.linear.fast_weights import fast_weights as fast_weights
from regard.nn.linear.recurrence import LinearState as LinearState
from regard.nn.linear.self_attention import LinearCache as LinearCache
from regard.nn.linear.self_attention import LinearSelfAttention as LinearSelfAttention
from regard.nn.memory.addressing import ContentAddressing as ContentAddressing
from regard.nn.memory.addressing import MemoryMaps as MemoryMaps
from regard.nn.memory.dnc import DifferentiableNeuralComputer as DifferentiableNeuralComputer
from regard.nn.memory.dnc import DNCReadHead as DNCReadHead
from regard.nn.memory.dnc import DNCState as DNCState
from regard.nn.memory.dnc import DNCWriteHead as DNCWriteHead
from regard.nn.memory.intra import IntraAttention as IntraAttention
from regard.nn.memory.intra import IntraState as IntraState
from regard.nn.memory.ntm import NeuralTuringMachine as NeuralTuringMachine
from regard.nn.memory.ntm import NTMReadHead as NTMReadHead
from regard.nn.memory.ntm import NTMState as NTMState
from regard.nn.memory.ntm import NTMWriteHead as NTMWriteHead
from regard.nn.positions.encodings import LearnedPositions as LearnedPositions
from regard.nn.positions.encodings import SinusoidalPositions as SinusoidalPositions
from regard.nn.positions.relative import AlibiBias as AlibiBias
from regard.nn.positions.relative import RelativeBias as RelativeBias
from regard.nn.positions.relative import RelativePositions as RelativePositions
from regard.nn.positions.rotary import Rotary as Rotary
from regard.nn.positions.rotary import RotaryScaling as RotaryScaling
from regard.nn.sets import ISAB as ISAB
from regard.nn.sets import MAB as MAB
from regard.nn.sets import PMA as PMA
from regard.nn.sets import SAB as SAB
from regard.nn.transformer import FeedForward as FeedForward
from regard.nn.transformer import Transformer as Transformer
from regard.nn.transformer import TransformerDecoder as TransformerDecoder
from regard.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
from regard.nn.transformer import TransformerEncoder as TransformerEncoder
from regard.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer

__all__ = [name for name, value in sorted(globals().items()) if name[0] != "_" and not _ismodule(value)]

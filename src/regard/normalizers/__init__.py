"""Normalizers: maps from scores to weights. Each is registered by name."""

from inspect import ismodule as _ismodule

from regard.normalizers.base import Normalizer as Normalizer
from regard.normalizers.base import NormalizerLike as NormalizerLike
from regard.normalizers.base import NormalizerName as NormalizerName
from regard.normalizers.base import Statistic as Statistic
from regard.normalizers.base import register as register
from regard.normalizers.elementwise import ReLU as ReLU
from regard.normalizers.elementwise import Sigmoid as Sigmoid
from regard.normalizers.entmax import Entmax as Entmax
from regard.normalizers.entmax import Entmax15 as Entmax15
from regard.normalizers.entmax import LearnedEntmax as LearnedEntmax
from regard.normalizers.entmax import Sparsemax as Sparsemax
from regard.normalizers.one_hot import Argmax as Argmax
from regard.normalizers.one_hot import Gumbel as Gumbel
from regard.normalizers.one_hot import Sampled as Sampled
from regard.normalizers.softmax import Cog as Cog
from regard.normalizers.softmax import ScalableSoftmax as ScalableSoftmax
from regard.normalizers.softmax import Softmax as Softmax
from regard.normalizers.softmax import SoftmaxSink as SoftmaxSink
from regard.normalizers.stick_breaking import StickBreaking as StickBreaking
from regard.normalizers.talking_heads import TalkingHeads as TalkingHeads

__all__ = [name for name, value in sorted(globals().items()) if name[0] != "_" and not _ismodule(value)]

"""Scores: functions of a query and a key that give a log-weight. Each is registered by name."""

from inspect import ismodule as _ismodule

from regard.scores.additive import Additive as Additive
from regard.scores.additive import Concat as Concat
from regard.scores.base import DotForm as DotForm
from regard.scores.base import Score as Score
from regard.scores.base import ScoreLike as ScoreLike
from regard.scores.base import ScoreModFunction as ScoreModFunction
from regard.scores.base import ScoreName as ScoreName
from regard.scores.base import register as register
from regard.scores.dot_products import Cosine as Cosine
from regard.scores.dot_products import Dot as Dot
from regard.scores.dot_products import General as General
from regard.scores.dot_products import ScaledDot as ScaledDot
from regard.scores.kernels import Boxcar as Boxcar
from regard.scores.kernels import Epanechnikov as Epanechnikov
from regard.scores.kernels import Gaussian as Gaussian
from regard.scores.kernels import Laplacian as Laplacian
from regard.scores.kernels import Triangular as Triangular
from regard.scores.score_mod import ScoreMod as ScoreMod
from regard.scores.without_keys import Constant as Constant
from regard.scores.without_keys import Location as Location

__all__ = [name for name, value in sorted(globals().items()) if name[0] != "_" and not _ismodule(value)]

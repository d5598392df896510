"""Scores: how a query and a key compare, as a log-weight. One class per file; each is registered by name."""

from inspect import ismodule as _ismodule

from regard.scores.additive import Additive as Additive
from regard.scores.base import DotForm as DotForm
from regard.scores.base import Score as Score
from regard.scores.base import ScoreLike as ScoreLike
from regard.scores.base import ScoreModFunction as ScoreModFunction
from regard.scores.base import ScoreName as ScoreName
from regard.scores.base import register as register
from regard.scores.boxcar import Boxcar as Boxcar
from regard.scores.concat import Concat as Concat
from regard.scores.constant import Constant as Constant
from regard.scores.cosine import Cosine as Cosine
from regard.scores.dot import Dot as Dot
from regard.scores.epanechikov import Epanechikov as Epanechikov
from regard.scores.gaussian import Gaussian as Gaussian
from regard.scores.general import General as General
from regard.scores.laplacian import Laplacian as Laplacian
from regard.scores.location import Location as Location
from regard.scores.scaled_dot import ScaledDot as ScaledDot
from regard.scores.score_mod import ScoreMod as ScoreMod
from regard.scores.triangular import Triangular as Triangular

__all__ = [name for name, value in globals().items() if name[0] != "_" and not _ismodule(value)]

"""Scores: how a query and a key compare, as a log-weight. One class per file; each is registered by name."""

from regard.scores.additive import Additive
from regard.scores.base import DotForm, Score, ScoreLike, ScoreModFunction, ScoreName, register
from regard.scores.boxcar import Boxcar
from regard.scores.concat import Concat
from regard.scores.constant import Constant
from regard.scores.cosine import Cosine
from regard.scores.dot import Dot
from regard.scores.epanechikov import Epanechikov
from regard.scores.gaussian import Gaussian
from regard.scores.general import General
from regard.scores.laplacian import Laplacian
from regard.scores.location import Location
from regard.scores.scaled_dot import ScaledDot
from regard.scores.score_mod import ScoreMod
from regard.scores.triangular import Triangular

__all__ = [
    "Additive",
    "Boxcar",
    "Concat",
    "Constant",
    "Cosine",
    "Dot",
    "DotForm",
    "Epanechikov",
    "Gaussian",
    "General",
    "Laplacian",
    "Location",
    "ScaledDot",
    "Score",
    "ScoreLike",
    "ScoreMod",
    "ScoreModFunction",
    "ScoreName",
    "Triangular",
    "register",
]

"""The engines that run on this machine's CPU: all but those for other devices."""

import torch

from regard import engines
from regard.engines.problem import Call, Problem

_plain = Problem.of(Call(*torch.zeros(3, 1, 1, 2, 2)))
HERE = [name for name, engine in engines.TABLE.items() if engine.why_not(_plain) is None]

"""Engines: implementations of attention, and the table of them."""

from collections.abc import Callable

from regard.engines.base import Cost, Engine, EngineLike, EngineName, EngineOutput
from regard.engines.flex import Flex
from regard.engines.fused.engine import Fused
from regard.engines.reference import Reference
from regard.engines.sdpa import Sdpa
from regard.engines.streaming import Streaming
from regard.engines.triton.engine import Triton

#: Every engine by name. ``auto`` chooses among these.
TABLE: dict[str, Engine] = {
    engine.name: engine for engine in (Sdpa(), Fused(), Triton(), Streaming(), Flex(), Reference())
}


_watchers: list[Callable[[], None]] = []


def register(engine: Engine) -> Engine:
    """Register an engine, so that ``engine="name"`` finds it and the conformance suite tests it."""
    TABLE[engine.name] = engine
    for watcher in _watchers:
        watcher()
    return engine


def on_change(function: Callable[[], None]) -> None:
    """Call a function whenever the table changes."""
    _watchers.append(function)


__all__ = [
    "Cost",
    "Engine",
    "EngineLike",
    "EngineName",
    "EngineOutput",
    "Flex",
    "Fused",
    "Reference",
    "Sdpa",
    "Streaming",
    "Triton",
    "register",
]

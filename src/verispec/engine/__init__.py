"""The engine: sequences, the scheduler, the policy and the loop. Pure Python and numpy, no I/O."""

from verispec.engine.engine import Engine
from verispec.engine.request import Request

__all__ = ["Engine", "Request"]

"""How a request is drafted and judged: one value, checked once, from the user's words to the turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verispec.errors import InputError
from verispec.spec.tree import TreeShape
from verispec.types import Accept

_KEYS = ("method", "tree", "accept")
_OTHER_NAMES = {"ngram": "suffix"}  # of drafters, as other engines call them
OFF = "none"
GRAMMAR = "grammar"  # drafts what a constraint forces
AUTO = "auto"  # the policy chooses among all drafters


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafter's name, the shape of its drafts (None: its own choice) and the rule that accepts them.

    Which names there are, and which can have trees or rules by probabilities, the engine knows.
    """

    method: str = OFF
    tree: TreeShape | None = None
    accept: Accept = Accept.MATCH

    @classmethod
    def of(cls, method: str, *, tree: str | None = None, accept: str = Accept.MATCH) -> Speculation:
        """Checked; every error names its field."""
        if not isinstance(method, str):
            raise InputError(f"method must be the name of a drafter, not {type(method).__name__}")
        if accept not in tuple(Accept):
            raise InputError(f"unknown accept {accept!r}; known: {', '.join(Accept)}")
        if tree is not None and not isinstance(tree, str):
            raise InputError(f"tree must be text such as chain:4, not {type(tree).__name__}")
        return cls(_OTHER_NAMES.get(method, method), None if tree is None else TreeShape.parse(tree), Accept(accept))

    @classmethod
    def parse(cls, value: Any, default: Speculation) -> Speculation:
        """From a request's `speculative`: False is off, None or True the default, a mapping says which.

        A mapping without a method keeps the default's; one that names a method leaves nothing of the default.
        """
        if value is None or value is True:
            return default
        if value is False:
            return cls(OFF)
        if not isinstance(value, Mapping):
            raise InputError(f"speculative must be false or a mapping, not {type(value).__name__}")
        unknown = sorted(set(map(str, value)) - set(_KEYS))
        if unknown:
            raise InputError(f"speculative has no {unknown[0]!r}; known: {', '.join(_KEYS)}")
        if "method" in value:
            return cls.of(value["method"], tree=value.get("tree"), accept=value.get("accept", Accept.MATCH))
        tree = value.get("tree", None if default.tree is None else str(default.tree))
        return cls.of(default.method, tree=tree, accept=value.get("accept", default.accept))

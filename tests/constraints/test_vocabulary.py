"""What the grammar library is told of a vocabulary changes how fast masks are, not what they allow."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.golden_tokenizers import SMALL
from verispec.constraints import Compiler, vocabulary
from verispec.types import SamplingParams

SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "string", "pattern": "^[a-z]{3,9}$"}]},
    "minItems": 5,
    "maxItems": 5,
}


def masks(kind: str, seed: int) -> list[bytes]:
    """Along a random answer."""
    wanted, rng = SamplingParams(schema=SCHEMA).constraint, np.random.default_rng(seed)
    assert wanted is not None
    place, found = Compiler(SMALL[kind], SMALL[kind].vocab_size).compile(wanted).start(()), []
    while not place.is_exhausted:
        found.append(place.allowed.tobytes())
        allowed = np.flatnonzero(np.unpackbits(place.allowed.view(np.uint8), bitorder="little"))
        place = place.committed(int(rng.choice(allowed)))
    return found


@pytest.mark.parametrize("kind", SMALL)
def test_slices_of_the_vocabulary_change_no_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [masks(kind, seed) for seed in range(5)]
    monkeypatch.setattr(vocabulary, "_SLICES", [])
    assert [masks(kind, seed) for seed in range(5)] == found

"""The search for forms of draft products, by times that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from bench.draft_forms import SPANS, Trial, fits, products, searched, variants
from verispec.backends.cuda.product_forms import MAX_BLOCK_NBYTES
from verispec.backends.cuda.shapes import SPAN, TILE, Shapes

QWEN = Shapes(1536, 12, 2, 128, 8960, 151936, 1e-6)
LLAMA = Shapes(4096, 32, 8, 128, 14336, 128256, 1e-5)


def start_of(shapes: Shapes, rows: int = 1, bits: int = 4) -> Trial:
    return Trial({p: p.by_the_rule(rows, 132) for p in products(shapes, bits).values()}, SPAN)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("shapes", [QWEN, LLAMA], ids=["1.5b", "8b"])
def test_forms_that_are_tried_can_run(shapes: Shapes, rows: int, bits: int) -> None:
    """Their blocks have room on an SM, all columns have a warp, and each part is varied."""
    for product, form in start_of(shapes, rows, bits).forms.items():
        assert fits(form, product, rows)
        parts = variants(form, product, rows)
        for part in parts:
            assert len({*part, form}) > 1
        for each in (each for part in parts for each in part):
            chunks = -(-(product.w[1] // TILE) // each.warps)
            assert each.warps * chunks * TILE >= product.w[1]
            assert chunks % each.step == 0
            assert each.stages >= 2
            assert each.per_sm * each.shared < MAX_BLOCK_NBYTES


def test_the_quickest_pass_is_found() -> None:
    """Where every part of a form has a time of its own, varying one after the other suffices."""
    names = products(QWEN)
    down = names["down"]

    def timed(trials: Sequence[Trial]) -> list[float]:
        return [
            100.0 + SPANS.index(trial.span) + (trial.forms[down].enders != 2) + (not trial.forms[down].late)
            + abs(trial.forms[down].warps - 14) for trial in trials
        ]  # fmt: skip

    best, tried = searched(start_of(QWEN), names, 1, timed)
    found = best.forms[down]
    assert (best.span, found.enders, found.late, found.warps, best.time_us) == (64, 2, 1, 14, 100.0)
    assert len({(trial.span, *trial.forms.values()) for trial in tried}) > 50
    others = {name: best.forms[product] for name, product in names.items() if name != "down"}
    assert others == {name: start_of(QWEN).forms[names[name]] for name in others}, "equally quick ones stay"

"""What tuning is tested on: a tiny model whose layers matter more or less, and a clock that charges for passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.faulty_backends import WrappedBackend
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.cost import CostTable
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NumpyOptions
from verispec.backends.protocol import Backend, Pass, Ticket, View
from verispec.spec.skip_menu import MenuKey, SkipProfile
from verispec.tuning import Subject

NUM_LAYERS = 6
CONFIG = TinyConfig(num_layers=NUM_LAYERS, hidden_size=32, num_heads=2, num_kv_heads=1, mlp_size=48, context_len=128)
FAMILY = (16,)
KEY = MenuKey("a model", {"kernels": "1"}, {"cpu": "2"})
# Seconds of the parts of a pass; rows and context tokens count as well.
FIXED, HEAD, ATTENTION, MLP = 0.5, 0.25, 0.1, 0.2


def tiny_backend(*, config: TinyConfig = CONFIG, nan_in: str = "", **sizes: int) -> NumpyBackend:
    """A model whose inner layers change little, each by another amount, so that views agree with it to some extent."""
    tensors = make_tensors(config)
    for layer in range(1, config.num_layers - 1):
        tensors[f"layers.{layer}.o"] *= np.float32(0.05 + 0.12 * (layer * 7 % 5))
        tensors[f"layers.{layer}.down"] *= np.float32(0.05 + 0.12 * (layer * 3 % 5))
    if nan_in:
        tensors[nan_in][:] = np.nan
    limits = {"num_slots": 400, "num_seq_rows": 8, "threads": 1, **sizes}
    return NumpyBackend([LoadedModel(config.architecture, tensors.__getitem__)], NumpyOptions(**limits))  # type: ignore[arg-type]


def prompts(seed: int, count: int = 4) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, CONFIG.vocab_size, 5 + 3 * i).tolist() for i in range(count)]


class ChargingBackend(WrappedBackend):
    """Keeps a clock, `now`, that every pass puts forward by what the pass is charged."""

    shapes = (1, 4, 16, 32)

    def __init__(self, inner: Backend, num_layers: int = NUM_LAYERS, *, factor: float = 1.0) -> None:
        super().__init__(inner)
        self.num_layers = num_layers
        self.factor = factor
        self.now = 0.0
        self.passes: list[Pass] = []

    def clock(self) -> float:
        return self.now

    def device(self) -> dict[str, str]:
        return {}

    def submit(self, pass_: Pass) -> Ticket:
        self.passes.append(pass_)
        context_tokens = int((pass_.rows.positions + 1).sum())
        self.now += self.factor * charge(
            len(pass_.rows), context_tokens, self.num_layers, view=pass_.view, head=pass_.wanted.draw is not None
        )
        return self.inner.submit(pass_)


def charge(rows: int, context_tokens: int, num_layers: int, *, view: View, head: bool = True) -> float:
    attention = ATTENTION * (1 + 0.2 * rows) + 0.001 * context_tokens
    mlp = MLP * (1 + 0.1 * rows)
    return (
        FIXED * (1 + 0.01 * rows)
        + (HEAD * rows if head else 0.0)
        + (num_layers - len(view.skipped_attention)) * attention
        + (num_layers - len(view.skipped_mlp)) * mlp
    )


def calibrated(shapes: Sequence[int] = ChargingBackend.shapes, *, speed: float = 1.0) -> CostTable:
    """What calibration would have made of the charges, on a machine that is so many times slower."""
    base = [speed * charge(m, 0, NUM_LAYERS, view=View()) for m in shapes]
    return CostTable(tuple(shapes), tuple(base), tuple(speed * 0.001 * NUM_LAYERS for _ in shapes))


def subject(backend: Backend | None = None, config: TinyConfig = CONFIG) -> Subject:
    return Subject(
        backend=backend or ChargingBackend(tiny_backend(config=config), config.num_layers),
        architecture=config.architecture,
        cost=calibrated(),
        family=FAMILY,
        search_prompts=prompts(1),
        report_prompts=prompts(2),
        eos_ids=(0,),
    )


def cheap_verification(num_layers: int = NUM_LAYERS) -> SkipProfile:
    """A device on which a pass of several rows costs little more than one of a single row: drafts can pay."""
    shapes, ones = (1, 16), (1.0, 1.0)
    full = CostTable(shapes, (1.0, 1.1), (0.0, 0.0))
    each = 0.9 / (3 * num_layers)  # an MLP costs twice an attention, the rest a tenth of a pass
    attention, mlp = (CostTable(shapes, tuple(each * n * x for x in ones), (0.0, 0.0)) for n in (1, 2))
    return SkipProfile(full, attention, mlp)

"""Tiny real models on a backend, engines that come and go on it, requests of every kind: what oracles compare on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from tests.support.skipping import fake_setup
from tests.support.tiny_models import TinyConfig, make_tensors
from verispec.backends.audit import audit
from verispec.backends.cost import FLAT_COST, CostTable
from verispec.backends.native_backend import NativeBackend
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NativeOptions, NumpyOptions
from verispec.backends.protocol import Backend
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.kv import TARGET_STORE
from verispec.model.architecture import expected_tensors
from verispec.spec.drafter import Drafter
from verispec.spec.registry import make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SampleOutput, SamplingParams

VOCAB = 80
NUM_SLOTS = 700


@dataclass
class World:
    """A backend with its family: engines come and go on it, so its K/V is full of other engines' remains."""

    backend: NumpyBackend | NativeBackend
    family: tuple[int, ...]
    _alone: dict[str, list[SampleOutput]] = field(default_factory=dict)

    def engine(
        self,
        drafters: Mapping[str, Drafter] | None = None,
        *,
        backend: Backend | None = None,
        family: tuple[int, ...] = (),
        cost: CostTable = FLAT_COST,
        **config: int | bool,
    ) -> Engine:
        """`family` may be a part of the audited one: it gives the same bits."""
        assert set(family) <= set(self.family)
        options = {"num_slots": NUM_SLOTS, "row_budget": 64, **config}
        return Engine(
            backend or self.backend,
            family=family or self.family,
            drafters=drafters or make_drafters(fake_setup(backend or self.backend)),
            config=EngineConfig(**options),  # type: ignore[arg-type]
            cost=cost,
        )

    def alone(self, request: Request) -> list[SampleOutput]:
        """What it gives by itself, in a fresh engine; many tests ask for the same requests."""
        plain = replace(request, speculation=Speculation("none", tree=None))
        if (key := repr(plain)) not in self._alone:
            self._alone[key] = run(self.engine(), [plain])[0]
        return self._alone[key]


def sharpened(config: TinyConfig) -> dict[str, np.ndarray]:
    """Weights whose head is sharper than random ones are, so that text repeats itself."""
    tensors = {name: np.array(values) for name, values in make_tensors(config).items()}
    head = "embed" if config.tied_head else "head"
    tensors[head] = tensors[head] * np.float32(3)
    return tensors


class Second(Enum):
    """The model in the second store."""

    NONE = "none"
    OTHER = "other"  # the target without its last layer, weights changed a little: right now and then
    SAME = "same"  # the target itself


Weights = tuple[TinyConfig, dict[str, np.ndarray]]


def models(family: str, draft: Second) -> list[Weights]:
    """The target, and the draft model if there is one."""
    config = TinyConfig(family=family, num_layers=3, context_len=400, seed=11)
    target = sharpened(config)
    if draft is Second.NONE:
        return [(config, target)]
    if draft is Second.SAME:
        return [(config, target), (config, target)]
    smaller, rng = replace(config, num_layers=2), np.random.default_rng(12)
    names = expected_tensors(smaller.architecture)
    changed = {n: target[n] * (1 + 0.05 * rng.standard_normal(target[n].shape)).astype(np.float32) for n in names}
    return [(config, target), (smaller, changed)]


def numpy_world(family: str, draft: Second = Second.NONE) -> World:
    loaded = [LoadedModel(config.architecture, tensors.__getitem__) for config, tensors in models(family, draft)]
    backend = NumpyBackend(loaded, NumpyOptions(num_slots=NUM_SLOTS, num_seq_rows=32))
    return World(backend, audit(backend.probes(), shapes=(1, 4, 8, 16, 64)).choose())


def native_world(family: str, draft: Second = Second.NONE) -> World:
    stored = [LoadedModel(config.architecture, tensors.__getitem__) for config, tensors in models(family, draft)]
    backend = NativeBackend(stored, NativeOptions(num_slots=NUM_SLOTS, num_seq_rows=32, threads=1))
    return World(backend, (1, 2, 3, 4, 6, 8, 12, 16, 32, 64))


def kv_bits(backend: Backend, slots: Sequence[int], store: int = TARGET_STORE) -> bytes:
    """The K/V of some slots."""
    k, v = backend.kv(store, np.array(slots, np.int64))  # type: ignore[attr-defined]
    return bytes(np.ascontiguousarray(k).tobytes() + np.ascontiguousarray(v).tobytes())


VICTIM = Request([1, 2, 3] * 20, SamplingParams(max_tokens=50))


def run(
    engine: Engine, requests: Iterable[Request], *, abort_every: int = 0, victim: Request = VICTIM
) -> list[list[SampleOutput]]:
    """All requests to their end; with `abort_every`, a further request is aborted every so many steps."""
    ids = [engine.add(request) for request in requests]
    outputs: dict[int, list[SampleOutput]] = {i: [] for i in ids}
    victims: list[int] = []
    steps = 0
    while engine.has_work:
        if abort_every and steps % abort_every == 0 and steps < 60:
            victims.append(engine.add(replace(victim, params=replace(victim.params, seed=steps))))
        for event in engine.step():
            if event.output is not None and event.request_id in outputs:
                outputs[event.request_id].append(event.output)
        engine.check()
        steps += 1
        if abort_every and steps % abort_every == 2 and victims:
            engine.abort(victims.pop())
    return [sorted(outputs[i], key=lambda o: o.sample_index) for i in ids]


def bits(outputs: list[SampleOutput]) -> list[object]:
    return [(o.digest, o.token_ids, o.logprobs, o.prompt_logprobs, o.finish_reason) for o in outputs]


def make_requests(count: int, *, seed: int = 0, drafter: str | None = None) -> list[Request]:
    """A mix of prompts (some sharing prefixes, some longer than a chunk) and of every sampling parameter."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 70).tolist()
    requests = []
    for i in range(count):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        prompt = (shared[: int(rng.integers(10, 70))] if i % 2 else []) + own
        extras: dict[str, object] = [
            {},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.8, "min_tokens": 5, "stop_ids": (3, 9)},
            {"temperature": 1.0, "top_k": 5, "n": 3},
            {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logprobs": 3},
            {"prompt_logprobs": 2, "logit_bias": ((5, 2.0),), "logprobs": 0},
            {"temperature": 1.5, "min_p": 0.05, "n": 2, "logprobs": 2},
        ][i % 7]
        params = SamplingParams(max_tokens=int(rng.integers(6, 40)) if i else 1, seed=int(i // 2), **extras)  # type: ignore[arg-type]
        requests.append(Request(prompt, params, Speculation(drafter) if drafter else None, eos_ids=(0,)))
    return requests

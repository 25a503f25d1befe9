"""Bits of the native backend, committed: every build on every machine must give these digests for these requests.

`make native-digests` writes them, and the answers of the test at load, again: right only when the
arithmetic was given another number.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.native import ISAS, on
from verispec.backends import native_answers
from verispec.backends.native_backend import NativeBackend
from verispec.backends.options import LoadedModel, NativeOptions
from verispec.config import EngineConfig
from verispec.engine import Engine, Request
from verispec.model import hub, open_checkpoint
from verispec.model.load import load_tokenizer
from verispec.sampling.weights import SAMPLING
from verispec.spec.registry import make_drafters
from verispec.types import SampleOutput, SamplingParams

GOLDEN = Path(__file__).parents[1] / "goldens" / "native_digests.json"
NUM_TOKENS = 16
VERSIONS = {"arithmetic": NativeOptions.SERVES["arithmetic"][0], "sampling": SAMPLING}
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3,",
)
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 2**63 + 5},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 7},
)


def digests(path: Path, *, isa: str, threads: int, kv_dtype: str, is_quick: bool = False) -> dict[str, str]:
    """The digest of every prompt with every set of parameters, all as one batch; each of them once, if quick."""
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        model = LoadedModel(checkpoint.architecture, checkpoint.tensor, checkpoint.stored)
        backend = NativeBackend(
            [model], NativeOptions(num_slots=1024, num_seq_rows=32, isa=isa, threads=threads, kv_dtype=kv_dtype)
        )
    engine = Engine(backend, family=backend.shapes, drafters=make_drafters(), config=EngineConfig(num_slots=1024))
    names: dict[int, str] = {}
    for (i, prompt), (j, options) in itertools.product(enumerate(PROMPTS), enumerate(PARAMETERS)):
        if is_quick and i != j:
            continue
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)
        names[engine.add(Request(tokenizer.encode(prompt), params))] = f"prompt {i}, parameters {j}, K/V {kv_dtype}"
    outputs: dict[str, SampleOutput] = {}
    while engine.has_work:
        outputs |= {names[e.request_id]: e.output for e in engine.step() if e.output is not None}
    backend.close()
    return {name: outputs[name].digest for name in sorted(outputs)}


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + i % 2) for i, isa in enumerate(ISAS)])
def test_the_committed_digests_come_out(smollm2_path: Path, isa: str, threads: int, kv_dtype: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: golden[name] for name in VERSIONS} == VERSIONS, "a version was raised: make the digests again"
    expected = {name: digest for name, digest in golden["digests"].items() if name.endswith(kv_dtype)}
    assert len(expected) == len(PROMPTS) * len(PARAMETERS)
    is_quick = isa == "portable"  # it is eight times as slow as the others
    found = digests(smollm2_path, isa=isa, threads=threads, kv_dtype=kv_dtype, is_quick=is_quick)
    assert len(found) == (len(PROMPTS) if is_quick else len(expected))
    assert found == {name: expected[name] for name in found}


def test_the_digests_tell_requests_apart() -> None:
    """But for counting on from 1, 2, 3, where sampling says what greedy says."""
    found = json.loads(GOLDEN.read_text())["digests"]
    assert len(set(found.values())) == len(found) - 2


def main() -> None:
    path = hub.cache_dir() / hub.REGISTRY["smollm2-135m"].file_name
    found: dict[str, str] = {}
    for kv_dtype in ("float16", "float32"):
        found |= digests(path, isa="portable", threads=1, kv_dtype=kv_dtype)
    table = {"model": path.name, **VERSIONS, "digests": found}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")
    answers = {
        case.name: native_answers.answer(case, on("portable", 1))
        for kv_dtype in NativeOptions.SERVES["kv_dtype"]
        for case in native_answers.cases(kv_dtype)
    }
    native_answers.PATH.write_text(json.dumps({**VERSIONS, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main()

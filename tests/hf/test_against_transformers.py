"""verispec against the real libraries: fresh random models of every family, saved by transformers and loaded by us.

Run by `make test-hf`, in an environment with torch, transformers and array-api-compat. They are imported inside
fixtures, so that collecting this file needs none of them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.passes import Tape
from tests.support.sampling_rows import History, SamplingRowsBuilder
from tests.support.skipping import skip_setup
from verispec.backends.audit import audit
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NumpyOptions
from verispec.engine import Engine, Request
from verispec.model import open_checkpoint
from verispec.model.architecture import Architecture, Llama3Scaling, inverse_frequencies
from verispec.sampling import draw, noise
from verispec.sampling.rows import SampleKey
from verispec.spec.registry import DRAFTERS, make_drafters
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

pytestmark = pytest.mark.hf

# As in tests/backends/test_logits_golden.py; models are larger here and logits reach further, so errors do too.
TOLERANCE = 2e-4
TIE = 1e-4  # greedy outputs may part only where transformers' own top two logits are this close
NUM_PROMPT, NUM_NEW = 50, 32

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 33}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 40}),
    "qwen3-tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 20, "sliding_window": 17, "query_pre_attn_scalar": 30, "tie_word_embeddings": True},
    ),
}
# Per seed: hidden size, MLP size, layers, heads, K/V heads; and how transformers saves the model.
SIZES = {11: (48, 80, 2, 6, 2), 12: (96, 200, 4, 4, 4), 13: (160, 288, 3, 10, 1)}
SIZE_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHARDED, BFLOAT16 = 12, 13


class Pair(NamedTuple):
    """One model on both sides."""

    theirs: Any
    ours: NumpyBackend
    architecture: Architecture
    prompt_ids: list[int]


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    torch.set_num_threads(2)
    return torch


@pytest.fixture(
    scope="module", params=[(case, seed) for case in CASES for seed in SIZES], ids=lambda p: f"{p[0]}-{p[1]}"
)
def pair(request: pytest.FixtureRequest, torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import transformers

    case, seed = request.param
    folder = tmp_path_factory.mktemp(f"{case}-{seed}")
    family, changes = CASES[case]
    options = dict(zip(SIZE_NAMES, SIZES[seed], strict=True))
    options |= {"vocab_size": 300 + seed, "max_position_embeddings": 128, "tie_word_embeddings": False}
    if family == "Gemma3":  # windows and full attention in turn, however few layers there are
        kinds = ["sliding_attention", "full_attention"] * options["num_hidden_layers"]
        options["layer_types"] = kinds[: options["num_hidden_layers"]]
    class_ = getattr(transformers, f"{family}ForCausalLM")
    model = class_(class_.config_class(**{**options, **changes}))
    randomise(torch, model, seed)
    if seed == BFLOAT16:
        model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB" if seed == SHARDED else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (seed == SHARDED)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Pair(theirs.eval(), *load(folder), np.random.default_rng(seed).integers(0, 300, NUM_PROMPT).tolist())


def load(folder: Path) -> tuple[NumpyBackend, Architecture]:
    with open_checkpoint(folder) as checkpoint:
        model = LoadedModel(checkpoint.architecture, checkpoint.tensor)
        return NumpyBackend([model], NumpyOptions(num_slots=256, num_seq_rows=4)), checkpoint.architecture


def randomise(torch: Any, model: Any, seed: int) -> None:
    """Weights with which nothing is flat: transformers' own start would make every layer nearly the identity."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape)
            if "norm" in name:
                parameter.copy_(0.2 * random if "Gemma" in type(model).__name__ else 1 + 0.2 * random)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * random)
            else:
                gain = 4.0 if "lm_head" in name else 1.2 if "q_proj" in name or "k_proj" in name else 1.0
                scale = 0.5 if "embed" in name else gain / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * random)


def test_logits(pair: Pair, torch: Any) -> None:
    with torch.no_grad():
        logits = pair.theirs(torch.tensor([pair.prompt_ids])).logits[0]
    wanted = torch.log_softmax(logits.double(), dim=-1).numpy()
    tape = Tape(pair.ours, seq_row=1, first_slot=0)
    found = [tape.feed(pair.prompt_ids[i : i + 8], shape=8) for i in range(0, NUM_PROMPT, 8)]
    error = np.abs(np.concatenate(found) - wanted).max()
    print(f"{error:.1e}")
    assert error < TOLERANCE


def test_greedy_tokens(pair: Pair, torch: Any) -> None:
    theirs = pair.theirs.generate(
        torch.tensor([pair.prompt_ids]),
        attention_mask=torch.ones(1, NUM_PROMPT, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    wanted = theirs.sequences[0, NUM_PROMPT:].tolist()
    family = audit(pair.ours.probes(), shapes=(4, 8, 16)).choose()
    engine = Engine(pair.ours, family=family, drafters=make_drafters(skip_setup(pair.ours)))
    for name in DRAFTERS:
        engine.add(Request(pair.prompt_ids, SamplingParams(max_tokens=NUM_NEW), speculation=Speculation(name)))
    outputs = []
    while engine.has_work:
        outputs += [event.output for event in engine.step() if event.output is not None]
    assert len(outputs) == len(DRAFTERS)
    for output in outputs:
        found = list(output.token_ids)
        assert len(found) == len(wanted) == NUM_NEW
        if found != wanted:
            first = next(i for i in range(NUM_NEW) if found[i] != wanted[i])
            best, second = theirs.logits[first][0].topk(2).values.tolist()
            assert best - second < TIE, f"they part at {first}: {found[first]} and {wanted[first]}"


def test_rotary_frequencies(pair: Pair) -> None:
    assert_same_frequencies(pair.architecture, pair.theirs)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    ],
    ids=str,
)
def test_rotary_frequencies_of_real_sizes(rope: dict[str, Any], head_dim: int, torch: Any, tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, intermediate_size=8, num_hidden_layers=1, vocab_size=8,
        max_position_embeddings=131072, rope_parameters=dict(rope),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same_frequencies(checkpoint.architecture, model)


def assert_same_frequencies(arch: Architecture, model: Any) -> None:
    """Within 2 ulp, because torch's pow is not correctly rounded and ours is.

    The blend of Llama 3 subtracts nearly equal numbers and then weighs the rest `factor` times as much, so that what
    torch rounds differently (it divides by multiplying with the reciprocal) grows to some ten ulp.
    """
    theirs = model.model.rotary_emb
    for spec in arch.layers:
        kind = "full_attention" if spec.window is None else "sliding_attention"
        wanted = getattr(theirs, f"{kind}_inv_freq" if arch.family == "gemma3" else "inv_freq")
        rtol = 5e-6 if isinstance(spec.rope.scaling, Llama3Scaling) else 2.0**-22
        np.testing.assert_allclose(inverse_frequencies(spec.rope, arch.head_dim), wanted.numpy(), rtol=rtol, atol=0)


def test_noise_on_torch(torch: Any) -> None:
    import array_api_compat.torch as xp

    for seed, t, sample_index in ((0, 0, 0), (12345678901234567890, 77, 3), (2**64 - 1, 2**20, 1023)):
        low, high = noise.split_seed(seed)
        key = {"seed_low": low, "seed_high": high, "t": t, "sample_index": sample_index}
        wanted = noise.vocabulary_words(np, 49157, **key)
        found = noise.vocabulary_words(xp, 49157, **key)
        assert (found.numpy() == wanted).all()
        gumbel = noise.gumbel_f32(xp, found).numpy()
        assert gumbel.tobytes() == noise.gumbel_f32(np, wanted).tobytes()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
        SamplingParams(temperature=1.3, min_p=0.05),
        SamplingParams(temperature=0.8, min_tokens=9, logit_bias=((3, 5.0), (17, -5.0))),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    ],
    ids=str,
)
def test_draw_on_torch(params: SamplingParams, torch: Any) -> None:
    import array_api_compat.torch as xp

    logits = 3 * np.random.default_rng(5).standard_normal((64, 1000), dtype=np.float32)
    builder = SamplingRowsBuilder()
    history = History(frozenset(range(0, 1000, 7)), {5: 1, 9: 3, 400: 2}, 6)
    for t in range(64):
        builder.add(
            params, SampleKey(2**63 + t, 1), t=t, history=history, path_ids=(8, 9), stopping_ids=(2,), vocab_size=1000
        )
    rows = builder.build()
    sparse = ("penalty_rows", "penalty_ids", "repetition", "penalty", "bias_rows", "bias_ids", "bias")
    there = {name: torch.from_numpy(getattr(rows, name)) for name in sparse}  # the rest is read number by number
    wanted = draw.draw(np, logits, rows)
    found = draw.draw(xp, torch.from_numpy(logits), dataclasses.replace(rows, **there))
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.logprobs.numpy().tobytes() == wanted.logprobs.tobytes()

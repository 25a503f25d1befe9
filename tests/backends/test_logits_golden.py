"""Our logits are those of Hugging Face transformers, for every family; without torch, from goldens.

The folder under test has the config.json and the tensor names that transformers wrote; the weights come from the
recipe the goldens were made with. Log-probabilities are compared, not logits: it is all a backend gives away.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.goldens.make_logit_goldens import CASES, FOLDER, positions, weights
from tests.support.passes import Tape
from tests.support.tiny_models import TinyConfig, hf_name, permute_rows, write_gguf, write_safetensors
from verispec.backends.numpy_backend import NumpyBackend
from verispec.backends.options import LoadedModel, NumpyOptions
from verispec.model import open_checkpoint
from verispec.model.architecture import Architecture, FrequencyFactors, Llama3Scaling, expected_tensors

# Two float32 implementations that add in different orders. transformers itself is up to 2.7e-5 away from its own
# float64 run on these models (each golden says how far), and we were up to 3.6e-5 away from transformers; the rest is
# room for other BLAS kernels. The smallest mistake below, a wrong epsilon, is off by 0.1; the others by 6 and more.
TOLERANCE = 1e-4
MISTAKE = 1e-2

Tensors = dict[str, npt.NDArray[np.float32]]  # by transformers' names
Change = Callable[[dict[str, Any], Tensors], None]  # of config.json and weights, in place
SHAPES = (16, 5)  # rows of a pass: whole tiles, and passes that end in the middle of everything


def golden(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{case}.json").read_text())
    return found


def golden_logprobs(case: str) -> npt.NDArray[np.float64]:
    logits = np.load(FOLDER / f"{case}.npz")["logits"].astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def golden_tensors(case: str) -> Tensors:
    return {name: weights(case, name, shape) for name, shape in golden(case)["tensors"].items()}


def write_golden_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(folder / "model.safetensors", [(name, "F32", values) for name, values in tensors.items()])


def logprobs(path: Path, case: str, *, shape: int = 16) -> npt.NDArray[np.float32]:
    """Log-probabilities at the kept positions of both inputs, through the real loader and canonical passes."""
    with open_checkpoint(path) as checkpoint:
        model = LoadedModel(checkpoint.architecture, checkpoint.tensor)
        backend = NumpyBackend([model], NumpyOptions(num_slots=512, num_seq_rows=2))
    found = []
    for i, (ids, kept) in enumerate(zip(golden(case)["inputs"], positions(), strict=True)):
        tape = Tape(backend, seq_row=1 + i, first_slot=256 * i)
        rows = [tape.feed(ids[start : start + shape], shape=shape) for start in range(0, len(ids), shape)]
        found.append(np.concatenate(rows)[kept])
    return np.concatenate(found)


def error(path: Path, case: str, *, shape: int = 16) -> float:
    return float(np.abs(logprobs(path, case, shape=shape) - golden_logprobs(case)).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_logits_of_transformers(
    case: str, shape: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    write_golden_folder(tmp_path, golden(case)["config"], golden_tensors(case))
    found = error(tmp_path, case, shape=shape)
    record_property("max_logprob_error", found)
    assert found < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_gguf_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    write_golden_folder(tmp_path, golden(case)["config"], tensors := golden_tensors(case))
    with open_checkpoint(tmp_path) as checkpoint:
        arch = checkpoint.architecture
    ours = {name: tensors[hf_name(name, arch.family)] for name in expected_tensors(arch)}
    if arch.family == "gemma3":  # the converter adds the 1
        ours = {name: values + np.float32(name.endswith("norm")) for name, values in ours.items()}
    write_gguf(tmp_path / "model.gguf", tiny_config(arch), ours, type_name="F32")
    assert error(tmp_path / "model.gguf", case) < TOLERANCE


def tiny_config(arch: Architecture) -> TinyConfig:
    fields = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
    fields += ("vocab_size", "context_len", "norm_eps", "tied_head")
    local, full = arch.layers[0], arch.layers[-1]
    scaling = full.rope.scaling
    if isinstance(scaling, Llama3Scaling):
        scaling = FrequencyFactors(tuple(llama3_factors(full.rope.theta, arch.head_dim, scaling)))
    windows = {"window": local.window, "local_theta": local.rope.theta, "pattern": arch.num_layers // 2}
    changes = windows if arch.family == "gemma3" else {}
    return TinyConfig(**{f: getattr(arch, f) for f in fields}, theta=full.rope.theta, scaling=scaling, **changes)


def llama3_factors(theta: float, head_dim: int, scaling: Llama3Scaling) -> list[float]:
    """What llama.cpp's converter writes as rope_freqs.weight."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        turns = scaling.original_context_len / wavelength  # over the context the model was first trained on
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return factors


def other_rope(**changes: Any) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["rope_parameters"].update(changes)

    return change


def other_layer_rope(kind: str, **changes: Any) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config["rope_parameters"][kind].update(changes)

    return change


def other_tensors(part: str, edit: Callable[[npt.NDArray[np.float32]], Any]) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        names = [name for name in tensors if part in name]
        assert names
        tensors.update({name: np.ascontiguousarray(edit(tensors[name])) for name in names})

    return change


def swap_gate_and_up(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if "gate_proj" in name]:
        up = name.replace("gate", "up")
        tensors[name], tensors[up] = tensors[up], tensors[name]


MISTAKES: dict[str, tuple[str, Change]] = {
    "theta": ("llama-tied", other_rope(rope_theta=1.1e4)),
    "no llama3 scaling": ("llama-llama3-rope", other_rope(rope_type="default")),
    "llama3 blend": ("llama-llama3-rope", other_rope(high_freq_factor=3.0)),
    "no linear scaling": ("llama-linear-rope", other_rope(rope_type="default")),
    "gguf order of q": ("mistral", other_tensors("q_proj", lambda q: permute_rows(q, 4))),
    "heads regrouped": ("mistral", other_tensors("k_proj", lambda k: np.roll(k, 32, axis=0))),
    "no q bias": ("qwen2", other_tensors("q_proj.bias", np.zeros_like)),
    "no v bias": ("qwen2", other_tensors("v_proj.bias", np.zeros_like)),
    "no q norm": ("qwen3", other_tensors("q_norm", np.ones_like)),
    "no k norm": ("qwen3", other_tensors("k_norm", np.ones_like)),
    "gate and up swapped": ("qwen3", swap_gate_and_up),
    "no window": ("gemma3", lambda config, tensors: config.update(sliding_window=256)),
    "a window of one more": ("gemma3", lambda config, tensors: config.update(sliding_window=25)),
    "windows elsewhere": ("gemma3", lambda config, tensors: config["layer_types"].reverse()),
    "one base for all layers": ("gemma3", other_layer_rope("sliding_attention", rope_theta=1e6)),
    "scaling in windows too": ("gemma3", other_layer_rope("sliding_attention", rope_type="linear", factor=4.0)),
    "no scaling": ("gemma3", other_layer_rope("full_attention", rope_type="default")),
    "query scalar": ("gemma3", lambda config, tensors: config.update(query_pre_attn_scalar=18)),
    "norms without their 1": ("gemma3", other_tensors("input_layernorm", lambda w: w - 1)),
    "plain norm behind attention": ("gemma3", other_tensors("post_attention_layernorm", np.zeros_like)),
    "plain norm behind the MLP": ("gemma3", other_tensors("post_feedforward_layernorm", np.zeros_like)),
    "norm_eps": ("qwen3", lambda config, tensors: config.update(rms_norm_eps=1e-3)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_seen(mistake: str, tmp_path: Path) -> None:
    case, change = MISTAKES[mistake]
    config, tensors = golden(case)["config"], golden_tensors(case)
    change(config, tensors)
    write_golden_folder(tmp_path, config, tensors)
    found = error(tmp_path, case)
    assert found > MISTAKE, found

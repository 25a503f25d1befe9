"""Makes the logits that tests/backends/test_logits_golden.py compares with, from tiny models in transformers.

    python tests/goldens/make_logit_goldens.py [CASE ...]

Each model is saved by `save_pretrained`, loaded again and run in float32 with eager attention. Kept are config.json and
the names and shapes in the safetensors file as transformers wrote them, the inputs, and the logits. The weights are
not kept: `weights` makes the same bits from a seed on every machine. Torch and transformers are imported only where
they run, because the test imports the recipe of the weights from here and has neither.
"""

import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "logits"
SHORT_LEN, LONG_LEN = 40, 200
LONG_STRIDE = 10  # of the long input, every tenth position is kept

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Two windows before each layer that sees everything; the third kept position is already beyond a window.
_GEMMA = {
    "head_dim": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# Class of transformers and what differs from the sizes above. Names are file names, and seeds come from them.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "num_key_value_heads": 4},
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}, "rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_theta": 1e6}, "rms_norm_eps": 1e-6}),
    "gemma3": ("Gemma3", _GEMMA),
}


def weights(seed: str, name: str, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The values of a tensor, from raw bits of PCG64: unlike numpy's distributions, its stream will not change.

    Scaled so that attention is neither flat nor one-hot and the top logits stand apart. Every step is one IEEE
    operation, so the bits are the same everywhere.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    raw = np.random.PCG64(key).random_raw(math.prod(shape))
    uniform = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)  # [-1, 1), 24 bits
    values = uniform.reshape(shape)
    if "norm" in name:  # Gemma stores them without their 1
        return np.float32(not seed.startswith("gemma")) + np.float32(0.5) * values
    if name.endswith("bias"):
        return values
    gain = 4.0 if name.startswith("lm_head") else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
    return values * np.float32(0.75 if "embed" in name else gain * math.sqrt(3 / shape[-1]))


def inputs(seed: str) -> list[list[int]]:
    """A short and a long sequence of ids."""
    raw = np.random.PCG64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")).random_raw
    return [[int(x >> np.uint64(56)) for x in raw(length)] for length in (SHORT_LEN, LONG_LEN)]


def positions() -> list[npt.NDArray[np.int64]]:
    """Where logits are kept, per input."""
    return [np.arange(SHORT_LEN), np.arange(LONG_STRIDE - 1, LONG_LEN, LONG_STRIDE)]


def make(case: str) -> None:
    """Build, save, load again, run, and write the golden."""
    import torch
    import transformers

    family, changes = CASES[case]
    class_ = getattr(transformers, f"{family}ForCausalLM")
    made = class_(class_.config_class(**{"tie_word_embeddings": False, **_SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.from_numpy(weights(case, name, parameter.shape)))
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        config_json = json.loads((Path(folder) / "config.json").read_text())
        tensors = _tensor_shapes(Path(folder) / "model.safetensors")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    kept = [torch.from_numpy(p) for p in positions()]

    def run() -> npt.NDArray[np.generic]:
        with torch.no_grad():
            found = [model(torch.tensor([ids])).logits[0, p] for ids, p in zip(inputs(case), kept, strict=True)]
        return torch.cat(found).numpy()

    logits = run()
    model.double()
    noise = np.abs(_log_softmax(logits) - _log_softmax(run())).max()
    np.savez_compressed(FOLDER / f"{case}.npz", logits=logits)
    golden = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
        "max_logprob_difference_float32_to_float64": float(f"{noise:.2g}"),
        "config": config_json,
        "tensors": tensors,
        "inputs": inputs(case),
    }
    text = json.dumps(golden, indent=1, sort_keys=True)
    one_line = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    (FOLDER / f"{case}.json").write_text(one_line + "\n")
    top = np.sort(logits, axis=-1)
    gap = np.median(top[:, -1] - top[:, -2])
    print(f"{case}: std {logits.std():.1f}, median gap of the top two {gap:.2f}, float32 to float64 {noise:.1e}")


def _tensor_shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert all(entry["dtype"] == "F32" for name, entry in header.items() if name != "__metadata__")
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _log_softmax(logits: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def main() -> None:
    """Make the named goldens, or all."""
    import torch
    import transformers

    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    FOLDER.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        make(case)


if __name__ == "__main__":
    main()

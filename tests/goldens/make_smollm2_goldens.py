"""Makes what tests/backends/test_smollm2_golden.py compares with: 20 prompts through SmolLM2-135M in transformers.

    python tests/goldens/make_smollm2_goldens.py

Needs torch, transformers and accelerate. Independent of verispec but for finding the file: transformers itself reads
the GGUF file (its own tensor mapping and tokenizer, values by gguf.quants) and runs it in float32 with eager attention.
Each prompt is continued greedily by 64 tokens, past any end token; then prompt and continuation go through in one
forward, and what it says at the 64 positions is kept.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from verispec.model.hub import resolve

PATH = Path(__file__).parent / "smollm2.npz"
NUM_TOKENS = 64


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "Water boils at a lower temperature on a mountain because",
    chat("What is the difference between a virus and a bacterium?"),
    chat("Write a haiku about the sea."),
    "<|im_start|>system\nAnswer in one sentence.<|im_end|>\n" + chat("Why is the sky blue?"),
    chat("Translate to German: The train leaves at nine in the morning."),
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\nJOIN orders ON",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "Question: A box holds 12 eggs. How many eggs are in 7 boxes?\nAnswer: 12 x 7 =",
    "Theorem. The square root of 2 is irrational.\nProof. Suppose that",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Shopping list:\n1. Milk\n2. Bread\n3. Butter\n4.",
    "Il était une fois une petite fille qui",
    "Die wichtigsten Städte in Deutschland sind",
    "El agua es importante para la vida porque",
    "Москва является столицей",
    "She opened the letter, read it twice, and said: \"",
]  # fmt: skip


def main() -> None:
    """Make the golden."""
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    path = resolve("smollm2-135m")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    kept: dict[str, list[np.ndarray]] = {"continuation_ids": [], "argmax_ids": [], "top_gaps": []}
    kept |= {"argmax_logprobs": [], "continuation_logprobs": []}
    for ids in prompt_ids:
        continuation = greedy(model, ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + continuation])).logits[0, len(ids) - 1 : -1]  # [64, vocab]
        assert logits.dtype == torch.float32
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        best = logprobs.topk(2)
        kept["continuation_ids"].append(np.array(continuation, np.int32))
        kept["argmax_ids"].append(best.indices[:, 0].numpy().astype(np.int32))
        kept["top_gaps"].append((best.values[:, 0] - best.values[:, 1]).numpy().astype(np.float32))
        kept["argmax_logprobs"].append(best.values[:, 0].numpy().astype(np.float32))
        forced = logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        kept["continuation_logprobs"].append(forced.numpy().astype(np.float32))
        print(len(ids), repr(tokenizer.decode(continuation))[:100])
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention"
    header = {"made_by": made_by, "model": path.name, "prompts": PROMPTS, "prompt_ids": prompt_ids}
    arrays = {name: np.stack(rows) for name, rows in kept.items()}  # [20, 64]
    np.savez_compressed(PATH, header=np.array(json.dumps(header)), **arrays)
    close = int((arrays["top_gaps"] < 1e-3).sum())
    print(f"{arrays['top_gaps'].size} positions; the top two are within 1e-3 at {close}")


def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> list[int]:
    """The most likely continuation, end tokens included: a plain loop, so that no generation option changes it."""
    cache, new, out = None, list(ids), []
    with torch.no_grad():
        while len(out) < NUM_TOKENS:
            step = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, new = step.past_key_values, [int(step.logits[0, -1].argmax())]
            out += new
    return out


if __name__ == "__main__":
    main()

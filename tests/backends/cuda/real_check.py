"""Real weights on a GPU: how close the arithmetic is to float32, and whether prompt, chain and decode rows agree.

python -m tests.backends.cuda.real_check MODEL.gguf TEXT takes the first 8 x 512 tokens of a text. It fails if a row
differs, or if the mean KL from transformers in float32 is more than 1.1 times that of transformers in bf16. Needs
torch, transformers (for the reference) and the package.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tests.backends.cuda.device_check import decode_rows, device_inputs
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, ALL_MANY, Forms, undivided_products
from verispec.backends.cuda.shapes import SPAN, Shapes, positions_of
from verispec.model import open_checkpoint
from verispec.model.architecture import expected_tensors
from verispec.model.load import load_tokenizer
from verispec.model.tokenizer import Tokenizer

NUM_TEXTS, LENGTH = 8, 512
MOST = 1.1  # times the divergence of transformers in bf16


class Divergence(NamedTuple):
    """From the reference: the mean KL, and the share of rows with the same argmax."""

    kl: float
    same: float


def texts_of(tokenizer: Tokenizer, path: Path) -> np.ndarray:
    """The first tokens of a file. [texts, length]"""
    ids = tokenizer.encode(path.read_text(encoding="utf-8"))[: NUM_TEXTS * LENGTH]
    if len(ids) < NUM_TEXTS * LENGTH:
        raise SystemExit(f"{path} has {len(ids)} tokens; {NUM_TEXTS * LENGTH} are needed")
    return np.array(ids, np.int32).reshape(NUM_TEXTS, LENGTH)


def failures(ours: Divergence, usual: Divergence, differing: Mapping[str, int]) -> list[str]:
    """What is wrong: more divergence than `usual` has, by MOST, rows that differ, by name of the comparison, and a
    control in which none do. A divergence that is no number is wrong, too."""
    found = [f"{n} rows differ, {name}" for name, n in differing.items() if (n == 0) is name.startswith("control")]
    if not ours.kl <= MOST * usual.kl:
        found.append(f"mean KL {ours.kl:.3e} is more than {MOST} times {usual.kl:.3e}")
    return found


def reference_model(arch, read, dtype: torch.dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=arch.mlp_size,
        num_hidden_layers=arch.num_layers, num_attention_heads=arch.num_heads, num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim, rms_norm_eps=arch.norm_eps, tie_word_embeddings=arch.tied_head,
        max_position_embeddings=arch.context_len,
        rope_parameters={"rope_type": "default", "rope_theta": arch.layers[0].rope.theta},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
             "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "mlp_norm": "post_attention_layernorm"}  # fmt: skip
    state = {"model.embed_tokens.weight": read("embed"), "model.norm.weight": read("final_norm")}
    state["lm_head.weight"] = read("embed" if arch.tied_head else "head")
    for i in range(arch.num_layers):
        for ours, theirs in names.items():
            state[f"model.layers.{i}.{theirs}.weight"] = read(f"layers.{i}.{ours}")
    model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()}, strict=True)
    return model.to("cuda", dtype).eval()


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> Divergence:
    p, q = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    kl, same = (p.exp() * (p - q)).sum(-1).mean(), (wanted.argmax(-1) == got.argmax(-1)).double().mean()
    return Divergence(float(kl), float(same))


def main() -> None:
    checkpoint = open_checkpoint(sys.argv[1])
    texts = texts_of(load_tokenizer(checkpoint.tokenizer_source), Path(sys.argv[2]))
    arch = checkpoint.architecture
    tensors, expected = {}, expected_tensors(arch)

    def read(name: str) -> np.ndarray:
        if name not in expected:
            raise KeyError(name)
        if name not in tensors:
            tensors[name] = np.array(checkpoint.tensor(name))
        return tensors[name]

    begin = time.perf_counter()
    count, length = texts.shape
    model = DeviceModel(
        Shapes.of(arch), positions_of(arch, length), read, num_slots=length * count + 2, max_rows=length,
        context_len=length, tied=arch.tied_head,
    )  # fmt: skip
    print(f"load {time.perf_counter() - begin:.1f} s", flush=True)
    table = np.random.default_rng(0).permutation(length * count).reshape(count, length) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    lens, most = np.arange(1, length + 1), model.kernels.rows_per_group
    pairs = [(i, min(most, length - i)) for i in range(0, length, most)]
    groups = torch.tensor(pairs, dtype=torch.int32, device="cuda")
    ours = []
    for n, ids in enumerate(texts):
        rows = decode_rows(lens, ids.astype(np.int64), np.full(length, n), table) | {
            "ready_lens": np.zeros(length, int)
        }
        plan = Plan(rows=length, forms=ALL_MANY, single_rows=0, spans=-(-length // SPAN), groups=groups)
        with undivided_products():
            ours.append(model.forward(device_inputs(rows, device_table), plan).clone())
    differing = decoding(model, texts[0], table, device_table, ours[0])
    exact = reference_model(arch, read, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    half = reference_model(arch, read, torch.bfloat16)
    with torch.no_grad():
        ids = torch.from_numpy(texts.astype(np.int64)).cuda()
        wanted = torch.stack([exact(input_ids=row[None]).logits[0].float() for row in ids])
        usual = torch.stack([half(input_ids=row[None]).logits[0].float() for row in ids])
    found = [divergence(wanted, got) for got in (usual, torch.stack(ours))]
    for name, (kl, same) in zip(("transformers bf16", "verispec cuda"), found, strict=True):
        print(f"{name}: mean KL {kl:.3e} from transformers float32, same argmax {same:.4f}", flush=True)
    wrong = failures(found[1], found[0], differing)
    rows = f"{len(differing) * length} rows compared bit for bit, {count * length} with float32"
    print(f"{time.perf_counter() - begin:.0f} s; {rows};", "FAILED: " + "; ".join(wrong) if wrong else "all right")
    sys.exit(bool(wrong))


def decoding(
    model: DeviceModel, ids: np.ndarray, table: np.ndarray, device_table: torch.Tensor, wanted: torch.Tensor
) -> dict[str, int]:
    """The same text token by token, and in chains of 8 and 32, in captured graphs: how many rows differ from the
    prompt's. The control has another token in front."""
    mixed = Forms(qkv=False, o=True, gate_up=False, down=True, head=False)
    ways = ((1, ALL_FEW), (8, ALL_FEW), (8, mixed), (32, ALL_FEW), (32, ALL_MANY))
    found = {
        f"{chunk} rows at a time, {forms}": decoded(model, ids, table, device_table, wanted, chunk, forms)
        for chunk, forms in ways
    }
    other = np.concatenate([[ids[0] ^ 1], ids[1:]])
    found["control: another first token"] = decoded(model, other, table, device_table, wanted, 32, ALL_FEW)
    for name, different in found.items():
        print(f"real weights, {name}: {different} of {len(ids)} differ", flush=True)
    return found


def decoded(
    model: DeviceModel, ids: np.ndarray, table: np.ndarray, device_table: torch.Tensor, wanted: torch.Tensor,
    chunk: int, forms: Forms,
) -> int:  # fmt: skip
    """So many rows at a time; how many have other logits."""
    rows = decode_rows(np.arange(1, chunk + 1), ids[:chunk].astype(np.int64), np.zeros(chunk, np.int64), table)
    inputs = device_inputs(rows, device_table)
    plan = Plan(rows=chunk, forms=forms, single_rows=chunk, spans=-(-len(ids) // SPAN))
    graph = model.capture(lambda: model.forward(inputs, plan))
    different = 0
    for start in range(0, len(ids), chunk):
        lens = np.arange(start + 1, start + chunk + 1)
        part = decode_rows(lens, ids[start : start + chunk].astype(np.int64), np.zeros(chunk, np.int64), table)
        part["ready_lens"] = np.full(chunk, start)
        for name, values in part.items():
            getattr(inputs, name).copy_(torch.as_tensor(values, dtype=torch.int32))
        graph.replay()
        got = model.logits[:chunk]
        different += int((got.view(torch.int32) != wanted[start : start + chunk].view(torch.int32)).any(1).sum())
    return different


if __name__ == "__main__":
    main()

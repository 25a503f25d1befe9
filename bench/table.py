"""The speed table: verispec beside llama.cpp, every format with its perplexity on the same text, by one command.

    python bench/table.py --llama FOLDER --text FILE [--requantise Q8_0 Q4_0] [--parallel 1 8 32] [--out table.json]

FOLDER holds llama-batched-bench, llama-perplexity and llama-quantize, built for this CPU (GGML_NATIVE=ON). llama.cpp
runs the file itself and what llama-quantize makes of it; verispec runs the file with drafter `none`, deterministically,
prefix cache off. All take turns, round by round, the first of a round changes, and ratios are medians of the rounds'.

*prompt* is the tokens of all prompts per second up to the last sequence's first token, *decode* the tokens per second
while all sequences decode. llama-batched-bench draws no tokens, verispec does. Perplexity is llama-perplexity's: of the
second half of every chunk of 512 tokens. The CPU time of other processes meanwhile is printed: above a few per cent,
run it again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gguf
from generate import prompts as make_prompts

from verispec import LLM, SamplingParams
from verispec.backends.blas import cpu_name
from verispec.model import resolve

CHUNK = 512  # tokens, of which the second half is scored
OURS = "verispec"


class Speed(NamedTuple):
    """Tokens per second."""

    prompt: float
    decode: float


class Contender(Protocol):
    """An engine with a model in one format."""

    name: str

    def perplexity(self, text: Path, num_chunks: int) -> float: ...

    def speed(self, size: int) -> Speed: ...


class Verispec:
    """This engine, in this process."""

    def __init__(self, name: str, model: Path, work: argparse.Namespace, **options: Any) -> None:
        self.name, self._work = name, work
        room = max(work.parallel) * (work.prompt_len + work.new) + CHUNK
        self.llm = LLM(model, drafter="none", prefix_cache=False, threads=work.threads, kv_slots=room, **options)

    def perplexity(self, text: Path, num_chunks: int) -> float:
        tokenizer = self.llm.tokenizer
        ids, start = tokenizer.encode(text.read_text(encoding="utf-8")), tokenizer.encode("")  # start: BOS or nothing
        chunks = [ids[i : i + CHUNK] for i in range(0, len(ids) - CHUNK + 1, CHUNK)][:num_chunks]
        if len(chunks) < num_chunks:
            raise SystemExit(f"{text} has only {len(chunks)} chunks of {CHUNK} tokens: give --chunks {len(chunks)}")
        scored = [self.llm.score(start + chunk[len(start) :]).logprobs[CHUNK // 2 :] for chunk in chunks]
        entries = [entry.logprob for chunk in scored for entry in chunk]
        return math.exp(-sum(entries) / len(entries))

    def speed(self, size: int) -> Speed:
        work = self._work
        batch = make_prompts(self.llm, "free", size, work.prompt_len)
        prompt_time, _ = self._timed(batch, 1)
        _, decode_rate = self._timed(batch, work.new)
        return Speed(sum(map(len, batch)) / prompt_time, decode_rate)

    def _timed(self, batch: list[list[int]], new: int) -> tuple[float, float]:
        """Seconds until all have their first token, and tokens per second from then until the first one ends."""
        params = SamplingParams(max_tokens=new, ignore_eos=True, seed=0)
        begun: set[int] = set()
        num_ended = num_tokens = 0
        with self.llm.separate_engine(prefix_cache=False) as engine:
            start = time.perf_counter()
            for ids in batch:
                engine.add(self.llm.request(ids, params, drafter="none"))
            first = last = math.nan
            while engine.has_work:
                events = engine.step()
                now = time.perf_counter()
                if len(begun) == len(batch) and not num_ended:
                    num_tokens += sum(len(event.logprobs) for event in events)
                    last = now
                begun |= {event.request_id for event in events}
                num_ended += sum(event.output is not None for event in events)
                if math.isnan(first) and len(begun) == len(batch):
                    first = now
        return first - start, num_tokens / (last - first)


class LlamaCpp:
    """llama.cpp's own programs; each run is a process."""

    def __init__(self, name: str, folder: Path, model: Path, work: argparse.Namespace) -> None:
        self.name, self._folder, self._model, self._work = name, folder, model, work

    def perplexity(self, text: Path, num_chunks: int) -> float:
        said = self._run("llama-perplexity", "-f", text, "-c", CHUNK, "--chunks", num_chunks)
        return float(_found(r"Final estimate: PPL = ([\d.]+)", said))

    def speed(self, size: int) -> Speed:
        work = self._work
        lengths = ["-npp", work.prompt_len, "-ntg", work.new, "-npl", size, "-c", size * (work.prompt_len + work.new)]
        said = self._run("llama-batched-bench", *lengths, "--output-format", "jsonl")
        found = json.loads(_found(r'(\{"n_kv_max".*\})', said))
        return Speed(found["speed_pp"], found["speed_tg"])

    def _run(self, program: str, *arguments: object) -> str:
        threads = self._work.threads
        return run(self._folder / program, "-m", self._model, "-t", threads, "-tb", threads, *arguments)


@dataclass(slots=True)
class Row:
    """What was measured of one contender: a speed per round, by number of sequences."""

    name: str
    perplexity: float
    speeds: dict[int, list[Speed]] = field(default_factory=dict)


def run(program: Path, *arguments: object) -> str:
    """Everything a program says."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def _found(pattern: str, said: str) -> str:
    match = re.search(pattern, said)
    if match is None:
        raise SystemExit(f"nothing like {pattern} in:\n{said[-2000:]}")
    return match[1]


def file_format(model: Path) -> str:
    """What the file says of its own format, such as Q4_1."""
    kind = gguf.GGUFReader(model).fields.get("general.file_type")
    return "as it is" if kind is None else gguf.LlamaFileType(kind.contents()).name.removeprefix("MOSTLY_")


def requantised(folder: Path, model: Path, kind: str, target: Path) -> Path:
    """The same model in another format, by llama.cpp's own program."""
    run(folder / "llama-quantize", "--allow-requantize", model, target / f"{kind}.gguf", kind)
    return target / f"{kind}.gguf"


def measure(contenders: list[Contender], work: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """Perplexities one by one, then speeds in turns after a warm-up of each."""
    rows = []
    for contender in contenders:
        rows.append(Row(contender.name, contender.perplexity(work.text, work.chunks)))
        say(f"{contender.name}: perplexity {rows[-1].perplexity:.4f}")
        contender.speed(1)
    turns = list(zip(contenders, rows, strict=True))
    for turn in range(work.repeats):
        for size in work.parallel:
            first = turn % len(turns)
            for contender, row in turns[first:] + turns[:first]:
                row.speeds.setdefault(size, []).append(contender.speed(size))
        say(f"round {turn + 1} of {work.repeats}")
    return rows


def table(rows: list[Row], reference: float) -> Iterator[str]:
    """Markdown: medians (min-max), then how many times as fast verispec, the first row, is as each other."""
    ours, *others = rows
    sizes = list(ours.speeds)
    columns = [(size, kind) for kind in Speed._fields for size in sizes]
    yield "| engine and format | perplexity | " + " | ".join(f"{kind}, {size}" for size, kind in columns) + " |"
    yield "|---" * (2 + len(columns)) + "|"

    def rates(row: Row, size: int, kind: str) -> list[float]:
        return [getattr(speed, kind) for speed in row.speeds[size]]

    for row in rows:
        cells = (rates(row, *column) for column in columns)
        shown = " | ".join(f"{statistics.median(c):.0f} ({min(c):.0f}-{max(c):.0f})" for c in cells)
        yield f"| {row.name} | {row.perplexity:.2f} | {shown} |"
    yield f"| float32 on the file's weights | {reference:.2f} |" + " |" * len(columns)
    for row in others:
        pairs = (zip(rates(ours, *column), rates(row, *column), strict=True) for column in columns)
        shown = " | ".join(f"{statistics.median(a / b for a, b in pair):.2f}" for pair in pairs)
        yield f"| {OURS} / {row.name} | | {shown} |"


@contextmanager
def watched_cpu() -> Iterator[Callable[[], float]]:
    """Gives a function that says which share of all CPUs other processes have used since (Linux)."""

    def now() -> tuple[float, float]:
        user, nice, system, _idle, _wait, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])

    (busy, own), start = now(), time.perf_counter()

    def share() -> float:
        busy_now, own_now = now()
        others = (busy_now - busy) - (own_now - own)
        return max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))

    yield share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text for the perplexities")
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a GGUF file")
    parser.add_argument("--requantise", nargs="*", default=["Q8_0", "Q4_0"], help="formats to make of the file")
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 8, 32], help="sequences at once")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new", type=int, default=128, help="tokens to generate per sequence, at least 2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=32, help="how many chunks of the text")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write everything that was measured as JSON")
    work = parser.parse_args()
    model = resolve(work.model)
    own = file_format(model)
    build = _found(r"(version: .*)", run(work.llama / "llama-batched-bench", "--version"))
    with tempfile.TemporaryDirectory() as name, watched_cpu() as others_share:
        kinds = {own: model, **{kind: requantised(work.llama, model, kind, Path(name)) for kind in work.requantise}}
        reference = Verispec("float32", model, work, backend="numpy")
        exact = reference.perplexity(work.text, work.chunks)
        reference.llm.close()
        ours = Verispec(f"{OURS}, {own}", model, work)
        theirs = [LlamaCpp(f"llama.cpp, {kind}", work.llama, path, work) for kind, path in kinds.items()]
        rows = measure([ours, *theirs], work, lambda line: print(line, flush=True))
        about = {
            "machine": f"{cpu_name()}, {work.threads} threads, Python {platform.python_version()}",
            "model": model.name,
            "llama.cpp": build,
            "work": f"{work.prompt_len} prompt + {work.new} new tokens per sequence, {work.repeats} rounds",
            "text": f"perplexity on {work.chunks} x {CHUNK} tokens of {work.text.name}",
            "others": f"{others_share():.0%} of the CPU time was used by other processes",
        }
    print("\n" + "\n".join(f"{key}: {value}" for key, value in about.items()) + "\n")
    print("\n".join(table(rows, exact)))
    if work.out:
        found = [{"name": r.name, "perplexity": r.perplexity, "speeds": r.speeds} for r in rows]
        work.out.write_text(json.dumps({"about": about, "float32 perplexity": exact, "rows": found}, indent=1))


if __name__ == "__main__":
    main()

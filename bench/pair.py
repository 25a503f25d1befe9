"""`auto` beside fixed choices of a draft model's drafts, on a device that is far from the host. For docs/benchmarks.md.

    python bench/pair.py               # without the host's time: the same figures everywhere
    python bench/pair.py --host        # with this machine's CPU time
    python bench/pair.py --times 3     # three times as many requests
    python bench/pair.py --host --model TARGET.gguf --draft-model DRAFT.gguf --prompts FILE.jsonl ...

The device is simulated with the costs of an H200 (`tests/support/far_pair.py`), and at first so are both models: which
drafts come true is drawn beforehand, often in easy answers and seldom in hard ones; `auto` chooses between `none` and
`model`. With --prompts the target's answers are made on this machine first (--answers keeps them), and the draft model
drafts on this machine's CPU, which takes no time of the device's: so drafts are those that a GPU would verify. One
request runs at a time, or --batch of one caller, of all tasks or (--by-task) each of one task; drafters learn from one
to the next.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the device lives with the tests

from drafting import Prompts

from tests.support.adversaries import collect
from tests.support.far_pair import ARMS, RealDrafts, cases, far_engine, play
from verispec import LLM, SamplingParams
from verispec.backends.native_backend import NativeBackend
from verispec.backends.options import NativeOptions
from verispec.backends.select import make_backend
from verispec.engine import Engine, Request
from verispec.engine.request import new_batch
from verispec.model.checkpoint import open_checkpoint
from verispec.spec.speculation import AUTO, Speculation

CONTEXT_LEN = 1024
TEMPERATURES = (0.0, 1.0)
DRAFTERS = ("none", "suffix", "lookup", "model")
ALL = "**all**"  # tasks together, behind each of them
REAL_ARMS = {"none": ARMS["none"], "lookup": Speculation("lookup"), **ARMS}
Host = Callable[[], float]


@dataclass(frozen=True)
class Answer:
    """What the target draws behind a prompt, with the noise of this seed."""

    task: str
    temperature: float
    seed: int
    prompt_ids: list[int]
    token_ids: list[int]


@dataclass
class Tally:
    """Of answers to prompts of one kind."""

    seconds: float = 0.0
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Tally) -> None:
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.drafted += other.drafted
        self.accepted += other.accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="count the host's CPU time")
    parser.add_argument("--times", type=int, default=1, help="as many requests, of simulated models")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON lines, of real models")
    parser.add_argument("--model", help="whose answers, with --prompts")
    parser.add_argument("--draft-model", type=Path, help="whose drafts, with --prompts")
    parser.add_argument("--answers", type=Path, help="a file that keeps the answers, or has them already")
    parser.add_argument("--count", type=int, default=4, help="of prompts for each task")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="so many answers at once, with --prompts")
    parser.add_argument("--by-task", action="store_true", help="batches of one task each, not of all")
    parser.add_argument("--tokens", type=int, default=112, help="the most of an answer")
    parser.add_argument("--arms", nargs="+", default=list(REAL_ARMS), choices=list(REAL_ARMS), help="with --prompts")
    options = parser.parse_args()
    host = time.thread_time if options.host else lambda: 0.0
    if options.prompts is None:
        show_simulated(options.times, host)
    elif options.model is None or options.draft_model is None:
        parser.error("--prompts needs --model and --draft-model")
    else:
        show_real(options, host)


def show_simulated(times: int, host: Host) -> None:
    print("| answers | " + " | ".join(ARMS) + " | drafted a token, accepted | `auto` / best fixed |")
    print("|---" * (len(ARMS) + 3) + "|")
    for name, case in cases(times).items():
        found = {arm: play(case, arm, host) for arm in ARMS}
        if any(played.digests != found["none"].digests for played in found.values()):
            raise SystemExit("drafts changed the output")
        rates = {arm: played.tokens_per_second / found["none"].tokens_per_second for arm, played in found.items()}
        best, auto = max(rate for arm, rate in rates.items() if arm != AUTO), found[AUTO]
        print(
            f"| {name} | " + " | ".join(f"{rate:.2f}" for rate in rates.values())
            + f" | {auto.drafted:.2f}, {auto.accepted:.0%} | {rates[AUTO] / best:.3f} |",
            flush=True,
        )  # fmt: skip


def show_real(options: argparse.Namespace, host: Host) -> None:
    """A table for each batch and temperature; by task where no two tasks run together."""
    eos_ids, answers = _answers(options)
    most = options.count if options.by_task else len(answers) // len(TEMPERATURES)
    if max(options.batch) > most:
        raise SystemExit(f"a batch of {max(options.batch)} needs as many answers: more --count")
    arms = list(dict.fromkeys(["none", *options.arms]))
    for batch in options.batch:
        for temperature in TEMPERATURES:
            mine = [answer for answer in answers if answer.temperature == temperature]
            found = {arm: _played(options, mine, eos_ids, arm, batch, host) for arm in arms}
            none = found["none"]
            print(f"\nT = {temperature:g}, batch {batch}, {none[ALL].num_tokens:,} tokens\n")
            print("| task | none, tok/s | " + " | ".join(arms[1:]) + " | `auto` drafted a token, accepted |")
            print("|---" * (len(arms) + 2) + "|")
            for task in none:
                rows = {arm: tallies[task] for arm, tallies in found.items()}
                ratios = " | ".join(f"{rows['none'].seconds / rows[arm].seconds:.2f}" for arm in arms[1:])
                auto = rows.get(AUTO, Tally(num_tokens=1))
                share = f"{auto.drafted / auto.num_tokens:.2f}, {auto.accepted / max(1, auto.drafted):.0%}"
                speed = rows["none"].num_tokens / rows["none"].seconds
                print(f"| {task} | {speed:.0f} | {ratios} | {share} |", flush=True)


def _answers(options: argparse.Namespace) -> tuple[tuple[int, ...], list[Answer]]:
    """The ids that end one, and all of them; read, or made and kept."""
    if options.answers is not None and options.answers.exists():
        kept = json.loads(options.answers.read_text(encoding="utf-8"))
        return tuple(kept["eos_ids"]), [Answer(**answer) for answer in kept["answers"]]
    with LLM(options.model, drafter="none") as llm:
        prompts = Prompts(llm, options.prompts, max_len=CONTEXT_LEN - options.tokens - 64)
        asked = [(task, ids) for task in sorted(prompts.texts) for ids in prompts.of(task, options.count)]
        answers = [answer for temperature in TEMPERATURES for answer in _made(llm, asked, temperature, options.tokens)]
        eos_ids = tuple(llm.tokenizer.eos_ids)
    if options.answers is not None:
        kept = {"eos_ids": eos_ids, "answers": [asdict(answer) for answer in answers]}
        options.answers.write_text(json.dumps(kept), encoding="utf-8")
    return eos_ids, answers


def _made(llm: LLM, asked: Sequence[tuple[str, list[int]]], temperature: float, num_tokens: int) -> Iterator[Answer]:
    params = [SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=i) for i in range(len(asked))]
    print(f"making {len(asked)} answers at T = {temperature:g}", file=sys.stderr, flush=True)
    outputs = llm.generate([ids for _, ids in asked], params, drafter="none")
    for seed, ((task, ids), output) in enumerate(zip(asked, outputs, strict=True)):
        yield Answer(task, temperature, seed, list(ids), list(output.token_ids))


def _played(
    options: argparse.Namespace, answers: Sequence[Answer], eos_ids: tuple[int, ...], arm: str, batch: int, host: Host
) -> dict[str, Tally]:
    """By task, and over all of them, in a new engine. The last ones that fill no batch are left out."""
    sizes = NativeOptions(num_slots=4 * batch * CONTEXT_LEN, num_seq_rows=batch)
    draft = make_backend(sizes, [open_checkpoint(options.draft_model)])
    assert isinstance(draft, NativeBackend)
    texts = {answer.seed: [*answer.prompt_ids, *answer.token_ids, 0, 0] for answer in answers}
    backend = RealDrafts(
        draft, texts.__getitem__, vocab_size=draft.limits.vocab_size, context_len=CONTEXT_LEN, num_running=batch,
        host=host,
    )  # fmt: skip
    engine, found, every = far_engine(backend, batch, DRAFTERS), dict[str, Tally](), Tally()
    tasks = [(task, list(group)) for task, group in groupby(answers, lambda answer: answer.task)]
    if batch > 1 and not options.by_task:
        turns = zip_longest(*(group for _, group in tasks))
        tasks = [(ALL, [answer for turn in turns for answer in turn if answer is not None])]
    for task, group in tasks:
        tally = found[task] = Tally()
        for i in range(0, len(group) - batch + 1, batch):
            tally.add(_together(engine, backend, group[i : i + batch], eos_ids, arm, options.tokens))
        every.add(tally)
    draft.close()
    return {**found, ALL: every}


def _together(
    engine: Engine, backend: RealDrafts, answers: Sequence[Answer], eos_ids: tuple[int, ...], arm: str, num_tokens: int
) -> Tally:
    """Fails if one of the answers is another."""
    gc.collect()  # or some answers of some arms pay for it
    start, batch = backend.now, new_batch()
    for answer in answers:
        params = SamplingParams(max_tokens=num_tokens, temperature=answer.temperature, seed=answer.seed)
        engine.add(Request(answer.prompt_ids, params, REAL_ARMS[arm], eos_ids=eos_ids, is_streamed=False, batch=batch))
    outputs = [output for _, output in sorted(collect(engine).items())]
    if [list(output.token_ids) for output in outputs] != [answer.token_ids for answer in answers]:
        raise SystemExit(f"{arm} changed the output")
    tally = Tally(backend.now - start)
    for output in outputs:
        tally.add(Tally(0.0, len(output.token_ids), output.stats.drafted, output.stats.accepted))
    return tally


if __name__ == "__main__":
    main()

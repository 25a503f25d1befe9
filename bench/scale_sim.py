"""From one GPU to a thousand: what replicas hold, how often prefixes hit, what a lost machine costs. A simulation.

    python bench/scale_sim.py                          # the table of docs/scale.md
    python bench/scale_sim.py --gpus 64 --rate 4 --kv-tokens 100000

Sessions come at random, each with a long shared beginning (one of `--systems`) and turns that repeat what was said.
Requests go to replicas by the ingress's own rule (`verispec.ray.prefixes`), or at random for comparison. A replica has
room for `--kv-tokens` tokens of K/V and forgets the oldest prefixes first. Losses are arithmetic: GPUs are lost every
`--mtbf-hours`, and the streams of one pay for computing prompt and answer again elsewhere. All caches begin empty.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from verispec.ray.prefixes import BLOCK_LEN, PrefixIndex, prefix_keys, ranked

TURNS = 6
SAMPLE = 32  # replicas that are compared by load, of many


@dataclass
class Machine:
    """A replica: which prefixes it has, and until when it is busy with what."""

    room: int
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ends: list[float] = field(default_factory=list)

    def load(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)

    def take(self, keys: tuple[int, ...]) -> int:
        """Tokens of the prompt that need not be computed; the prompt is cached from now on."""
        hit = 0
        for key in keys:
            if key not in self.cached:
                break
            hit += BLOCK_LEN
        for key in keys:
            self.cached[key] = None
            self.cached.move_to_end(key)
        while len(self.cached) * BLOCK_LEN > self.room:
            self.cached.popitem(last=False)
        return hit


@dataclass
class Outcome:
    """What came of a simulated while."""

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


def simulate(options: argparse.Namespace, *, gpus: int, by_prefix: bool) -> Outcome:
    rng = random.Random(options.seed)
    systems = [[rng.randrange(50_000) for _ in range(options.system_len)] for _ in range(options.systems)]
    machines = {f"r{i}": Machine(options.kv_tokens) for i in range(gpus)}
    names = list(machines)
    index, found = PrefixIndex(), Outcome()
    now, rate = 0.0, options.rate * gpus
    sessions: list[tuple[float, int, list[int], int]] = []  # when, a number, what was said, turns left
    for number in range(options.requests):
        now += rng.expovariate(rate)
        if sessions and sessions[0][0] <= now:
            _, _, said, left = heapq.heappop(sessions)
        else:
            said, left = list(rng.choice(systems)), TURNS
        prompt = said + [rng.randrange(50_000) for _ in range(options.turn_len)]
        keys = prefix_keys(prompt, "")
        loads = {name: machines[name].load(now) for name in (names if gpus <= SAMPLE else rng.sample(names, SAMPLE))}
        holder = index.holder(keys, machines)
        if by_prefix and holder is not None:
            loads[holder] = machines[holder].load(now)
        chosen = rng.choice(ranked(index, keys, loads)[0]) if by_prefix else rng.choice(names)
        index.note(keys, chosen)
        hit = machines[chosen].take(keys)
        found.num_requests += 1
        found.prompt_tokens += len(prompt)
        found.hit_tokens += hit
        seconds = (len(prompt) - hit) / options.prompt_speed + options.answer_len / options.stream_speed
        heapq.heappush(machines[chosen].ends, now + seconds)
        if left > 1:
            answer = [rng.randrange(50_000) for _ in range(options.answer_len)]
            heapq.heappush(sessions, (now + seconds + rng.expovariate(1 / 20), number, prompt + answer, left - 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 8, 64, 1000])
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second and GPU")
    parser.add_argument("--requests", type=int, default=4000, help="to simulate")
    parser.add_argument("--systems", type=int, default=50, help="shared beginnings")
    parser.add_argument("--system-len", type=int, default=1024, help="tokens of each")
    parser.add_argument("--turn-len", type=int, default=100)
    parser.add_argument("--answer-len", type=int, default=300)
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="K/V of a GPU")
    parser.add_argument("--prompt-speed", type=float, default=20_000, help="prompt tokens a second")
    parser.add_argument("--stream-speed", type=float, default=60, help="tokens a second of one stream")
    parser.add_argument("--mtbf-hours", type=float, default=1000, help="hours of a GPU until it is lost")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| GPUs | requests/s | prompt tokens found: by prefix | at random | losses a day | streams moved | cost |")
    print("|---|---|---|---|---|---|---|")
    for gpus in options.gpus:
        smart, blind = (simulate(options, gpus=gpus, by_prefix=flag) for flag in (True, False))
        losses = 24 * gpus / options.mtbf_hours
        streams = options.rate * options.answer_len / options.stream_speed  # that run on one GPU, by Little's law
        length = smart.prompt_tokens / smart.num_requests + options.answer_len / 2
        seconds = losses * streams * length / options.prompt_speed
        print(
            f"| {gpus} | {options.rate * gpus:g} | {smart.hit_tokens / smart.prompt_tokens:.0%} "
            f"| {blind.hit_tokens / blind.prompt_tokens:.0%} | {losses:.2g} | {losses * streams:.3g} "
            f"| {seconds:.2g} GPU seconds a day |"
        )


if __name__ == "__main__":
    main()

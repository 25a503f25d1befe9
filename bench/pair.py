"""`auto` beside fixed choices of a draft model's drafts, on a device that is far from the host. For docs/benchmarks.md.

    python bench/pair.py               # without the host's time: the same figures everywhere
    python bench/pair.py --host        # with this machine's CPU time
    python bench/pair.py --times 3     # three times as many requests

The device and both models are simulated with the costs of an H200 (`tests/support/far_pair.py`): which drafts come true
is drawn beforehand, often in easy answers and seldom in hard ones. `auto` chooses between `none` and `model`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the device lives with the tests

from tests.support.far_pair import ARMS, cases, play
from verispec.spec.speculation import AUTO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="count the host's CPU time")
    parser.add_argument("--times", type=int, default=1, help="as many requests")
    options = parser.parse_args()
    host = time.process_time if options.host else lambda: 0.0
    print("| answers | " + " | ".join(ARMS) + " | drafted a token, accepted | `auto` / best fixed |")
    print("|---" * (len(ARMS) + 3) + "|")
    for name, case in cases(options.times).items():
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


if __name__ == "__main__":
    main()

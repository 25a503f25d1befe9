"""What an ingress spends on a token that a replica sends: CPU time from the socket to the stream's reader.

    python bench/ingress.py

A process of its own sends frames as a replica does, a token per stream and frame. The ingress reads and decodes them,
keeps the journals and hands the events to the loop, as it does under Ray; HTTP comes on top (`bench/server.py`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from verispec.engine import Request
from verispec.engine.thread import on_loop
from verispec.ray.channel import Address, Hub, Load, Uplink
from verispec.ray.journal import Journal
from verispec.types import SamplingParams, TokenEvent, TokenLogprobs

NUM_TOKENS = 60_000
REPEATS = 3


async def send(address: Address, num_streams: int) -> None:
    link = await Uplink.connect(
        address, replica="bench", load=Load, on_abort=lambda attempt: None, on_lost=lambda: None
    )
    for step in range(NUM_TOKENS // num_streams):
        for attempt in range(1, num_streams + 1):
            link.say(attempt, [TokenEvent(attempt, 0, TokenLogprobs((step,), (-1.5,)), (" word",))])
        await asyncio.sleep(0)
        await link.room()
    await asyncio.sleep(1)


async def receive(num_streams: int) -> float:
    """Microseconds of CPU time a token."""
    hub, done, num_heard = Hub(), asyncio.Event(), 0
    address = await hub.listen("127.0.0.1")
    wanted = NUM_TOKENS // num_streams * num_streams

    def deliver(events: list[TokenEvent]) -> None:
        nonlocal num_heard
        num_heard += sum(len(event.logprobs) for event in events)
        if num_heard == wanted:
            done.set()

    sink = on_loop(asyncio.get_running_loop(), deliver)
    for number in range(1, num_streams + 1):
        journal = Journal(number, Request((1, 2, 3), SamplingParams(max_tokens=NUM_TOKENS)))
        hub.expect(lambda events, journal=journal: sink(journal.take(events)), lambda reason: None)  # type: ignore[misc]
    words = [address.host, str(address.port), address.secret, str(address.beat_seconds), str(num_streams)]
    sender = subprocess.Popen([sys.executable, __file__, *words])
    while not hub.loads:
        await asyncio.sleep(0.001)
    start = time.process_time()
    await done.wait()
    seconds = time.process_time() - start
    sender.wait()
    await hub.close()
    return 1e6 * seconds / wanted


def main() -> None:
    print("| streams | us of CPU time a token, the best of", REPEATS, "|\n|---|---|")
    for num_streams in (1, 8, 32):
        print(f"| {num_streams} | {min(asyncio.run(receive(num_streams)) for _ in range(REPEATS)):.1f} |")


if __name__ == "__main__":
    if sys.argv[1:]:
        host, port, secret, beat, streams = sys.argv[1:]
        asyncio.run(send(Address(host, int(port), secret, float(beat)), int(streams)))
    else:
        main()

"""Streams for a server, from a process of its own: plain sockets, since a full client costs more than the server does.

    python bench/load_client.py PORT PATH STREAMS [SECONDS] < body.json

Sends the body on every connection, all at once, and reads the answers; with SECONDS, again and again until then, after
a refusal when Retry-After says so. {i} in the body is the number of the stream. Prints a JSON object: the seconds that
all took, also of CPU time, and of each request its status, its tokens, and the seconds to its first token and its end.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

# Our frames tell how many tokens there are so far; others have a token each.
_EVENT, _FRAME = re.compile(rb"id: 0\.(\d+)\n"), re.compile(rb"data: \{")
_RETRY = re.compile(rb"retry-after: (\d+)", re.IGNORECASE)


async def warm_up(port: int) -> None:
    """What a client costs the first time is not the server's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"200" in await reader.read()
    writer.close()


async def one(port: int, path: str, body: bytes) -> dict[str, float | int | None]:
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first, tail, num_tokens, num_frames, status, retry = None, b"", 0, 0, 0, 0
    while part := await reader.read(2**18):
        status = status or int(part[9:12])
        if status != 200 and (after := _RETRY.search(part)):
            retry = int(after[1])
        num_frames += len(_FRAME.findall(part))
        tail = tail[-100:] + part
        found = _EVENT.findall(tail)
        num_tokens = int(found[-1]) if found else num_tokens
        if first is None and (found or num_frames > 1):
            first = time.perf_counter() - start
    writer.close()
    seconds = time.perf_counter() - start
    return {"status": status, "tokens": num_tokens or num_frames, "first": first, "seconds": seconds, "retry": retry}


async def main(port: str, path: str, num_streams: str, seconds: str = "0") -> None:
    body = sys.stdin.read()
    await warm_up(int(port))
    start, cpu = time.perf_counter(), time.process_time()

    async def stream(i: int) -> list[dict[str, float | int | None]]:
        own = body.replace("{i}", str(i)).encode()
        found = [await one(int(port), path, own)]
        while time.perf_counter() - start < float(seconds):
            await asyncio.sleep(found[-1]["retry"] or 0)
            found.append(await one(int(port), path, own))
        return found

    found = await asyncio.gather(*map(stream, range(int(num_streams))))
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    print(json.dumps({**took, "requests": [each for one in found for each in one]}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""llama.cpp in its own process and environment, for bench/native.py: one JSON order per line, one JSON answer each.

    python -m venv .venv-llama && .venv-llama/bin/pip install xllamacpp

An order is {"model": PATH, "prompts": [[ids]], "new": N, "threads": T}; all prompts run in parallel. The answer has the
seconds from the first request to the last token. The server of a (model, number of prompts) is kept.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xllamacpp

_servers = {}


def server(model, parallel, context, threads):
    key = (model, parallel, context)
    if key not in _servers:
        _servers.clear()  # one at a time: memory, and idle threads
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = parallel
        params.n_ctx = context * parallel
        params.n_batch = params.n_ubatch = 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.warmup = True
        _servers[key] = xllamacpp.Server(params)
    return _servers[key]


def complete(chosen, new, prompt):
    order = {
        "prompt": prompt, "n_predict": new, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False,
        "return_tokens": True,
    }  # fmt: skip
    return chosen.handle_completions(order)


def main():
    for line in sys.stdin:
        order = json.loads(line)
        prompts, new = order["prompts"], order["new"]
        chosen = server(order["model"], len(prompts), len(prompts[0]) + new + 8, order["threads"])
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(partial(complete, chosen, new), prompts))
        seconds = time.perf_counter() - start
        counts = [a.get("tokens_predicted", a.get("usage", {}).get("completion_tokens")) for a in answers]
        timings = answers[0].get("timings", {})
        reply = {"seconds": seconds, "tokens": counts, "timings": timings, "keys": list(answers[0])[:12]}
        print("ANSWER " + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

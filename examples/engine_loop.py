"""Drive the engine by hand: requests arrive while others run, one is aborted, and every step reports its commits."""

from verispec import LLM, Request, SamplingParams

with LLM("smollm2-135m") as llm:
    engine, tokenizer = llm.engine, llm.tokenizer

    def request(text: str, **params: object) -> int:
        return engine.add(
            Request(tokenizer.encode(text), SamplingParams(**params), eos_ids=tokenizer.eos_ids)  # type: ignore[arg-type]
        )

    first = request("List three colours:", max_tokens=16, seed=1)
    second = request("A long story:", max_tokens=500, seed=2)
    steps = 0
    while engine.has_work:
        for event in engine.step():
            print(f"step {steps:2}  request {event.request_id}  {tokenizer.decode(event.token_ids)!r}")
            if event.output is not None:
                print(f"         ended: {event.output.finish_reason}, digest {event.output.digest[:16]}")
        steps += 1
        if steps == 8:
            engine.abort(second)

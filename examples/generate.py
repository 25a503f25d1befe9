"""Generate for several prompts as one batch, and show that the batch did not matter."""

from verispec import LLM, SamplingParams

with LLM("smollm2-135m", drafter="suffix") as llm:
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)
    batch = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, batch, strict=True):
        alone = llm.generate(prompt, params, drafter="none")[0]
        same = "same bits alone" if alone.digest == completion.digest else "DIFFERENT ALONE"
        print(f"{prompt!r} -> {completion.text!r}\n  {completion.digest[:16]}  {same}")

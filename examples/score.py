"""Score given text: log-probabilities in parallel passes, and perplexity."""

from verispec import LLM

with LLM("smollm2-135m") as llm:
    for text in ("The sun rises in the east.", "East the in rises sun the."):
        result = llm.score(text)
        print(f"{text!r}: perplexity {result.perplexity:.1f}")
        for entry in result.logprobs:
            print(f"  {entry.logprob:8.3f}  {llm.tokenizer.token_text(entry.token_id)!r}")

// What speculation brought, in words: always a reason, and never a guess that is not called one.

const FEWEST_PLAIN = 4;  // passes without a draft that an estimate needs

// Of an answer that has come to its end.
export function why({ told, finish, metrics }) {
  const spec = metrics?.speculative_decoding;
  const parts = [told.no_draft_reason ? `nothing was drafted: ${told.no_draft_reason}` : `${told.tokens_per_pass} tokens per pass`];
  if (spec) parts.push(`${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} drafted tokens accepted`);
  if (metrics?.tokens_per_second) parts.push(`${metrics.tokens_per_second.toFixed(1)} tokens/s`);
  if (finish === "length") parts.push("it reached the most tokens");
  return parts.join("; ");
}

export function whyStopped(passes) {
  const numTokens = passes.reduce((sum, pass) => sum + pass.pieces.length, 0);
  return passes.length ? `stopped after ${numTokens} tokens; ${(numTokens / passes.length).toFixed(2)} tokens per pass so far` : "stopped";
}

// How much longer it would have taken if every token took the median time of the passes without a draft. Passes have the
// server's time, `ms`.
export function estimated(passes) {
  if (!passes.some(({ draft }) => draft)) return "as fast as none";
  const timed = passes.slice(1).map(({ pieces, draft, ms }, i) => ({ numTokens: pieces.length, draft, ms: ms - passes[i].ms }));
  const plain = timed.filter(({ draft, numTokens }) => !draft && numTokens).map(({ ms, numTokens }) => ms / numTokens).sort((a, b) => a - b);
  const sum = (name) => timed.reduce((total, pass) => total + pass[name], 0);
  const ratio = plain[plain.length >> 1] / (sum("ms") / sum("numTokens"));
  if (plain.length < FEWEST_PLAIN || !Number.isFinite(ratio)) return "speed-up not known: hardly a pass was without a draft";
  return `about ${ratio.toFixed(2)}× as fast as none, going by its ${plain.length} passes without a draft`;
}

// Two measured rates of the same request.
export function compared(own, none) {
  if (!own?.tokens_per_second || !none?.tokens_per_second) return "too short to be measured";
  const [drafted, plain] = [own.tokens_per_second, none.tokens_per_second];
  return `${(drafted / plain).toFixed(2)}× as fast as none, measured: ${drafted.toFixed(1)} against ${plain.toFixed(1)} tokens/s`;
}

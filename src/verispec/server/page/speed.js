// What speculation brought, in words: always a reason, and never a guess that is not called one.

const FEWEST_PLAIN = 4;  // passes without a draft that an estimate needs

// Of an answer that has come to its end. `passes` are its passes, each with `ms`, the time it came at.
export function why({ told, finish, metrics, passes }) {
  const spec = metrics?.speculative_decoding;
  const parts = [told.no_draft_reason ? `nothing was drafted, so as fast as none: ${told.no_draft_reason}` : `${told.tokens_per_pass} tokens per pass`];
  if (spec) parts.push(`${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} drafted tokens accepted`);
  if (!told.no_draft_reason) parts.push(estimated(passes));
  if (metrics?.tokens_per_second) parts.push(`${metrics.tokens_per_second.toFixed(1)} tokens/s`);
  if (finish === "length") parts.push("it reached the most tokens");
  return parts.join("; ");
}

export function whyStopped(passes) {
  const numTokens = passes.reduce((sum, pass) => sum + pass.pieces.length, 0);
  return passes.length ? `stopped after ${numTokens} tokens; ${(numTokens / passes.length).toFixed(2)} tokens per pass so far` : "stopped";
}

// With every token as slow as those of the passes without a draft, how long the answer would have taken.
function estimated(passes) {
  const timed = passes.slice(1).map((pass, i) => ({ ...pass, ms: pass.ms - passes[i].ms }));
  const plain = timed.filter((pass) => !pass.draft);
  const sum = (list, value) => list.reduce((total, pass) => total + value(pass), 0);
  const perToken = (list) => sum(list, (pass) => pass.ms) / sum(list, (pass) => pass.pieces.length);
  const ratio = perToken(plain) / perToken(timed);
  if (plain.length < FEWEST_PLAIN || !Number.isFinite(ratio)) return "speed-up not known: hardly a pass was without a draft (Compare measures it)";
  return `about ${ratio.toFixed(2)}× as fast as none, going by its ${plain.length} passes without a draft (Compare measures it)`;
}

// Two measured rates of the same request.
export function compared(own, none) {
  if (!own?.tokens_per_second || !none?.tokens_per_second) return "too short to be measured";
  const [drafted, plain] = [own.tokens_per_second, none.tokens_per_second];
  return `${(drafted / plain).toFixed(2)}× as fast as none, measured: ${drafted.toFixed(1)} against ${plain.toFixed(1)} tokens/s`;
}

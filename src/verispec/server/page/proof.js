// What an answer rests on, and the buttons that put it to the test on the server.
import { button, make } from "./dom.js";
import { compared } from "./speed.js";
import { get, post } from "./talk.js";

// The lines below an answer that has come to its end.
export function factLines({ why, speedUp, own }) {
  const lines = [make("p", [why, speedUp].filter(Boolean).join("; "), { class: "why" })];
  if (!own?.digest) return lines;
  const line = make("p", "digest ", { class: "proof" });
  const mark = make("span", own.agrees ? " ✓" : " ✗ not what this page computed from the stream", {
    class: own.agrees ? "good" : "bad", title: "whether this page computed the same digest from the tokens it was sent" });
  line.append(make("code", own.digest.slice(0, 16), { title: own.digest }), ...(own.agrees === undefined ? [] : [mark]),
    ` seed ${own.seed} fingerprint ${own.fingerprint ?? "not kept"} profile ${own.profile}`);
  return [...lines, line];
}

// Buttons, and where they tell what they found. `asked` is the request, as long as the page remembers it.
export function auditButtons(turn, asked, key, onMeasured) {
  const { own } = turn;
  const verdict = make("p", "", { class: "verdict", role: "status" });
  const tell = (text, good) => {
    verdict.textContent = text;
    verdict.className = `verdict ${good === undefined ? "" : good ? "good" : "bad"}`;
    verdict.scrollIntoView({ block: "nearest" });
  };
  const audit = (name, what, run) => {
    const made = button(name, async () => {
      tell("running ...");
      try { tell(...await run()); } catch (error) { tell(error.message, false); }
    });
    made.title = what;
    return made;
  };
  const compare = async () => {
    const { metrics, verispec } = await post("/v1/chat/completions", { ...asked, seed: own.seed, stream: false, stream_options: undefined, verispec: { trace: true, speculative: false } }, key());
    turn.speedUp = compared(turn.metrics, metrics);
    onMeasured();
    const same = verispec.digest === own.digest;
    return [`${turn.speedUp}; ${same ? "✓ the same digest" : `✗ another digest: ${verispec.digest.slice(0, 16)}`}`, same];
  };
  const buttons = [];
  if (own?.receipt) {
    buttons.push(
      audit("Replay", "draws the answer again and compares every token", async () => replayed(await post("/verispec/replay", { id: own.receipt }, key()))),
      audit("Check", "draws it with every drafter, in a crowd and interrupted: one digest", async () => checked(await post("/verispec/check", { id: own.receipt }, key()))),
      audit("Receipt", "downloads what anybody can replay", async () => { download(await get(`/verispec/receipts/${own.receipt}`, key())); return ["the receipt is downloaded"]; }));
  }
  if (own?.digest && asked) buttons.push(audit("Compare", "draws it without drafts, and measures how much faster it was with them", compare));
  return { buttons, verdict };
}

export function replayed(result) {
  const first = result.first_token_difference;
  if (result.reproduced) return [`✓ reproduced: ${result.num_tokens} tokens with log-probabilities`, true];
  if (result.agrees) return [`✓ the same ${result.num_tokens} tokens, on another numeric profile`, true];
  if (first) return [`✗ position ${first.position} differs`, false];
  return [`✗ not reproduced${result.error ? `: ${result.error}` : result.edited ? ": the receipt was edited" : result.logprobs_equal ? "" : ": log-probabilities differ"}`, false];
}

function checked({ equal, runs }) {
  return [`${equal ? "✓ one digest" : "✗ different digests"}: ${runs.map((run) => `${run.circumstance} ${run.digest.slice(0, 8)}`).join(", ")}`, equal];
}

function download(receipt) {
  const link = make("a", "", { download: "receipt.json" });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(receipt)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

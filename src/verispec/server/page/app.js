// The page: conversations, kept in this browser; settings; and what can be seen of an answer.
import { get, post, stream } from "./talk.js";
import { addCalls, button, make, showCalls, showMarkdown, showStrip, showTokens, showTree } from "./show.js";

const at = (id) => document.getElementById(id);
const kept = (name, otherwise) => { try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; } };
const keep = (name, value) => localStorage.setItem(name, JSON.stringify(value));
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "drafter", "schema", "tools", "tool_choice"];
const MOST_KEPT = 50;

let conversations = kept("conversations", []);
let current = conversations[0] ?? begin();
let running = null;
let model = null;
let passes = [];

function begin() {
  const made = { title: "New conversation", turns: [] };
  conversations.unshift(made);
  conversations = conversations.slice(0, MOST_KEPT);
  return made;
}

function key() { return sessionStorage.getItem("key") ?? ""; }

async function connect() {
  try {
    model = (await get("/v1/models", key())).data[0];
    at("drafter").replaceChildren(...["", ...model.verispec.drafters].map((name) => make("option", name || "the server's default", { value: name })));
    at("drafter").value = kept("settings", {}).drafter ?? "";
    at("state").textContent = `${model.id}, up to ${model.max_model_len} tokens, fingerprint ${model.verispec.system_fingerprint}`;
  } catch (error) {
    at("state").textContent = `${error.message} (the API key goes into the settings)`;
  }
}

function save() { keep("conversations", conversations); showList(); }

function showList() {
  at("list").replaceChildren(...conversations.map((each) => {
    const item = make("li");
    const open = button(each.title, () => { if (!running) { current = each; show(); } });
    open.setAttribute("aria-current", each === current);
    const remove = button("×", () => {
      if (running) return;
      conversations = conversations.filter((other) => other !== each);
      if (each === current) current = conversations[0] ?? begin();
      save(); show();
    });
    remove.setAttribute("aria-label", `Delete ${each.title}`);
    item.append(open, remove);
    return item;
  }));
}

function show() {
  showList();
  at("talk").replaceChildren(...current.turns.map(showTurn));
  at("talk").scrollTop = at("talk").scrollHeight;
}

function showTurn(turn, index) {
  const place = make("article", undefined, { class: `turn ${turn.role}` });
  if (turn.role === "user") {
    place.textContent = turn.content;
    place.title = "Double click to edit";
    place.addEventListener("dblclick", () => edit(index));
    return place;
  }
  if (turn.role === "tool") {
    place.textContent = `result: ${turn.content}`;
    return place;
  }
  const said = make("div", undefined, { class: "said" });
  showMarkdown(said, turn.content);
  place.append(said, ...called(turn), ...proof(turn, index));
  return place;
}

// The calls of an answer; where one has no result yet, the user may say it for the tool.
function called(turn) {
  if (!turn.calls?.length) return [];
  const calls = make("div");
  showCalls(calls, turn.calls);
  const open = turn.calls.filter(({ id }) => !current.turns.some((each) => each.tool_call_id === id));
  for (const call of open) {
    const form = make("form");
    const input = make("input", undefined, { "aria-label": `Result of ${call.function.name}`, placeholder: "what the tool answers" });
    form.append(input, make("button", "Give the result", { type: "submit" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      current.turns.push({ role: "tool", tool_call_id: call.id, content: input.value });
      save();
      if (open.length === 1) answer(); else show();
    });
    calls.children[turn.calls.indexOf(call)].append(form);
  }
  return [calls];
}

// What an answer rests on, and the buttons that put it to the test.
function proof(turn, index) {
  const own = turn.own ?? {};
  const parts = [make("p", turn.why ?? "", { class: "why" })];
  if (own.digest) {
    const line = make("p", "", { class: "proof" });
    line.append("digest ", make("code", own.digest.slice(0, 16)), ` seed ${own.seed} profile ${own.profile}`);
    parts.push(line);
  }
  const verdict = make("p", "", { class: "verdict", role: "status" });
  const tools = make("div", undefined, { class: "tools" });
  const told = (text, good) => { verdict.textContent = text; verdict.className = `verdict ${good === undefined ? "" : good ? "good" : "bad"}`; };
  const audit = (path, say) => async () => {
    told("running ...");
    try { say(await post(path, { id: own.receipt }, key())); } catch (error) { told(error.message, false); }
  };
  if (own.receipt) {
    tools.append(
      button("Replay", audit("/verispec/replay", (r) => told(...replayed(r)))),
      button("Check", audit("/verispec/check", (r) => told(
        `${r.equal ? "✓ one digest" : "✗ different digests"}: ${r.runs.map((run) => `${run.circumstance} ${run.digest.slice(0, 8)}`).join(", ")}`, r.equal))),
      button("Receipt", async () => download(await get(`/verispec/receipts/${own.receipt}`, key()))));
  }
  tools.append(button("Copy", () => navigator.clipboard.writeText(turn.content)));
  if (index === current.turns.length - 1) tools.append(button("Regenerate", () => { if (!running) { current.turns.pop(); answer(); } }));
  return [...parts, tools, verdict];
}

function replayed(result) {
  const first = result.first_token_difference;
  if (result.reproduced) return [`✓ reproduced: ${result.num_tokens} tokens with log-probabilities`, true];
  return [first ? `✗ position ${first.position} differs` : `✗ not reproduced${result.error ? `: ${result.error}` : ""}`, false];
}

function download(receipt) {
  const link = make("a", "", { download: "receipt.json" });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(receipt)], { type: "application/json" }));
  link.click();
  URL.revokeObjectURL(link.href);
}

function edit(index) {
  if (running) return;
  at("text").value = current.turns[index].content;
  current.turns = current.turns.slice(0, index);
  save(); show(); at("text").focus();
}

function request() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const system = at("system").value.trim();
  const [schema, tools] = [json("schema", "the schema"), json("tools", "the list of tools")];
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...current.turns.map(({ role, content, calls, tool_call_id }) =>
      ({ role, content, tool_call_id, tool_calls: calls?.length ? calls : undefined }))],
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    tools, tool_choice: tools && at("tool_choice").value,
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    stream: true, logprobs: true, top_logprobs: 3, stream_options: { include_usage: true },
    verispec: { trace: true, receipt: true, ...(at("drafter").value ? { speculative: { method: at("drafter").value } } : {}) },
  };
}

function json(id, what) {
  const text = at(id).value.trim();
  try { return text ? JSON.parse(text) : undefined; } catch (error) { throw new Error(`${what} in the settings is not JSON: ${error.message}`); }
}

async function answer() {
  const turn = { role: "assistant", content: "", calls: [] };
  running = new AbortController();
  passes = [];
  at("send").hidden = true; at("stop").hidden = false;
  show();
  const place = make("article", undefined, { class: "turn assistant" });
  const said = make("div", undefined, { class: "said" });
  const calls = make("div");
  const tree = make("div", undefined, { class: "tree", "aria-hidden": "true" });
  place.append(said, calls, tree);
  at("talk").append(place);
  try {
    await stream("/v1/chat/completions", request(), key(), running.signal, (frame) => {
      const choice = frame.choices[0];
      if (!choice) { turn.metrics = frame.metrics; return; }
      const told = frame.verispec ?? {};
      turn.content += choice.delta.content ?? "";
      if (choice.delta.tool_calls) {
        addCalls(turn.calls, choice.delta.tool_calls);
        showCalls(calls, turn.calls);
      }
      if (told.pieces) {
        showTokens(said, told, choice.logprobs?.content, tip);
        passes.push({ tokens: told.pieces.length, turn: current.turns.length });
        if (told.draft) showTree(tree, told.draft);
      }
      if (told.digest) turn.own = { digest: told.digest, seed: told.seed, profile: told.profile, receipt: told.receipt };
      if (choice.finish_reason) turn.why = reason(told, choice.finish_reason);
      showStrip(at("strip"), passes);
      at("talk").scrollTop = at("talk").scrollHeight;
    });
    turn.why = [turn.why, speed(turn.metrics)].filter(Boolean).join("; ");
  } catch (error) {
    turn.why = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null;
  at("send").hidden = false; at("stop").hidden = true;
  current.turns.push(turn);
  save();
  tree.remove();
  calls.replaceWith(...called(turn));
  place.append(...proof(turn, current.turns.length - 1));  // tokens stay tinted until the page is shown anew
  at("talk").scrollTop = at("talk").scrollHeight;
  at("text").focus();
}

function reason(told, finish) {
  const drafts = told.no_draft_reason ? `nothing was drafted: ${told.no_draft_reason}` : `${told.tokens_per_pass} tokens per pass`;
  return finish === "length" ? `${drafts}; it reached the most tokens` : drafts;
}

function speed(metrics) {
  const spec = metrics?.speculative_decoding;
  const parts = [];
  if (metrics?.tokens_per_second) parts.push(`${metrics.tokens_per_second.toFixed(1)} tokens/s`);
  if (spec) parts.push(`${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} drafted tokens accepted`);
  return parts.join(", ");
}

function tip(element, text) {
  at("tip").hidden = !element;
  if (!element) return;
  const box = element.getBoundingClientRect();
  at("tip").textContent = text;
  at("tip").style.left = `${Math.min(box.left, innerWidth - 240)}px`;
  at("tip").style.top = `${box.bottom + 4}px`;
}

async function checkFile(file) {
  at("state").textContent = `checking ${file.name} ...`;
  try {
    const [text] = replayed(await post("/verispec/replay", { receipt: JSON.parse(await file.text()) }, key()));
    at("state").textContent = `${file.name}: ${text}`;
  } catch (error) {
    at("state").textContent = `${file.name}: ${error.message}`;
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  if (!current.turns.length) current.title = text.slice(0, 40);
  current.turns.push({ role: "user", content: text });
  save();
  answer();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("ask").requestSubmit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => { if (!running) { current = begin(); save(); show(); at("text").focus(); } });
at("menu").addEventListener("click", () => {
  at("menu").setAttribute("aria-expanded", at("side").classList.toggle("open"));
});
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.classList.contains("dark") || (!document.documentElement.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
});
function setTheme(name) { document.documentElement.className = name; keep("theme", name); }
at("key").addEventListener("change", () => { sessionStorage.setItem("key", at("key").value); connect(); });
for (const id of FIELDS) {
  at(id).value = kept("settings", {})[id] ?? at(id).value;
  at(id).addEventListener("change", () => keep("settings", Object.fromEntries(FIELDS.map((each) => [each, at(each).value]))));
}
at("file").addEventListener("change", () => at("file").files[0] && checkFile(at("file").files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) checkFile(event.dataTransfer.files[0]);
  });
}
if (kept("theme", "")) document.documentElement.className = kept("theme", "");
show();
connect();

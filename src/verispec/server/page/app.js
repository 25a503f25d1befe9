// The page: conversations, kept in this browser, and what can be seen of an answer while it comes and afterwards.
import { addCalls, showCalls } from "./calls.js";
import { digestOf } from "./digest.js";
import { button, copyButton, make } from "./dom.js";
import { draftTree } from "./draft.js";
import { showMarkdown } from "./markdown.js";
import { auditButtons, factLines, replayed } from "./proof.js";
import { keep, kept, key, listDrafters, openSettings, request } from "./settings.js";
import { estimated, why, whyStopped } from "./speed.js";
import { addPass, beginAnswer } from "./strip.js";
import { get, post, stream } from "./talk.js";
import { showTokens, watchTokens } from "./tokens.js";

const at = (id) => document.getElementById(id);
const MOST_KEPT = 50;
const NEAR = 60;  // pixels from the end at which an answer is followed as it grows

let conversations = kept("conversations", []);
let current = conversations[0] ?? begin();
let running = null;
const traces = new WeakMap();  // by turn, until the page is loaded anew: the request, and the passes with their tokens

function begin() {
  const made = { title: "New conversation", turns: [] };
  conversations.unshift(made);
  conversations = conversations.slice(0, MOST_KEPT);
  return made;
}

async function connect() {
  try {
    const model = (await get("/v1/models", key())).data[0];
    listDrafters(model.verispec.drafters);
    at("state").textContent = `${model.id}, up to ${model.max_model_len} tokens, fingerprint ${model.verispec.system_fingerprint}`;
  } catch (error) {
    at("state").textContent = `${error.message} (the API key goes into the settings)`;
  }
}

function save() {
  try { keep("conversations", conversations); } catch { say("this browser can keep no more: delete some conversations"); }
  showList();
}

function say(text, good) {
  at("said").textContent = text;
  at("said").className = good === undefined ? "" : good ? "good" : "bad";
}

function isIdle() {
  if (running) say("an answer is coming: Escape stops it");
  return !running;
}

function goTo(conversation) {
  current = conversation;
  toggleMenu(false);
  show();
}

function showList() {
  at("list").replaceChildren(...conversations.map((each) => {
    const item = make("li");
    const choose = button(each.title, () => { if (isIdle()) goTo(each); });
    choose.setAttribute("aria-current", each === current);
    const remove = button("×", () => {
      if (!isIdle()) return;
      conversations = conversations.filter((other) => other !== each);
      if (each === current) current = conversations[0] ?? begin();
      save(); show(); at("new").focus();
    });
    remove.setAttribute("aria-label", `Delete ${each.title}`);
    item.append(choose, remove);
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
  const said = make("div", turn.role === "tool" ? `result: ${turn.content}` : turn.content, { class: "said" });
  place.append(said);
  if (turn.role === "user") place.append(tools(button("Edit", () => edit(place, index))));
  if (turn.role === "assistant") {
    showMarkdown(said, turn.content);
    place.append(...called(turn), ...below(turn, index, said));
  }
  return place;
}

function tools(...buttons) {
  const place = make("div", undefined, { class: "tools" });
  place.append(...buttons);
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
      if (!isIdle()) return;
      current.turns.push({ role: "tool", tool_call_id: call.id, content: input.value });
      save();
      if (open.length === 1) answer(); else show();
    });
    calls.children[turn.calls.indexOf(call)].append(form);
  }
  return [calls];
}

// The last draft, facts and buttons of an answer whose text is in `said`.
function below(turn, index, said) {
  const trace = traces.get(turn);
  const facts = make("div");
  const showFacts = () => facts.replaceChildren(...factLines(turn));
  showFacts();
  const { buttons, verdict } = auditButtons(turn, trace?.asked, key, () => { save(); showFacts(); });
  if (trace?.passes.length) buttons.push(tokensButton(turn, trace, said));
  buttons.push(copyButton("Copy", turn.content));
  if (index === current.turns.length - 1) buttons.push(button("Regenerate", () => { if (isIdle()) { current.turns.pop(); answer(); } }));
  return [...(turn.draft ? [draftTree(turn.draft)] : []), facts, tools(...buttons), verdict];
}

function tokensButton(turn, trace, said) {
  const toggle = button("Tokens", () => {
    const showing = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", showing);
    if (!showing) { showMarkdown(said, turn.content); return; }
    said.replaceChildren();
    for (const pass of trace.passes) showTokens(said, pass);
  });
  toggle.setAttribute("aria-pressed", "false");
  return toggle;
}

// Asks again from a message that is written anew; what came after it is dropped only then.
function edit(place, index) {
  if (!isIdle()) return;
  const form = make("form", undefined, { class: "edit" });
  const text = make("textarea", current.turns[index].content, { rows: "3", "aria-label": "Message, to be edited" });
  form.append(text, make("button", "Send again", { type: "submit" }), button("Cancel", show));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!text.value.trim() || !isIdle()) return;
    current.turns = current.turns.slice(0, index);
    ask(text.value.trim());
  });
  text.addEventListener("keydown", (event) => {
    sendOnEnter(event, form);
    if (event.key === "Escape") show();
  });
  place.replaceChildren(form);
  text.focus();
}

function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

function ask(text) {
  if (!current.turns.length) current.title = text.slice(0, 40);
  current.turns.push({ role: "user", content: text });
  save();
  answer();
}

// Asks the server; what comes is shown as tokens, and as text once it has ended.
async function answer() {
  const turn = { role: "assistant", content: "", calls: [] };
  const trace = { asked: undefined, passes: [] };
  running = new AbortController();
  traces.set(turn, trace);
  beginAnswer();
  say("");
  at("send").hidden = true; at("stop").hidden = false;
  show();
  const place = make("article", undefined, { class: "turn assistant" });
  const parts = { said: make("div", undefined, { class: "said" }), calls: make("div"), draft: make("div"), digest: make("p", "", { class: "growing" }) };
  place.append(...Object.values(parts));
  at("talk").append(place);
  at("talk").scrollTop = at("talk").scrollHeight;
  const last = { told: {}, finish: null, ids: [], logprobs: [] };
  try {
    trace.asked = request(current.turns);
    await stream("/v1/chat/completions", trace.asked, key(), running.signal, (frame) => {
      const talk = at("talk");
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR;
      take(frame, turn, trace, last);
      showFrame(frame, turn, trace, last, parts);
      if (follows) talk.scrollTop = talk.scrollHeight;
    });
    turn.why = why({ ...last, metrics: turn.metrics });
    turn.speedUp = estimated(trace.passes);
  } catch (error) {
    turn.why = error.name === "AbortError" ? whyStopped(trace.passes) : error.message;
  }
  running = null;
  at("send").hidden = false; at("stop").hidden = true;
  current.turns.push(turn);
  say("");
  save();
  tip(null);
  showMarkdown(parts.said, turn.content);
  place.replaceChildren(parts.said, ...called(turn), ...below(turn, current.turns.length - 1, parts.said));
  at("talk").scrollTop = at("talk").scrollHeight;
  at("text").focus();
}

// What a frame adds to an answer. `last` is what the newest frames told, and all tokens so far.
function take(frame, turn, trace, last) {
  const choice = frame.choices[0];
  if (!choice) { turn.metrics = frame.metrics; return; }
  last.told = { ...last.told, ...frame.verispec };
  last.finish = choice.finish_reason;
  turn.content += choice.delta.content ?? "";
  addCalls(turn.calls, choice.delta.tool_calls ?? []);
  if (!frame.verispec?.pieces) return;
  const { pieces, accepted, draft, digest, ms } = frame.verispec;
  const entries = choice.logprobs.content;
  trace.passes.push({ pieces, accepted, draft, entries, ms });
  last.ids.push(...choice.token_ids);
  last.logprobs.push(...entries.map((entry) => entry.logprob));
  last.digest = digestOf(last.ids, last.logprobs);
  turn.draft = draft ?? turn.draft;
  const { seed, profile, receipt } = last.told;
  if (digest) turn.own = { digest, agrees: digest === last.digest, seed, profile, receipt, fingerprint: frame.system_fingerprint };
}

function showFrame(frame, turn, trace, last, parts) {
  if (!frame.choices[0] || !frame.verispec?.pieces) return;
  if (turn.calls.length) showCalls(parts.calls, turn.calls);
  const pass = trace.passes.at(-1);
  showTokens(parts.said, pass);
  if (pass.draft) parts.draft.replaceChildren(draftTree(pass.draft));
  addPass(at("strip"), pass.pieces.length);
  parts.digest.replaceChildren("digest ", make("code", last.digest.slice(0, 16)), ` of ${last.ids.length} tokens, seed ${last.told.seed}`);
}

function tip(element, text) {
  at("tip").hidden = !element;
  if (!element) return;
  const box = element.getBoundingClientRect();
  at("tip").textContent = text;
  const { width, height } = at("tip").getBoundingClientRect();
  at("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 4))}px`;
  at("tip").style.top = `${box.bottom + height + 8 > innerHeight ? box.top - height - 4 : box.bottom + 4}px`;
}

async function checkFile(file) {
  say(`checking ${file.name} ...`);
  try {
    const [text, good] = replayed(await post("/verispec/replay", { receipt: JSON.parse(await file.text()) }, key()));
    say(`${file.name}: ${text}`, good);
  } catch (error) {
    say(`${file.name}: ${error.message}`, false);
  }
}

function toggleMenu(opens) {
  at("side").classList.toggle("open", opens);
  at("menu").setAttribute("aria-expanded", opens);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || !isIdle()) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => sendOnEnter(event, at("ask")));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.abort();
  tip(null);
  toggleMenu(false);
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => { if (isIdle()) { goTo(begin()); save(); at("text").focus(); } });
at("menu").addEventListener("click", () => toggleMenu(!at("side").classList.contains("open")));
at("talk").addEventListener("click", () => toggleMenu(false));
watchTokens(at("talk"), tip);
at("file").addEventListener("change", () => at("file").files[0] && checkFile(at("file").files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) checkFile(event.dataTransfer.files[0]);
  });
}
openSettings(connect);
show();
connect();

// The fields of the settings, kept in this browser, and the request that they make of a conversation.
import { make } from "./dom.js";

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "drafter", "schema", "tools", "tool_choice"];
const at = (id) => document.getElementById(id);

export const kept = (name, otherwise) => { try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; } };
export const keep = (name, value) => localStorage.setItem(name, JSON.stringify(value));
export const key = () => sessionStorage.getItem("key") ?? "";

export function openSettings(onKey) {
  for (const id of FIELDS) {
    at(id).value = kept("settings", {})[id] ?? at(id).value;
    at(id).addEventListener("change", () => keep("settings", Object.fromEntries(FIELDS.map((each) => [each, at(each).value]))));
  }
  at("key").addEventListener("change", () => { sessionStorage.setItem("key", at("key").value); onKey(); });
  document.documentElement.className = kept("theme", "");
  at("theme").addEventListener("click", () => {
    const shown = document.documentElement.className || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.className = shown === "dark" ? "light" : "dark";
    keep("theme", document.documentElement.className);
  });
}

export function listDrafters(names) {
  at("drafter").replaceChildren(...["", ...names].map((name) => make("option", name || "the server's default", { value: name })));
  at("drafter").value = kept("settings", {}).drafter ?? "";
}

export function request(turns) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const system = at("system").value.trim();
  const [schema, tools] = [json("schema", "the schema"), json("tools", "the list of tools")];
  const said = turns.filter(({ role, content, calls }) => role !== "assistant" || content || calls?.length);  // not what failed
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said.map(({ role, content, calls, tool_call_id }) =>
      ({ role, content, tool_call_id, tool_calls: calls?.length ? calls : undefined }))],
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    tools, tool_choice: tools && at("tool_choice").value,
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    stream: true, logprobs: true, top_logprobs: 3, return_token_ids: true, stream_options: { include_usage: true },
    verispec: { trace: true, receipt: true, ...(at("drafter").value ? { speculative: { method: at("drafter").value } } : {}) },
  };
}

function json(id, what) {
  const text = at(id).value.trim();
  try { return text ? JSON.parse(text) : undefined; } catch (error) { throw new Error(`${what} in the settings is not JSON: ${error.message}`); }
}

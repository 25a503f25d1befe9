// Calls of tools in an answer.
import { make } from "./dom.js";

// Each a block with its name and what came of its arguments so far.
export function showCalls(place, calls) {
  place.replaceChildren(...calls.map((call) => {
    const block = make("div", undefined, { class: "call", role: "group", "aria-label": `Call of ${call.function.name}` });
    const label = make("p", "calls ");
    label.append(make("code", call.function.name));
    block.append(label, make("pre", call.function.arguments));
    return block;
  }));
}

// A delta of a stream into the calls so far.
export function addCalls(calls, deltas) {
  for (const { index, function: { name, arguments: text }, id } of deltas) {
    calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    calls[index].function.arguments += text;
  }
}

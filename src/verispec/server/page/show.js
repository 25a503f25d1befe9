// Writes answers: tokens by where they came from, markdown once an answer is complete. Sets text, never HTML.

export function make(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export function button(text, onClick) {
  const element = make("button", text, { type: "button" });
  element.addEventListener("click", onClick);
  return element;
}

// The tokens of one frame: accepted ones are tinted, rejected ones struck out in their place.
export function showTokens(place, told, entries, tip) {
  told.pieces.forEach((text, i) => {
    if (!text) return;
    const drafted = i < told.accepted;
    const token = make("span", text, { class: `token ${drafted ? "drafted" : "own"}` });
    const entry = entries?.[i];
    if (entry) {
      const lines = [entry, ...entry.top_logprobs].map((e) => `${Math.exp(e.logprob).toFixed(3)}  ${JSON.stringify(e.token)}`);
      token.addEventListener("mouseenter", () => tip(token, [drafted ? "drafted" : "the model's own", ...lines].join("\n")));
      token.addEventListener("mouseleave", () => tip(null));
    }
    place.append(token);
  });
  if (told.rejected?.length) place.append(make("del", told.rejected.slice(0, 8).join(""), { class: "rejected" }));
}

// The calls of tools in an answer, each a block with its name and what came of its arguments so far.
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

// A draft as lines: who drafted it; each node under its parent, with both probabilities; the accepted path is bold.
export function showTree(place, draft) {
  place.replaceChildren();
  const children = (parent) => draft.tokens.map((_, i) => i).filter((i) => draft.parents[i] === parent);
  const write = (node, depth) => {
    const share = (list) => (list[node] === undefined ? "" : list[node].toFixed(2));
    const [q, p] = [share(draft.draft_probabilities), share(draft.target_probabilities)];
    const line = `${"  ".repeat(depth)}${JSON.stringify(draft.tokens[node])}${q && `  draft ${q}`}${p && `  target ${p}`}`;
    place.append(make(draft.path.includes(node) ? "b" : "span", line), "\n");
    children(node).forEach((child) => write(child, depth + 1));
  };
  place.append(make("span", `drafted by ${draft.drafter}`), "\n");
  children(-1).forEach((root) => write(root, 0));
}

// Bars of the last passes, as high as they committed tokens.
export function showStrip(canvas, passes) {
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  passes.slice(-200).forEach(({ tokens, turn }, i) => {
    const height = Math.min(canvas.height, 4 + 4 * tokens);
    pen.fillStyle = `hsl(${(205 + 67 * turn) % 360} 55% 50%)`;
    pen.fillRect(i * 4, canvas.height - height, 3, height);
  });
}

// Paragraphs, code blocks with a button to copy, inline code, bold: what small models write.
export function showMarkdown(place, text) {
  place.replaceChildren();
  text.split(/^```/m).forEach((part, i) => {
    if (i % 2) {
      const code = part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "");
      const block = make("pre");
      block.tabIndex = 0;
      block.append(make("code", code));
      place.append(block, button("Copy code", () => navigator.clipboard.writeText(code)));
    } else {
      for (const piece of part.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
        if (/^`.+`$/.test(piece)) place.append(make("code", piece.slice(1, -1)));
        else if (/^\*\*.+\*\*$/.test(piece)) place.append(make("strong", piece.slice(2, -2)));
        else place.append(piece);
      }
    }
  });
}

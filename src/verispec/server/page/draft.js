// A draft as a tree, from left to right: each node with both probabilities, the accepted path marked.
import { inLine, make } from "./dom.js";

export function draftTree(draft) {
  const { drafter, tokens, parents, path } = draft;
  const tree = make("div", undefined, { class: "tree", role: "group", "aria-label": "Tree of the draft", tabindex: "0" });
  const share = (name, values, node) => (values[node] === undefined ? [] : [make("small", `${name} ${values[node].toFixed(2)}`)]);
  let lastRow = 1;
  const add = (node, depth, rowAbove) => {
    const row = lastRow;
    const line = make("span", undefined, { class: "line", "aria-hidden": "true" });
    place(line, depth, `${rowAbove} / ${row + 1}`);
    const taken = path.includes(node);
    const box = make("div", undefined, { class: taken ? "node accepted" : "node dropped" });
    box.append(make("code", inLine(tokens[node])), make("span", taken ? " accepted" : " rejected", { class: "hidden" }),
      ...share("draft", draft.draft_probabilities, node), ...share("target", draft.target_probabilities, node));
    place(box, depth, row);
    tree.append(line, box);
    addBelow(node, depth + 1, row);
  };
  // The first child goes on in its parent's row, every other one begins a row.
  const addBelow = (node, depth, row) => parents.map((_, i) => i).filter((i) => parents[i] === node).forEach((child, i) => {
    lastRow += i ? 1 : 0;
    add(child, depth, row);
  });
  addBelow(-1, 1, 1);
  const whole = make("details", undefined, { class: "draft", open: "" });
  whole.append(make("summary", `The last draft, by ${drafter}: ${path.length} of ${tokens.length} tokens accepted`), tree);
  return whole;
}

function place(element, column, row) {
  element.style.gridColumn = column;
  element.style.gridRow = row;
}

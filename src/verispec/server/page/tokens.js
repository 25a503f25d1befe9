// Tokens by where they came from. A pass is what one frame tells: `pieces` of text, of which the first `accepted` were
// drafted, the `draft` they are from, and `entries` of log-probabilities.
import { inLine, make } from "./dom.js";

const MOST_STRUCK = 8;
const tips = new WeakMap();  // what there is to tell of a token, by its element

export function showTokens(place, { pieces, accepted, draft, entries }) {
  const struck = draft ? rejected(draft) : [];
  pieces.forEach((text, i) => {
    for (const tokens of struck[i] ?? []) place.append(make("del", shortened(tokens), { class: "rejected" }));
    if (!text) return;
    const drafter = i < accepted ? draft.drafter : "";
    const token = make("span", text, { class: drafter ? `token drafted by-${drafter}` : "token own", tabindex: place.querySelector(".token") ? "-1" : "0" });
    tips.set(token, [drafter ? `drafted by ${drafter}, accepted` : "the model's own", ...likeliest(entries[i])].join("\n"));
    place.append(token);
  });
}

// What the draft had for each token of the pass and the model did not take: every branch, to its end.
function rejected({ tokens, parents, path }) {
  const branches = (node) => {
    const next = parents.flatMap((parent, i) => (parent === node ? branches(i) : []));
    return (next.length ? next : [[]]).map((rest) => [tokens[node], ...rest]);
  };
  return [-1, ...path].map((above) => parents.flatMap((parent, i) => (parent === above && !path.includes(i) ? branches(i) : [])));
}

function shortened(tokens) {
  const text = inLine(tokens.slice(0, MOST_STRUCK).join(""));
  return tokens.length > MOST_STRUCK ? `${text}…` : text;
}

function likeliest(entry) {
  const others = entry.top_logprobs.filter(({ token }) => token !== entry.token);
  return [entry, ...others].sort((a, b) => b.logprob - a.logprob).map((each) =>
    `${each === entry ? "▸" : " "} ${Math.exp(each.logprob).toFixed(3)}  "${inLine(each.token)}"`);
}

// Shows what there is to tell of the token that is pointed at, tapped or focused; arrow keys go through those of its answer.
export function watchTokens(place, tip) {
  const show = ({ target }) => tip(tips.has(target) ? target : null, tips.get(target));
  const around = (token) => [...token.closest(".said").querySelectorAll(".token")];
  const showFocused = () => show({ target: document.activeElement });
  place.addEventListener("mousemove", show);  // not mouseover, which scrolling causes too
  place.addEventListener("mouseout", showFocused);
  place.addEventListener("scroll", showFocused);
  place.addEventListener("focusout", () => tip(null));
  place.addEventListener("focusin", (event) => {
    if (!tips.has(event.target)) return;
    for (const token of around(event.target)) token.setAttribute("tabindex", token === event.target ? "0" : "-1");
    show(event);
  });
  place.addEventListener("keydown", (event) => {
    if (!tips.has(event.target)) return;
    const all = around(event.target);
    const at = all.indexOf(event.target);
    const next = all[{ ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

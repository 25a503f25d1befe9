// Elements, made from text and never from HTML.

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

// A token on one line.
export function inLine(text) { return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥"); }

export function copyButton(label, text) {
  const element = button(label, async () => {
    await copy(text);
    element.textContent = "Copied";
    setTimeout(() => { element.textContent = label; }, 1500);
  });
  return element;
}

// Plain http on another host has no navigator.clipboard: there the old command copies a selection.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", text, { class: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

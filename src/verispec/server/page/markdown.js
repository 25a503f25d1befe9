// Markdown as small models write it: headings, lists, code with a button to copy, emphasis. Links stay text.
import { copyButton, make } from "./dom.js";

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*|\[[^\]\n]+\]\([^)\s]+\))/;

export function showMarkdown(place, text) {
  place.replaceChildren();
  text.split(/^ {0,3}```/m).forEach((part, i) => {
    if (i % 2) place.append(codeBlock(part)); else addBlocks(place, part);
  });
}

function codeBlock(part) {
  const [language, ...lines] = part.split("\n");
  const code = lines.join("\n").replace(/\n$/, "");
  const block = make("div", undefined, { class: "code" });
  const bar = make("div", language.trim() || "code", { class: "bar" });
  const body = make("pre", undefined, { tabindex: "0" });
  bar.append(copyButton("Copy code", code));
  body.append(make("code", code));
  block.append(bar, body);
  return block;
}

function addBlocks(place, text) {
  let paragraph = [];
  let lists = [];
  const end = () => {
    if (paragraph.length) addInline(place.appendChild(make("p")), paragraph.join("\n"));
    paragraph = [];
  };
  for (const line of text.replaceAll("\t", "    ").split("\n")) {
    const heading = line.match(/^#{1,6} +(.*)$/);
    const item = line.match(/^( *)([-*+]|\d{1,9}[.)]) +(.*)$/);
    if (item) {
      end();
      addItem(place, lists, item);
    } else if (!line.trim()) {
      end();
    } else if (lists.length && line.startsWith(" ")) {
      addInline(lists.at(-1).list.lastElementChild, `\n${line.trim()}`);
    } else {
      lists = [];
      if (!heading) { paragraph.push(line); continue; }
      end();
      addInline(place.appendChild(make("h2")), heading[1]);
    }
  }
  end();
}

// `lists` are the open ones, outermost first.
function addItem(place, lists, [, indent, mark, text]) {
  const [depth, name] = [indent.length, /\d/.test(mark) ? "ol" : "ul"];
  while (lists.length && (lists.at(-1).depth > depth || (lists.at(-1).depth === depth && lists.at(-1).list.localName !== name))) lists.pop();
  if (!lists.length || lists.at(-1).depth < depth) {
    const list = make(name, undefined, name === "ol" ? { start: parseInt(mark, 10) } : {});
    (lists.at(-1)?.list.lastElementChild ?? place).append(list);
    lists.push({ depth, list });
  }
  addInline(lists.at(-1).list.appendChild(make("li")), text);
}

function addInline(place, text) {
  for (const piece of text.split(INLINE)) {
    const link = piece.match(/^\[([^\]\n]+)\]\(([^)\s]+)\)$/);
    if (link) place.append(`${link[1]} (${link[2]})`);
    else if (/^`.+`$/.test(piece)) place.append(make("code", piece.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(piece)) place.append(make("strong", piece.slice(2, -2)));
    else if (/^\*[^*]+\*$/.test(piece)) place.append(make("em", piece.slice(1, -1)));
    else if (piece) place.append(piece);
  }
}

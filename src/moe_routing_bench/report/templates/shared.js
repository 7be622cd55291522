// What all scripts of a page share: elements, numbers as texts, tables.
const byId = id => document.getElementById(id);
const at = (packed, row) => "all" in packed ? packed.all : "each" in packed ? packed.each[row] : packed.of[packed.at[row]];
const dash = "–";
// The number that differs from another by so many units of the last of its five digits.
function beside(by, other) {
  if (by === null) return null;
  const [digits, exponent] = other.toExponential(4).split("e");
  return Number(Number(`${Math.round(Number(digits) * 10000) + by}e${exponent - 4}`).toPrecision(5));
}
function text(held) {
  if (held === null) return dash;
  if (typeof held === "object") return Object.entries(held).map(([name, one]) => `${name} ${text(one)}`).join(", ");
  return typeof held === "number" && Math.abs(held) >= 10000 ? held.toLocaleString("en-US", {maximumFractionDigits: 0}) : String(held);
}
function brief(held, stem) {
  if (stem && held !== null) return held.replace(/^.*\//, "").replace(/\.[^.]*$/, "");
  return text(typeof held === "number" && !Number.isInteger(held) ? Number(held.toPrecision(4)) : held);
}
// Numbers with as many decimals as the one of them that needs most, such as a median and its ends, which have five digits where four would make them equal; other values as they are said alone.
function alike(held) {
  const few = held.map(one => brief(one)), said = new Set(few).size === 1 && new Set(held).size > 1 ? held.map(text) : few;
  if (!held.every(one => typeof one === "number") || said.some(one => /[^0-9.-]/.test(one))) return said;
  const decimals = Math.max(...said.map(one => (one.split(".")[1] ?? "").length));
  return said.map(one => Number(one).toFixed(decimals));
}
function element(tag, content = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = content;
  for (const [name, one] of Object.entries(attributes)) made.setAttribute(name, one);
  return made;
}
const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, said) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, one] of Object.entries(attributes)) made.setAttribute(name, one);
  if (said) made.append(Object.assign(document.createElementNS(SVG, "title"), {textContent: said}));
  return made;
}
const share = one => one === null ? dash : `${(100 * one).toPrecision(3)} %`;
// A ratio with its interval, in three digits or in as many as it takes to tell its ends from each other, and from a 1 that is not between them, five at most.
function timesText({ratio, low, high}) {
  const apart = low <= 1 && 1 <= high ? [low, high] : [1, low, high], told = most => new Set(apart.map(one => one.toPrecision(most))).size === new Set(apart).size;
  const digits = low === null || low === undefined ? 3 : [3, 4].find(told) ?? 5;
  const said = one => Number(one.toPrecision(digits)) >= 10 ** digits ? one.toFixed(0) : one.toPrecision(digits);  // no exponent
  return `${said(ratio)}x` + (low === null || low === undefined ? "" : ` [${said(low)}, ${said(high)}]`);
}
// A text in which names that are longer than usual may break behind their underscores, and intervals nowhere.
function breaking(made, text, usual = 24) {
  const name = one => one.length > usual ? one.split(/(?<=_)/).flatMap((part, i) => i ? [element("wbr"), part] : [part]) : [one];
  const names = text => text.split(/(\w+)/).flatMap(name);
  made.append(...text.split(/(\[[^\]]*\])/).flatMap((part, i) => i % 2 ? [element("span", part, {class: "nobreak"})] : names(part)));
  return made;
}
function tableOf(label, heads, lines) {
  const box = element("div", "", {class: "scroll whole", tabindex: 0, role: "region", "aria-label": label}), made = element("table"), head = element("tr"), rows = element("tbody");
  head.append(...heads.map(text => element("th", text, {scope: "col"})));
  rows.append(...lines.map(cells => {
    const line = element("tr");
    line.append(...cells.map(one => {
      const cell = element("td");
      cell.append(one);
      return cell;
    }));
    return line;
  }));
  made.append(element("thead"), rows);
  made.tHead.append(head);
  box.append(made);
  return box;
}
function time(row) {
  if (row.ci_low_us === null) return brief(row.median_us);
  const [median, low, high] = alike([row.median_us, row.ci_low_us, row.ci_high_us].map(one => Number(one.toPrecision(5))));
  return `${median} [${low}, ${high}]`;
}
function small(...content) {
  const made = element("p", "", {class: "small"});
  made.append(...content);
  return made;
}

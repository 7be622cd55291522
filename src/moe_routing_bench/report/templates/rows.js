// The table of rows: what it shows, in which order, what a row opens to, and the part of the address that says so. A row is its place in `page`, which unpack.js has unpacked.
const value = (row, name) => "near" in page.values[name] ? beside(page.values[name].by[row], value(row, page.values[name].near)) : at(page.values[name], row);
const table = byId("rows"), body = table.tBodies[0], inOrder = new Intl.Collator();
let heads = [...table.tHead.rows[0].cells];

function shownIn(column, row) {
  const [first, low, high] = column.stem ? column.fields.map(name => brief(value(row, name), true)) : alike(column.fields.map(name => value(row, name)));
  return low === undefined || low === dash ? first : `${first} [${low}, ${high}]`;
}
{% include "filter.js" %}
const lines = new Map(), chosenRows = [];  // of a row: its line; rows to compare
let sortedBy = null, way = 1, shown = [];
{% include "lines.js" %}

function lineOf(row) {
  if (lines.has(row)) return lines.get(row);
  const line = element("tr", "", {id: `row-${page.ids[row]}`, class: value(row, "status") === "ok" ? "" : "bad"});
  page.columns.forEach((column, i) => {
    const cell = element("td", shownIn(column, row), {class: heads[i].className});
    if (i === 0) cell.prepend(opener(row), chooserOf(row));
    line.append(cell);
  });
  lines.set(row, line);
  return line;
}
function opener(row) {
  const button = element("button", "", {type: "button", class: "open", "aria-expanded": String(opened.has(row)), "aria-label": `details of ${value(row, "implementation")}, ${value(row, "cell")}`});
  button.onclick = () => open(row, !opened.has(row));
  return button;
}
function open(row, wanted) {
  lineOf(row).querySelector(".open").setAttribute("aria-expanded", String(wanted));
  if (wanted && !opened.has(row)) {
    opened.set(row, detail(row));
    if (lineOf(row).isConnected) lineOf(row).after(opened.get(row));
  } else if (!wanted && opened.has(row)) {
    opened.get(row).remove();
    opened.delete(row);
  }
}
function detail(row) {
  const line = element("tr", "", {class: "detail"}), cell = element("td", "", {colspan: page.columns.length}), all = element("div");
  const command = at(page.commands, row), copy = element("button", "copy", {type: "button"});
  copy.hidden = !navigator.clipboard;
  copy.onclick = () => navigator.clipboard.writeText(command);
  const first = element("p", "Measure it again, with today's settings: ");
  first.append(element("code", command), " ", copy);
  const second = element("p");
  second.append(element("a", "link to this row", {href: `#row-${page.ids[row]}`}));
  all.append(first, second, strip(row), groupsOf(row));
  cell.append(all);
  line.append(cell);
  return line;
}
function groupsOf(row) {
  const groups = element("div", "", {class: "groups"}), lists = new Map();
  for (const field of page.fields) {
    const held = value(row, field.name);
    if (held === null) continue;
    if (!lists.has(field.group)) {
      lists.set(field.group, element("dl"));
      const section = element("section");
      section.append(element("h4", field.group), lists.get(field.group));
      groups.append(section);
    }
    lists.get(field.group).append(element("dt", field.name, {title: field.says}), element("dd", text(held)));
  }
  return groups;
}
function compare(a, b) {
  const [x, y] = [a, b].map(row => value(row, page.columns[sortedBy].fields[0]));
  if (x === null || y === null) return (x === null) - (y === null);
  return way * (typeof x === "number" && typeof y === "number" ? x - y : inOrder.compare(text(x), text(y)));
}
function draw() {
  const {tests, problems} = parsed(byId("filter").value);
  shown = page.ids.map((_, row) => row).filter(row => tests.every(test => test(row)));
  if (sortedBy !== null) shown.sort(compare);
  heads.forEach((head, i) => head.setAttribute("aria-sort", i !== sortedBy ? "none" : way > 0 ? "ascending" : "descending"));
  placeOf = new Map(shown.map((row, place) => [row, place]));
  heads.forEach(head => { head.style.minWidth = ""; });
  table.setAttribute("aria-rowcount", shown.length + 1);
  scroller.scrollTop = 0;
  layOut();
  byId("paper").textContent = shown.length > onPaper ? `The first ${onPaper} of these ${shown.length} rows.` : "";
  byId("count").textContent = `${shown.length} of ${page.ids.length} rows`;
  byId("problem").textContent = [...(problems.length ? [`Left out of the filter: ${problems.join("; ")}.`] : []), ...unknown.map(name => `No column is called ${name}.`)].join(" ");
  table.style.setProperty("--first", `${heads[0].offsetWidth}px`);
}
// The address: #rows?filter=…&sort=…&columns=… is a state of the table, #row-… one row, opened.
function remember() {
  const state = new URLSearchParams();
  if (byId("filter").value) state.set("filter", byId("filter").value);
  if (sortedBy !== null) state.set("sort", (way < 0 ? "-" : "") + page.columns[sortedBy].name);
  if (!isUsual()) state.set("columns", page.columns.slice(2).map(column => column.name).join(","));
  history.replaceState(null, "", `#rows?${state}`);
}
function ask(filter, sort = "") {
  byId("filter").value = filter;
  const place = page.columns.findIndex(column => column.name === sort.replace(/^-/, ""));
  [sortedBy, way] = [place < 0 ? null : place, sort.startsWith("-") ? -1 : 1];
  draw();
}
function follow() {
  if (location.hash.startsWith("#rows?")) {
    const state = new URLSearchParams(location.hash.slice("#rows?".length));
    setColumns(state.get("columns")?.split(",") ?? atFirst.map(column => column.name));
    ask(state.get("filter") ?? "", state.get("sort") ?? "");
    byId("all-rows").scrollIntoView();
  } else if (location.hash.startsWith("#row-")) {
    const row = page.ids.indexOf(location.hash.slice("#row-".length));
    if (row < 0) return void (byId("problem").textContent = "This report has no row of that link.");
    if (!shown.includes(row)) ask("");
    reveal(row);
    open(row, true);
    lineOf(row).scrollIntoView({block: "start"});
    lineOf(row).querySelector(".open").focus({preventScroll: true});
  }
}
function csv(rows) {
  const quoted = held => /[",\n\r]/.test(held) ? `"${held.replaceAll('"', '""')}"` : held;
  const plain = held => held === null ? "" : typeof held === "object" ? JSON.stringify(held) : String(held);
  const line = cells => cells.map(quoted).join(",") + "\r\n";
  const head = ["id", ...page.fields.map(f => f.name), "command"];
  return [head, ...rows.map(row => [page.ids[row], ...page.fields.map(f => plain(value(row, f.name))), at(page.commands, row)])].map(line).join("");
}
byId("csv").onclick = () => {
  const link = element("a", "", {download: "rows.csv", href: URL.createObjectURL(new Blob([csv(shown)], {type: "text/csv"}))});
  link.click();
  URL.revokeObjectURL(link.href);
};
function sortable(head, column) {
  if (holdsNumbers.get(column.fields[0])) head.classList.add("n");
  head.querySelector("button").onclick = () => {
    const place = page.columns.indexOf(column);
    [way, sortedBy] = [sortedBy === place ? -way : 1, place];
    draw();
    remember();
  };
}
page.columns.forEach((column, i) => sortable(heads[i], column));
{% include "columns.js" %}
for (const bench of new Set(page.ids.map((_, row) => value(row, "bench")))) {
  const button = element("button", bench, {type: "button"});
  button.onclick = () => { ask(`bench=${bench}`); remember(); };
  byId("benches").append(button, " ");
}
byId("filter").oninput = draw;
byId("filter").onchange = remember;  // not with every key: browsers refuse that many changes of the address
window.onhashchange = () => { follow(); followComparison(); };
draw();
whenLoaded(() => { follow(); followComparison(); });  // not before: pictures that come late would move what it scrolls to

// Which columns the table has: at first those of the page; any field that a row opens to can be one. The address keeps a choice as columns=….
const atFirst = page.columns, keysOf = atFirst.slice(0, 2), headOf = new Map(atFirst.map((column, i) => [column.name, heads[i]]));
const possible = new Map([...page.fields.map(field => [field.name, {name: field.name, fields: [field.name], stem: false}]), ...atFirst.map(column => [column.name, column])]);
let unknown = [];  // columns of the address that no field is called

function setColumns(names) {
  const sorted = sortedBy === null ? null : page.columns[sortedBy].name;
  unknown = names.filter(name => !possible.has(name));
  page.columns = [...keysOf, ...[...new Set(names)].map(name => possible.get(name)).filter(column => column && !keysOf.includes(column))];
  heads = page.columns.map(column => headOf.get(column.name) ?? newHead(column.name));
  heads.forEach(head => { head.style.minWidth = ""; });
  table.tHead.rows[0].replaceChildren(...heads);
  table.classList.toggle("chosen", !isUsual());
  sortedBy = heads.findIndex((_, i) => page.columns[i].name === sorted);
  if (sortedBy < 0) [sortedBy, way] = [null, 1];
  lines.clear();
  opened.forEach(made => { made.cells[0].colSpan = heads.length; });
  tickColumns();
}
const isUsual = () => page.columns.length === atFirst.length && page.columns.every((column, i) => column === atFirst[i]);
function newHead(name) {
  const head = element("th", "", {scope: "col", "aria-sort": "none", title: page.fields.find(field => field.name === name).says});
  head.append(element("button", name, {type: "button"}));
  sortable(head, possible.get(name));
  headOf.set(name, head);
  return head;
}
// A box per column that the table has, or has at first; the others can be added.
function tickColumns() {
  const names = new Set(page.columns.map(column => column.name)), boxes = byId("ticks");
  for (const name of [...atFirst.slice(2).map(column => column.name), ...names]) {
    if (keysOf.some(column => column.name === name) || boxes.querySelector(`[value="${name}"]`)) continue;
    const label = element("label"), box = element("input", "", {type: "checkbox", value: name});
    box.onchange = () => chooseColumns(box.checked ? [...page.columns.map(column => column.name), name] : page.columns.map(column => column.name).filter(one => one !== name));
    label.append(box, ` ${name}`);
    boxes.append(label);
  }
  boxes.querySelectorAll("input").forEach(box => { box.checked = names.has(box.value); });
  byId("usual").hidden = isUsual();
}
// In the order of the page, and what was added after it in the order in which it was.
function chooseColumns(names) {
  const first = atFirst.map(column => column.name).filter(name => names.includes(name));
  setColumns([...first, ...names.filter(name => !first.includes(name))]);
  const top = scroller.scrollTop;
  draw();
  scroller.scrollTop = top;
  scrolled();
  remember();
}
const offered = new Map();
for (const field of page.fields.filter(one => !atFirst.some(column => column.name === one.name))) {
  if (!offered.has(field.group)) { offered.set(field.group, element("optgroup", "", {label: field.group})); byId("more-columns").append(offered.get(field.group)); }
  offered.get(field.group).append(element("option", field.name, {value: field.name}));
}
byId("more-columns").onchange = event => {
  chooseColumns([...page.columns.map(column => column.name), event.target.value]);
  event.target.value = "";
};
byId("usual").onclick = () => { chooseColumns(atFirst.map(column => column.name)); byId("columns").querySelector("summary").focus(); };
tickColumns();

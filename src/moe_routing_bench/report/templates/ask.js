// The form above the findings: what is asked stands in the address, and answer.js answers from the rows of the table.
const asks = page.questions;
const card = row => value(row, "gpu_uuid") ?? `host ${value(row, "host")}`;
const fieldsRead = ["bench", "cell", "implementation", "status", "reason", "median_us", "ci_low_us", "ci_high_us", "suspect", "suspect_reason", "converged", "cold", "timer", "graph_node_us",
  "roofline_us", "baseline", "verdict", "speedup", "speedup_ci_low", "speedup_ci_high", "best_other", "best_verdict", "best_speedup", "best_speedup_ci_low", "best_speedup_ci_high"];
const cells = cellsOf(page.ids.map((_, place) => {
  const row = Object.fromEntries(fieldsRead.map(name => [name, value(place, name)]));
  const read = (asks.reads[row.bench] ?? []).map(name => [name, value(place, name)]);
  return {...row, place, card: card(place), axes: Object.fromEntries(read)};
}));

// The form: "" is any, or none where an axis has no limit.
function field(axis) {
  if (axis.scale === "name") {
    const usual = axis.follows ? [["", `as ${axis.follows}`]] : axis.free ? [["", "any"]] : axis.default ? [] : [["", "none"]];
    const names = [...new Set([...(axis.default && !axis.free ? [axis.default] : []), ...axis.known, ...modelValues(axis.name)])];
    return control(axis.name, axis.label, axis.says, chooser([...usual, ...names.map(one => [one, brief(one, axis.name === "trace")])]));
  }
  return numberControl(axis, axis.known, axis.none ? "none" : "any");
}
function modelValues(name) { return Object.values(asks.models).map(sizes => sizes[name]).filter(one => typeof one === "string"); }
function build() {
  const stages = Object.keys(asks.reads).map(name => [name, asks.measured.includes(name) ? name : `${name} (not measured)`]);
  const models = [["", "sizes of my own"], ...Object.keys(asks.models).map(name => [name, name])];
  const more = element("details"), rest = element("div", "", {class: "controls"});
  more.append(element("summary", "more"), rest);
  form.append(control("bench", "stage", "bench", chooser(stages)), control("model", "model", "its sizes and routing rule", chooser(models)));
  asks.axes.filter(axis => axis.name !== "model").forEach(axis => (axis.first ? form : rest).append(field(axis)));
  form.append(more);
  form.oninput = event => {
    refused = [];
    if (event.target.name === "model") takeModel();
    else if (controls.get("model").value && event.target.name in asks.models[controls.get("model").value]) controls.get("model").value = "";
    answer();
  };
  form.onchange = () => history.replaceState(null, "", `#ask?${state()}`);
}
function takeModel() {
  const sizes = asks.models[controls.get("model").value] ?? {};
  for (const [name, one] of Object.entries(sizes)) if (controls.has(name) && one !== null) controls.get(name).value = one;
}
function state() {
  return new URLSearchParams([...controls].map(([name, made]) => [name, made.value]).filter(([name, one]) => one !== usual(name)));
}
function usual(name) {
  const axis = asks.axes.find(one => one.name === name);
  return axis && !axis.free && !axis.follows && axis.default !== null ? String(axis.default) : "";
}
// Whether a control can hold a value of the address, which may be of a newer report, or mistyped.
function takes(name, one) {
  const made = controls.get(name);
  return made?.options ? [...made.options].some(option => option.value === one) : Boolean(made) && (one === "" || canBe(name, one));
}
let refused = [];
// A state of the address; a name that it leaves out has its default, and the sizes that a model has need not be said.
function restore(all) {
  const given = new URLSearchParams([...all].filter(([name, one]) => takes(name, one)));
  refused = [...all].filter(([name, one]) => !takes(name, one)).map(([name, one]) => `${name} ${one}`);
  for (const [name, made] of controls) made.value = given.get(name) ?? usual(name);
  if (given.get("bench") === null) controls.get("bench").value = asks.measured.at(-1) ?? "";
  takeModel();
  for (const [name, made] of controls) if (given.has(name)) made.value = given.get(name);
  answer();
}
function question() {
  const asked = {bench: controls.get("bench").value};
  for (const {name, scale, free, none} of asks.axes) {
    const held = controls.get(name).value;
    if (held) asked[name] = scale === "name" ? held : Number(held);
    else if (scale === "name" ? !free : none) asked[name] = null;  // none, or as the axis that it follows
  }
  return asked;
}

const sentence = text => text.startsWith("the ") ? `The ${text.slice(4)}` : text;  // but names of implementations are as they are
const axisOf = name => asks.axes.find(axis => axis.name === name);
const spell = (name, one) => one === null ? "none" : Number.isInteger(one) ? String(one) : brief(one, name === "trace");
function named(cell, without = []) {
  const said = asks.axes.filter(({name, default: usual, follows}) => name in cell.axes && !without.includes(name) && cell.axes[name] !== null
    && (axisOf(name).scale === "log" || cell.axes[name] !== (follows ? cell.axes[follows] : usual) || name === "dtype"));
  return said.map(axis => `${axis.label}${axis.label.length === 1 ? "=" : " "}${spell(axis.name, cell.axes[axis.name])}`).join(", ");
}
function gapText(gap) {
  const by = gap.scale === "log" ? `, ${Number(gap.octaves.toPrecision(2))} octave${gap.octaves === 1 ? "" : "s"} away` : "";
  return `${axisOf(gap.name).label} ${spell(gap.name, gap.held)}, not ${spell(gap.name, gap.asked)}${by}`;
}
function against(pair) {
  if (pair === undefined) return dash;
  if (pair === null) return "not stored";
  return `${timesText(pair)} as fast as ${pair.other} (${pair.verdict ?? "no verdict"})`;
}
// The same in a table, where it may take more lines: all columns fit beside the findings.
const againstIn = pair => pair ? breaking(element("span", "", {class: "verdict"}), against(pair)) : against(pair);
const toRow = (row, text) => breaking(element("a", "", {href: `#row-${page.ids[row.place]}`}), text);
function answer() {
  byId("shown").replaceChildren();
  guarded("#said", answerNow);
}
function answerNow() {
  const asked = question(), read = asks.reads[asked.bench] ?? [];
  for (const [name, made] of controls) if (!["bench", "model"].includes(name)) made.parentElement.hidden = !read.includes(name);
  const wrong = read.filter(name => typeof asked[name] === "number" && !canBe(name, asked[name])).map(name => `${axisOf(name).label} cannot be ${asked[name]}.`);
  const found = wrong.length ? [] : nearest(cells, asked, asks.axes, asks.rule);
  const far = found.length && found[0].octaves > asks.rule.far;
  byId("shown").append(...(far ? [nextNearest(found)] : found.length ? parts(found) : []));
  if (wrong.length) byId("said").textContent = wrong.join(" ");
  else if (!found.length) byId("said").replaceChildren(`Not measured: this run has no row of ${asked.bench || "any stage"} with a time.`, ...elsewhere());
  else if (far) byId("said").replaceChildren(element("span", `Not measured: the nearest cell of this run has ${found[0].gaps.map(gapText).join("; ")}.`, {id: "near"}), ` A cell more than ${asks.rule.far} octaves away, or of another format, does not answer.`, ...elsewhere());
  if (refused.length) byId("said").append(` Left out of the question, because this report does not know it: ${refused.join(", ")}.`);
}
// The same question to the other runs of this platform.
function elsewhere() {
  return [...byId("scope").querySelectorAll("a")].flatMap((run, i) => [i ? ", " : " Ask another run: ", element("a", run.textContent, {href: `${run.getAttribute("href")}#ask?${state()}`})]);
}
function parts([first, ...others]) {
  const {cell, gaps} = first, order = ranked(cell), {said} = winner(cell);
  const how = gaps.length ? `Not measured as asked. The nearest cell is ${named(cell)}: ${gaps.map(gapText).join("; ")}.` : `Measured as asked: ${named(cell)}.`;
  byId("said").replaceChildren(element("strong", `${gaps.length ? `In the nearest cell, ${said}` : sentence(said)}.`), " ", element("span", how, {id: "near"}));
  const heads = ["implementation", "µs [95 %]", "marks", "share of the limit", "against the best other", "against the next"];
  const rows = order.map(({row, limit, next, best}) => [
    toRow(row, row.implementation), time(row), marks(row), limit ? `${share(limit.share)} (${limit.binds})` : dash, againstIn(best), againstIn(next)]);
  return [tableOf("Implementations, fastest first", heads, rows), small(...notes(cell)), ...overTokens(cell), ...overWorkload(cell, order[0].row), nextNearest(others)];
}
const marks = row => doubts(row).length ? element("span", doubts(row).join(", "), {class: "marks"}) : dash;
function notes(cell) {
  const failed = cell.rows.filter(row => row.status !== "ok").map(row => `${row.implementation} ${row.status}: ${row.reason ?? "no reason recorded"}`);
  const why = reasons(cell.rows), order = ranked(cell), pairs = order.flatMap(({best, next}) => [best, next]);
  return [`A ratio above 1: the row is the faster one.${timed(cell).some(limitOf) ? " The limit is the larger of the roofline and of what an empty node of a CUDA graph takes." : ""}`,
    why.length ? ` Suspect: ${why.join("; ")}.` : "", order.some(({row}) => row.converged === false) ? " Not converged: a limit was reached before the interval was as narrow as asked." : "",
    order.some(({row}) => warm(row)) ? " L2 may be warm: what calls read before inputs come round again is less than four times as large." : "",
    pairs.some(pair => pair && !pair.verdict) ? " No verdict: too few implementations of the run were entered twice to know its noise." : "",
    order.length > 2 && pairs.includes(null) ? " Not stored: rows hold their ratio to the best other and to the baseline; ⇄ in two rows of the table compares these." : "",
    failed.length ? ` Without a time: ${failed.join("; ")}.` : ""];
}
function overTokens(cell) {
  const {steps, changes} = along(cells, cell), made = [element("h3", "Over T"), element("p", changes.join(" "), {id: "changes"})];
  if (steps.length < 2) return made;
  return [...made, tableOf("Fastest at each number of tokens", ["T", "rows of", "fastest", "µs [95 %]", "marks", "against the best other"], steps.map(step => {
    const [{row, best}] = ranked(step.cell);
    return [link(step.cell, String(step.tokens)), [value(row.place, "model"), row.axes.phase].filter(Boolean).join(", "), toRow(row, row.implementation), time(row), marks(row), againstIn(best)];
  }))];
}
// What skew and a capacity limit cost the fastest implementation, on its card.
function overWorkload(cell, {implementation}) {
  return ["skew", "capacity_factor"].flatMap(name => {
    const found = name in cell.axes ? costs(cells, cell, name, implementation) : [];
    if (!found.length) return [];
    const made = small(`${implementation} at another ${axisOf(name).label}, over its time here (${axisOf(name).label} ${spell(name, cell.axes[name])}), on the same card: `);
    made.id = `over-${name}`;
    found.forEach((one, i) => made.append(i ? "; " : "", link(one.cell, `${axisOf(name).label} ${spell(name, one.held)}`), `: ${timesText(one)}`, doubts(one.row).length ? ` (${doubts(one.row).join(", ")})` : ""));
    return [made];
  });
}
function nextNearest(others) {
  const made = small(others.length ? "Next nearest: " : "No other cell of this stage was measured.");
  others.slice(0, 4).forEach((one, i) => made.append(i ? "; " : "", link(one.cell, named(one.cell)), ` (${one.gaps.map(gapText).join(", ") || "as asked"})`));
  return made;
}
// The question that a cell answers exactly, as a link.
function link(cell, text) {
  const axes = asks.axes.filter(({name, follows}) => cell.axes[name] !== undefined && cell.axes[name] !== null && !(follows && cell.axes[name] === cell.axes[follows]));
  const given = new URLSearchParams([["bench", cell.bench], ...axes.map(({name}) => [name, cell.axes[name]])].filter(([name, one]) => String(one) !== usual(name)));
  return element("a", text, {href: `#ask?${given}`});
}
function followQuestion() {
  if (location.hash.startsWith("#ask?")) restore(new URLSearchParams(location.hash.slice("#ask?".length)));
}
// Before anybody asks: a cell of the last stage, which is the widest, under the name of its model where that is known.
function opening() {
  const cell = fullest(cells.filter(one => one.bench === asks.measured.at(-1))), given = new URLSearchParams(cell ? link(cell, "").getAttribute("href").slice("#ask?".length) : "");
  const model = cell?.rows.map(row => value(row.place, "model")).find(name => name in asks.models);
  if (model) given.set("model", model);
  restore(given);
}
guarded("#said", () => {
  build();
  opening();
  followQuestion();
});
addEventListener("hashchange", () => guarded("#said", followQuestion));

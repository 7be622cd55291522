// The page of a platform: one form for all of its published rows. What is asked stands in the address.
const rules = page.rules;
const cells = publishedCells(page, rules);

// The form: a control per axis, and "" leaves it open.
const SHOWN = ["tokens", "phase", "weights", "dtype", "skew", "top_k", "tp", "ep", "ranks"], MORE = ["hidden", "intermediate", "experts", "router", "activation", "capacity_factor", "packed", "layout", "sampler"];
const axisOf = name => rules.axes.find(axis => axis.name === name);
function field(name) {
  const axis = axisOf(name), usual = rules.usual[name];
  if (axis.scale === "name") return control(name, axis.label, axis.says, chooser([["", usual ? `${usual} (usual)` : rules.empty[name] ?? "any"], ...rules.known[name].map(one => [one, one])]));
  return numberControl(axis, rules.known[name], rules.empty[name] ?? "any");
}
function build() {
  const benches = [["", "whole layer, else experts"], ...Object.keys(rules.reads).map(name => [name, rules.measured.includes(name) ? name : `${name} (not measured)`])];
  const models = [["", "sizes of my own"], ...Object.keys(rules.models).map(name => [name, name]), ...Object.keys(rules.unsupported).map(name => [name, name])];
  const more = element("details"), rest = element("div", "", {class: "controls"});
  more.append(element("summary", "more"), rest);
  form.append(control("model", "model", "its sizes and routing rule", chooser(models)), ...SHOWN.map(field), control("bench", "stage", "what is timed", chooser(benches)));
  rest.append(...MORE.map(field), control("implementations", "implementations", "parts of names that the cell must have times of, with commas between them", element("input", "", {type: "text", placeholder: "any"})));
  form.append(more);
  form.oninput = () => { refused = []; show(); };
  form.onchange = () => history.replaceState(null, "", `#ask?${new URLSearchParams(Object.entries(given()))}`);
}
const given = () => Object.fromEntries([...controls].map(([name, made]) => [name, made.value.trim()]).filter(([, one]) => one !== ""));
function questionOf(held) {
  return Object.fromEntries(Object.entries(held).map(([name, one]) => [name, name === "implementations" ? one.split(",").map(part => part.trim()).filter(Boolean) : axisOf(name) && axisOf(name).scale !== "name" ? Number(one) : one]));
}
let refused = [];
function takes(name, one) {
  const made = controls.get(name);
  return made?.options ? [...made.options].some(option => option.value === one) : Boolean(made) && (name === "implementations" || canBe(name, one));
}
function restore(all) {
  refused = [...all].filter(([name, one]) => !takes(name, one)).map(([name, one]) => `${name} ${one}`);
  const held = new Map([...all].filter(([name, one]) => takes(name, one)));
  for (const [name, made] of controls) made.value = held.get(name) ?? "";
  show();
}

// Where the report of a run has a row; a page alone has no reports next to it.
const rowAddress = (row, run) => rules.runs[run].address && `${rules.runs[run].address}#row-${row.id}`;
function toRow(row, cell, text = row.implementation) {
  const place = rowAddress(row, cell.run);
  return breaking(place ? element("a", "", {href: place}) : element("span"), text);
}
const marksOfRow = row => doubts(row).length ? element("span", doubts(row).join(", "), {class: "marks"}) : dash;
const axesSaid = cell => rules.axes.filter(({name, default: usual, follows}) => name in cell.axes && cell.axes[name] !== null && name !== "seed" && (["tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "phase"].includes(name) || cell.axes[name] !== (follows ? cell.axes[follows] : usual)))
  .map(axis => `${["T", "H", "I", "E", "k"].includes(axis.prefix) ? `${axis.prefix}=` : `${axis.name.replaceAll("_", " ")} `}${general(cell.axes[axis.name])}`).join(", ");
// The question that a cell answers exactly, as a link.
function linkTo(cell, text, but = {}) {
  const asked = {...given(), ...but};
  return element("a", text, {href: `#ask?${new URLSearchParams(Object.entries(asked).filter(([, one]) => one !== null && one !== undefined && one !== ""))}`});
}
const terminal = () => `moe-routing-bench ask ${Object.entries(given()).map(([name, one]) => name === "model" ? one : `--${name.replaceAll("_", "-")} ${/^[\w.,:+-]+$/.test(one) ? one : `'${one}'`}`).sort((a, b) => a.startsWith("--") - b.startsWith("--")).join(" ")} --platform ${rules.platform}`;
function show() {
  byId("shown").replaceChildren();
  guarded("#said", showNow);
}
function showNow() {
  const held = given(), wrong = Object.entries(held).filter(([name, one]) => controls.get(name).type === "number" && !canBe(name, one)).map(([name, one]) => `${axisOf(name).label} cannot be ${one}.`);
  byId("same").textContent = terminal();
  if (wrong.length) { byId("said").textContent = wrong.join(" "); return; }
  const answer = answerOf(questionOf(held), cells, rules);
  byId("said").replaceChildren(...(answer.kind === MEASURED ? measuredWords(answer) : refusedWords(answer)));
  if (refused.length) byId("said").append(` Left out of the question, because this page does not know it: ${refused.join(", ")}.`);
  if (answer.kind === MEASURED) byId("shown").append(...measuredParts(answer));
  performance.mark("answered");
  drawAsked();
}
const modelledWords = shard => [...(shard?.over_ranks ? [` ${shard.over_ranks}.`] : []), ...(shard?.command ? [` Modelled, not measured: ${shard.modelled}, by `, element("code", shard.command, {id: "modelled"}), "."] : [])];
function refusedWords({missing, nearest, shard}) {
  return [element("strong", "Not measured."), " ", element("span", `${missing.join(". ")}.`, {id: "near"}), nearest ? ` A cell more than ${rules.rule.far} octaves away, or of another format or phase, does not answer.` : "", " The line below, in a terminal, prints the command that measures it.", ...modelledWords(shard)];
}
function measuredWords({nearest, cell, sentence, fastest, instead_of, shard}) {
  const how = nearest.gaps.length ? `${away(nearest.octaves)}: ${nearest.gaps.map(gap => gapSaid(gap, rules)).join("; ")}` : "measured as asked";
  return [...instead_of.flatMap(one => [`Not measured: ${one}. `]), element("strong", `${nearest.gaps.length ? "Nearest measured cell: " : ""}${sentence}: ${time(fastest)} µs.`), " ",
    element("span", `${cell.bench}, ${axesSaid(cell)} (${how}).`, {id: "near"}), ...(shard ? [` Measured: ${shard.measured}.`] : []), ...modelledWords(shard)];
}
function measuredParts(answer) {
  const {cell, fastest, ours, against, compared, lacking: without, format, ignored} = answer, rows = timed(cell);
  const lines = rows.map(row => [toRow(row, cell, `${row.implementation}${isOurs(row, rules) ? " (ours)" : ""}`), time(row), row === fastest ? dash : breaking(element("span"), shortPair(pairOf(row, fastest))), marksOfRow(row), limitText(row),
    row.peak_memory_bytes === null ? dash : `${brief(row.peak_memory_bytes / 2 ** 20)}`, row.energy_mj_per_token === null ? dash : String(Number(row.energy_mj_per_token.toPrecision(2)))]);
  const parts = [element("p", ours ? `Ours, ${ours.implementation}${ours === fastest ? "" : ` (${time(ours)} µs)`}: ${against ? pairText(against) : "no other package has a time here"}.` : "No kernel of ours has a time here.", {id: "ours"})];
  if (compared.length) parts.push(element("p", `${compared.map(pair => `${pair.name} is ${pairText(pair)}`).join("; ")}.`));
  if (without.length) parts.push(element("p", `No time within ${rules.rule.far} octaves of an implementation with ${without.join(", ")} in its name.`));
  if (ignored.length) parts.push(element("p", `${cell.bench} does not depend on ${ignored.join(", ")}.`));
  if (format) parts.push(element("p", lossText(format), {id: "loses"}));
  parts.push(tableOf("Implementations, fastest first", ["implementation", "µs [95 %]", `as fast as ${fastest.implementation}`, "marks", "share of the limit", "peak MiB", "mJ per token"], lines), small(...notesOf(cell)));
  return [...parts, ...overParts(answer), small(...originOf(cell, fastest))];
}
// A pair in a column whose heading names the other; without a stored ratio it is of both medians (~).
const shortPair = pair => `${pair.paired ? "" : "~"}${timesText(pair)} (${pair.verdict ?? "no verdict"}${pair.assumed ? `, by more than ${anyFloor.said}` : ""})`;
function limitText(row) {
  const found = limitOf(row);
  return found ? `${share(found.share)} (${found.binds === "node" ? "empty graph node" : "roofline"})` : dash;
}
function lossText({weights, weight_snr_db, output_snr_db, usable}) {
  if (output_snr_db === null) return `${weights}: what it loses has no row.`;
  return `${weights}: signal-to-noise ${weight_snr_db.toFixed(1)} dB of weights, ${output_snr_db.toFixed(1)} dB of outputs${usable ? "" : "; of no use, whatever its speed"}.`;
}
function notesOf(cell) {
  const failed = cell.rows.filter(row => row.status !== "ok").map(row => `${row.implementation} ${row.status}: ${row.reason ?? "no reason recorded"}`), why = reasons(cell.rows);
  return [timed(cell).slice(1).some(row => !pairOf(row, timed(cell)[0]).paired) ? "~: the rows hold no ratio of these two; it is of both medians. " : "", why.length ? ` Suspect: ${why.join("; ")}.` : "", timed(cell).some(warm) ? " L2 may be warm: what calls read before inputs come round again is less than four times as large." : "", failed.length ? ` Without a time: ${failed.join("; ")}.` : ""];
}
function originOf(cell, fastest) {
  const run = rules.runs[cell.run], stack = [["driver", fastest.driver], ["torch", fastest.torch_version], ["CUDA", fastest.cuda_version]].filter(([, one]) => one).map(([name, one]) => `, ${name} ${one}`).join("");
  return ["From ", run.address ? element("a", `run ${cell.run}`, {href: run.address}) : `run ${cell.run}`, run.by ? ` of others (submitted by ${run.by})` : "", `, version ${cell.version ?? "unknown"} (${(fastest.git_sha ?? "unknown").slice(0, 7)}), ${fastest.gpu_name ?? "CPU"}, ${cell.day}${stack}${cell.older ? `; older code: ${cell.bench} or its measurement has changed since` : ""}. Again: `, element("code", cell.command), "."];
}
// What would change with T, k, the skew, E, the format and the device: measured points alone.
function overParts(answer) {
  const {cell, over_tokens, over_formats} = answer;
  const made = [], told = one => one.told_apart === false ? " (not told apart)" : "";
  if (over_tokens.length > 1) made.push(element("h3", "Over T"), tableOf("Fastest at each number of tokens", ["T", "phase", "fastest", "µs [95 %]", "marks", "ours", "fastest other"], over_tokens.map(one => {
    const own = ownOf(one.cell, rules), other = rivalOf(one.cell, rules);
    return [linkTo(one.cell, String(one.tokens), {tokens: one.tokens, phase: one.phase}), one.phase, element("span", `${one.fastest}${told(one)}`), time(one.row), marksOfRow(one.row), own ? `${own.implementation} ${brief(own.median_us)}` : dash, other ? toRow(other, one.cell, `${other.implementation} ${brief(other.median_us)}`) : dash];
  })));
  if (over_formats.length > 1) made.push(element("h3", "Over formats"), tableOf("Fastest with each format", ["weights", "rows", "fastest", "µs [95 %]", "marks", "signal-to-noise of outputs, dB"], over_formats.map(one => [
    linkTo(one.cell, one.weights, {weights: one.weights, packed: one.packed === one.cell.axes.dtype ? null : one.packed, bench: cell.bench}), one.packed ?? dash, toRow(one.row, one.cell, `${one.fastest}${told(one)}`), time(one.row), marksOfRow(one.row), one.loss?.output_snr_db == null ? dash : `${one.loss.output_snr_db.toFixed(1)}${one.loss.usable ? "" : " (of no use)"}`])));
  for (const [name, label] of Object.entries(VARIED)) {
    const steps = answer[`over_${name}`];
    if (!steps.length) continue;
    const line = small(`Time of ${steps[0].implementation} at other ${label}, over that here: `);
    line.id = `over-${name}`;
    steps.forEach((one, i) => line.append(i ? "; " : "", linkTo(one.cell, general(one[name]), {[name]: one[name]}), `: ${timesText(one)}`));
    made.push(line);
  }
  asked = curvesOf(answer);
  if (asked) made.unshift(element("h3", "What would change"), element("div", "", {class: "chart", id: "chart-asked"}));
  if (cell.elsewhere.length) made.push(element("p", cell.elsewhere.map(one => `On ${one.platform}: ${one.fastest} ${brief(one.median_us)} µs.`).join(" ")));
  return made;
}
// Ours and the fastest other over T, k, skew, E and formats, a small panel each with equal heights; drawn when the library for figures is there.
let asked = null;
const CURVES = {tokens: "tokens", top_k: "k", skew: "skew", experts: "E", formats: "format"};
function curvesOf(answer) {
  const {cell} = answer, steps = name => name === "tokens" || name === "formats" ? answer[`over_${name}`].map(one => one.cell) : [cell, ...answer[`over_${name}`].map(one => one.cell)].sort((a, b) => a.axes[name] - b.axes[name]);
  const panels = Object.entries(CURVES).map(([name, label]) => [name, `over ${label}`, steps(name)]).filter(([, , one]) => one.length > 1);
  const at_ = (name, one) => name === "formats" ? answer.over_formats.filter(({weights}) => weights === one.axes.weights).length > 1 ? `${one.axes.weights} of ${one.axes.packed}` : one.axes.weights : one.axes[name];
  const points = panels.flatMap(([name, panel, all]) => all.flatMap(one => [ownOf(one, rules), rivalOf(one, rules)].flatMap((row, i) => row ? [{
    panel, series: rules.series[i].name, join: name === "formats" ? at_(name, one) : "", x: at_(name, one), y: row.median_us, low: row.ci_low_us, high: row.ci_high_us, says: `${row.implementation}, ${one.axes.phase}, run ${one.run}`, doubt: doubts(row).join(", ") || null, row: rowAddress(row, one.run)}] : [])));
  if (!points.length) return null;
  const columns = Object.keys(points[0]).map(name => [name, {each: points.map(point => point[name])}]);
  const own = Object.fromEntries(panels.map(([name, panel]) => [panel, {x: {label: CURVES[name], kind: name === "formats" ? "names" : name === "skew" ? "linear" : "log"}}]));
  return {kind: "lines", x: {label: "tokens", kind: "log"}, y: {label: "µs", kind: "log"}, own, reference: null, shared: false, level: true, from: "", note: "measured points alone, which lines join; hollow: suspect or not converged", legend: rules.series, marks: Object.fromEntries(columns), count: points.length};
}
function drawAsked() {
  if (!asked?.count || !byId("chart-asked") || typeof drawChart !== "function") return;  // an answer before this one had a curve
  charts.asked = asked;
  drawChart("asked");
}
// An address: a question, a part of this page, or a part of the report that stood at this address before.
function follow() {
  const part = location.hash.slice(1);
  if (part.startsWith("ask")) restore(new URLSearchParams(part.split("?")[1] ?? new URLSearchParams(rules.opening).toString()));
  else if (part && !byId(part) && rules.former) location.replace(`${rules.former}${location.hash}`);
}
guarded("#said", () => {
  build();
  restore(new URLSearchParams(rules.opening));
  follow();
});
addEventListener("hashchange", () => guarded("#said", follow));
// The cells of a section as a table, made when it is opened.
const pairIn = (own, other) => own && other ? breaking(element("span", "", {class: "verdict"}), pairText(pairOf(own, other))) : dash;
function cellLines(places) {
  return places.map(place => {
    const cell = cells[place], own = ownOf(cell, rules), other = rivalOf(cell, rules), time_ = row => row ? toRow(row, cell, `${row.implementation} ${brief(row.median_us)}${doubts(row).length ? " ?" : ""}`) : dash;
    const whole = ([name, one]) => [name, WIDTHS.includes(name) ? one * (cell.axes.tp ?? 1) : one]; // a question has the widths of all ranks
    const exact = Object.fromEntries(Object.entries(cell.axes).filter(([name, one]) => controls.has(name) && one !== null).map(whole));
    const link = element("a", axesSaid(cell), {href: `#ask?${new URLSearchParams({bench: cell.bench, ...exact})}`});
    return [cell.bench, cell.model ?? dash, link, time_(own), time_(other), pairIn(own, other)];
  });
}
document.querySelectorAll("details.cells").forEach(box => box.addEventListener("toggle", () => {
  if (box.children.length < 2) guarded(`details[data-section=${box.dataset.section}]`, () => box.append(tableOf("Cells", ["stage", "model", "cell", "ours, µs", "fastest other, µs", "ours is"], cellLines(page.sections[box.dataset.section])), small("?: suspect, not converged, or the cache may be warm. A cell's name asks its question.")));
}));

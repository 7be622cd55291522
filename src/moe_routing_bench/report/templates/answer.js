// Which measured cell is nearest to a question, and what its rows say. Pure functions of what they are given.
// A row is {place, bench, cell, card, axes, implementation, …its fields}, where `axes` has those that its bench reads. A question is
// {bench, <axis>: value}: an axis that it leaves out may have any value, null asks for none.

function cellsOf(rows) {
  const cells = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.bench, row.cell, row.card]);
    if (!cells.has(key)) cells.set(key, {bench: row.bench, cell: row.cell, axes: row.axes, rows: []});
    cells.get(key).rows.push(row);
  }
  return [...cells.values()];
}
const timesKept = new WeakMap();
function timed(cell) {
  if (!timesKept.has(cell)) timesKept.set(cell, cell.rows.filter(row => row.status === "ok" && row.median_us !== null).sort((a, b) => a.median_us - b.median_us));
  return timesKept.get(cell);
}

// What a cell has of an axis: rows of before there was an axis that follows another are as that one.
const heldBy = (cell, {name, follows}) => cell.axes[name] ?? (follows ? cell.axes[follows] : null);

// In what a cell differs from a question: [{name, asked, held, octaves, scale}]. The rule is that of answers/nearest.py: names and limits must
// match (infinitely many octaves), but for those that the rule of the bench lets count as some. `rule`: {octaves, of: {bench: [axis]}, ranks: [axis],
// families: {name of formats: [format]}}. `exact`: an axis that must match where cells have it. Experts of a bench that does not read the format of weights have that of its activations.
function gapsOf(cell, question, axes, rule) {
  return Object.keys(question).flatMap(name => {
    const axis = axes.find(one => one.name === name);
    if (!axis) return [];
    const {scale, follows, exact} = axis;
    const ranks = (rule.ranks ?? []).includes(name), plain = name === "weights" && !(name in cell.axes) && "intermediate" in cell.axes ? cell.axes.dtype : null;
    if (!(name in cell.axes || plain !== null || (ranks && question[name] !== null))) return [];
    const asked = question[name] ?? (follows ? cell.axes[follows] : null), held = plain ?? heldBy(cell, {name, follows}) ?? null;
    if (asked === held || (name === "weights" && (rule.families?.[asked] ?? []).includes(held))) return [];
    const numbers = typeof asked === "number" && typeof held === "number";
    const octaves = (rule.of[cell.bench] ?? []).includes(name) ? rule.octaves : !numbers || scale === "name" || ranks || exact ? Infinity : scale === "log" ? Math.abs(Math.log2(held / asked)) : Math.abs(held - asked);
    return [{name, asked, held, octaves, scale: numbers ? scale : "name"}];
  });
}
// Cells of the question's bench with a time, nearest first; of equals those first that have defaults where nothing was asked, then the plainest format of
// a family, the label of the model, most implementations with a time, and the latest day.
function nearest(cells, question, axes, rule, model) {
  const open = ["model", "phase", "weights"], plain = rule.families?.[question.weights] ?? [];
  const odd = cell => axes.filter(({name, default: usual, follows}) => !(name in question) && !open.includes(name) && name in cell.axes && heldBy(cell, {name, follows}) !== (follows ? cell.axes[follows] : usual) && (follows ? cell.axes[follows] : usual) !== null).length;
  return cells.filter(cell => cell.bench === question.bench && timed(cell).length).map(cell => {
    const gaps = gapsOf(cell, question, axes, rule), near = gaps.filter(gap => gap.octaves < Infinity).reduce((sum, gap) => sum + gap.octaves, 0);
    const unlike = gaps.filter(gap => gap.octaves === Infinity).length, exact = Math.max(0, plain.indexOf(cell.axes.weights)), unlabelled = model ? Number(cell.model !== model) : 0;
    return {cell, gaps, near, unlike, octaves: unlike ? Infinity : near, odd: odd(cell), exact, unlabelled};
  }).sort((a, b) => a.unlike - b.unlike || a.near - b.near || a.odd - b.odd || a.exact - b.exact || a.unlabelled - b.unlabelled || timed(b.cell).length - timed(a.cell).length || (b.cell.day ?? "").localeCompare(a.cell.day ?? ""));
}
const turn = end => end === null || end === undefined ? null : 1 / end;
const turned = {faster: "slower", slower: "faster", same: "same", undecided: "undecided"};

// What is stored of a pair of rows: {verdict, other, ratio, low, high}, the ratio above 1 where `row` is the faster; null where nothing is.
function stored(row, other) {
  const forth = (one, verdict, ratio) => ({verdict: one[verdict], ratio: one[ratio], low: one[`${ratio}_ci_low`], high: one[`${ratio}_ci_high`], other: other.implementation});
  const back = (one, verdict, ratio) => ({verdict: turned[one[verdict]] ?? null, ratio: 1 / one[ratio], low: turn(one[`${ratio}_ci_high`]), high: turn(one[`${ratio}_ci_low`]), other: other.implementation});
  if (row.best_other === other.implementation && row.best_speedup !== null) return forth(row, "best_verdict", "best_speedup");
  if (other.best_other === row.implementation && other.best_speedup !== null) return back(other, "best_verdict", "best_speedup");
  if (row.baseline === other.implementation && row.speedup !== null) return forth(row, "verdict", "speedup");
  if (other.baseline === row.implementation && other.speedup !== null) return back(other, "verdict", "speedup");
  return null;
}
// The rows of a cell, quickest first, each against the next and against the best of the others, which is the one that the row names.
function ranked(cell) {
  const rows = timed(cell);
  return rows.map((row, i) => {
    const best = rows.find(one => one.implementation === row.best_other) ?? rows[i ? 0 : 1];
    return {row, limit: limitOf(row), next: i + 1 < rows.length ? stored(row, rows[i + 1]) : undefined, best: best ? stored(row, best) : undefined};
  });
}
// The floor that binds: the larger of the roofline and, for calls that a graph replays, of what one empty node takes. None on a CPU, whose ceilings are no limits.
function limitOf(row) {
  if (row.card.startsWith("host ")) return null;
  const node = row.timer === "cuda_graph" ? row.graph_node_us : null;
  if (row.roofline_us === null && node === null) return null;
  const binds = (node ?? 0) > (row.roofline_us ?? 0) ? "node" : "roofline", us = Math.max(node ?? 0, row.roofline_us ?? 0);
  return {us, share: us / row.median_us, binds};
}
// Which is fastest in a cell, as the stored verdict says it: {names, said, told}. Two names where no verdict parts them.
function winner(cell) {
  const [first, second] = ranked(cell);
  if (!second) return {names: [first.row.implementation], told: false, said: `${first.row.implementation} is the only implementation with a time`};
  const name = first.row.implementation, {verdict = null, other = second.row.implementation} = first.best ?? {};
  if (verdict === "faster") return {names: [name], told: true, said: `${name} is the fastest, and faster than the best other, ${other}`};
  const said = {
    same: `${name} and ${other} are the same within the noise`, undecided: `the measurement does not tell ${name} from ${other}`,
    slower: `${name} has the lowest median, and ${other} is the faster of the two in pairs`,
  }[verdict] ?? `${name} has the lowest median; whether it is faster than ${other} has no stored verdict`;
  return {names: [name, other], told: false, said};
}
const warm = row => row.cold === false && row.timer !== "wall";
const doubts = row => [row.suspect ? "suspect" : "", row.converged === false ? "not converged" : "", warm(row) ? "L2 may be warm" : ""].filter(Boolean);
const reasons = rows => [...new Set(rows.filter(row => row.suspect).map(row => row.suspect_reason ?? "no reason recorded"))];

// What one implementation takes in the cells of one card that differ from this one in `axis` alone: [{held, cell, row, ratio, low, high}], the
// ratio over this cell's time. The cells are of different processes, so the interval is as wide as both make it.
function costs(cells, cell, axis, implementation) {
  const mine = other => timed(other).find(row => row.implementation === implementation), here = mine(cell);
  const alike = other => other !== cell && other.bench === cell.bench && mine(other)?.card === here.card
    && Object.keys(cell.axes).every(name => name === axis || other.axes[name] === cell.axes[name]) && other.axes[axis] !== cell.axes[axis];
  return cells.filter(alike).map(other => {
    const row = mine(other);
    return {held: other.axes[axis], cell: other, row, ratio: row.median_us / here.median_us, low: row.ci_low_us / here.ci_high_us, high: row.ci_high_us / here.ci_low_us};
  }).sort((a, b) => (a.held ?? Infinity) - (b.held ?? Infinity));
}
// The cells that differ from this one in tokens alone (and in the name of their phase), fewest tokens first, and what changes between neighbours.
function along(cells, cell) {
  const labels = ["tokens", "phase"];
  const alike = other => other.bench === cell.bench && timed(other).length && Object.keys(cell.axes).every(name => labels.includes(name) || other.axes[name] === cell.axes[name]);
  const steps = cells.filter(alike).map(one => ({cell: one, tokens: one.axes.tokens, ...winner(one)})).sort((a, b) => a.tokens - b.tokens);
  return {steps, changes: changesOf(steps)};
}
function changesOf(steps) {
  const counts = [...new Set(steps.map(step => step.tokens))];
  if (counts.length < 2) return ["Only one number of tokens was measured here: where another overtakes cannot be said."];
  const points = counts.map(tokens => pointOf(tokens, steps.filter(step => step.tokens === tokens)));
  const told = points.filter(point => point.name), names = new Set(told.map(point => point.name));
  const untold = points.filter(point => !point.name).map(point => point.tokens);
  const left = untold.length ? [`No verdict names one winner at T=${untold.join(", ")}.`] : [];
  if (!told.length) return ["No verdict names one winner at any T."];
  if (names.size === 1) return [`${told[0].name} is the fastest by verdict at T=${told.map(point => point.tokens).join(", ")}: no change was measured.`, ...left];
  return [...told.slice(1).flatMap((point, i) => changeOf(told[i], point)), ...left];
}
// The cells of one number of tokens: the name that the verdicts of all of them give, else none, and who has a time in all.
function pointOf(tokens, steps) {
  const names = new Set(steps.map(step => step.told ? step.names[0] : null));
  return {tokens, name: names.size === 1 ? [...names][0] : null, has: name => steps.every(step => timed(step.cell).some(row => row.implementation === name))};
}
function changeOf(before, now) {
  if (before.name === now.name) return [];
  const absent = [[before, now.name], [now, before.name]].filter(([point, name]) => !point.has(name)).map(([point, name]) => `${name} was not measured at T=${point.tokens}`);
  if (absent.length) return [`The fastest is ${before.name} at T=${before.tokens} and ${now.name} at T=${now.tokens}, but ${absent.join(" and ")}: no change is shown.`];
  return [`${now.name} overtakes ${before.name} between T=${before.tokens} and T=${now.tokens}.`];
}
// The cell to begin with: of the sizes that were measured at most numbers of tokens, that in which most implementations have a time.
function fullest(cells) {
  const had = cells.filter(cell => timed(cell).length), like = new Map(had.map(cell => [cell, JSON.stringify({...cell.axes, tokens: null, phase: null})])), counts = new Map();
  had.forEach(cell => counts.set(like.get(cell), (counts.get(like.get(cell)) ?? new Set()).add(cell.axes.tokens)));
  return had.sort((a, b) => counts.get(like.get(b)).size - counts.get(like.get(a)).size || timed(b).length - timed(a).length)[0];
}

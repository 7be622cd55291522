// What all published rows of a platform say to a question, as `moe-routing-bench ask` says it: pure functions, which follow answers/ in Python function by function.
// A cell is {run, bench, cell, card, axes, model, day, rows, …}; a question holds the values that the reader gave. `rules` has what Python's tables say: axes, reads, rule, ours, models.

// The gap of ln ratio beyond which no noise floor is needed, and its words (quantities.py).
const anyFloor = {ln: 0.1, said: "11 %"};

// The cells of a page and their rows, in the order in which `ask` reads them.
function publishedCells(page, rules) {
  const columnsOf = held => Object.entries(held).map(([name, packed]) => [name, row => at(packed, row)]), read = columnsOf(page.cells), axes = new Map(read), rowsOf = columnsOf(page.rows);
  const own = read.filter(([name]) => !name.startsWith("axis ")), whole = (columns, i) => Object.fromEntries(columns.map(([name, get]) => [name, get(i)]));
  const made = Array.from({length: page.count.cells}, (_, i) => {
    const cell = whole(own, i);
    return {...cell, place: i, rows: [], axes: Object.fromEntries(rules.reads[cell.bench].map(name => [name, axes.get(`axis ${name}`)(i)]))};
  });
  for (let i = 0; i < page.count.rows; i++) {
    const row = whole(rowsOf, i), cell = made[row.of];
    cell.rows.push(Object.assign(row, {bench: cell.bench, card: cell.card}));
  }
  return made;
}

const MEASURED = "measured", REFUSED = "refused", AUTO = "auto";

// Which benches may answer, in order, and the values that a cell of them is compared with (answers/question.py).
function readingOf({model, bench, implementations = [], ...axes}, rules) {
  const given = {...axes}, training = given.phase === "training";
  if (training) delete given.phase;
  const ranked = Object.keys(rules.reads).filter(name => rules.reads[name].includes("ranks") && name !== "ep_training").reverse();
  const benches = bench ? [bench] : training ? ["ranks" in given ? "ep_training" : "training"] : "ranks" in given ? ranked : "tp" in given || "ep" in given ? ["layer"] : ["layer", "experts"];
  const sparse = rules.axes.filter(axis => axis.sparse).map(axis => [axis.name, null]);
  const values = {dtype: rules.usual.dtype, skew: 0, capacity_factor: null, trace: null, ...Object.fromEntries(sparse), ...(rules.models[model] ?? {}), ...given};
  if (!("weights" in given) && !("packed" in given)) values.weights = values.packed = values.dtype;
  values.weights ??= values.dtype;
  const read = new Set(benches.flatMap(name => rules.reads[name]));
  if (read.has("intermediate")) read.add("weights");
  const ignored = Object.keys(given).filter(name => !read.has(name) && !rules.rule.ranks.includes(name));
  return {model, benches, values, given, implementations, ignored, unsupported: rules.unsupported[model] ?? ""};
}
const valuesFor = (question, bench) => ({...question.values, ...(bench === "model" && question.model ? {model: question.model} : {}), ...shardOf(question)});
// The inner widths of one tensor-parallel rank, as rows have them (config/expand.py); nothing without ranks.
const WIDTHS = ["intermediate", "shared_intermediate"];
const indivisible = ({values}) => [...(values.tp > 1 ? WIDTHS.filter(name => values[name] % values.tp).map(name => `tp: got ${values.tp}; allowed: a divisor of ${name}=${values[name]}`) : []), ...(values.ep > 1 && values.experts % values.ep ? [`ep: got ${values.ep}; allowed: a divisor of experts=${values.experts}`] : [])];
function shardOf({values, given}) {
  if (!("tp" in given) && !("ep" in given)) return {};
  const widths = WIDTHS.filter(name => values[name]).map(name => [name, values[name] / (values.tp || 1)]);
  return Object.fromEntries([...widths, ...["tp", "ep"].filter(name => (values[name] || 1) === 1).map(name => [name, null])]);
}
// What of a question about ranks rows measure, and what a model alone says (answers/question.py); null without ranks.
function shardSaid({model, given}, rules) {
  const ranks = ["tp", "ep"].filter(name => (given[name] ?? 1) > 1);
  if (!ranks.length) return null;
  const [name] = ranks, number = given[name];
  const words = ranks.length === 1 ? `one of ${number} ranks (${name} ${number})` : `one of ${ranks.map(one => given[one]).join(" x ")} ranks`;
  const command = model && ranks.length === 1 ? ["moe-routing-bench scale", model, "--gpus", number, `--${name}`, number, ...("tokens" in given ? ["--tokens", Math.ceil(given.tokens / number)] : []), ...("weights" in given ? ["--weights", (rules.rule.families[given.weights] ?? [given.weights])[0]] : [])].join(" ") : null;
  return {measured: `${words} on one GPU, without what ranks send to each other`, modelled: command ? "the whole layer with what ranks send to each other" : null, command,
    over_ranks: ranks.length === 1 && name === "ep" ? `Layers over ${number} GPUs with their exchange: --ranks ${number} instead of --ep ${number}` : null};
}

// The fastest row of this project that counts, that of `auto` before others, and the fastest of another package (answers/pairs.py).
const isOurs = (row, rules) => (rules.ours[row.bench] ?? []).includes(row.implementation);
function ownOf(cell, rules) {
  const mine = timed(cell).filter(row => isOurs(row, rules));
  return mine.find(row => row.implementation === AUTO) ?? mine[0] ?? null;
}
const rivalOf = (cell, rules) => timed(cell).find(row => !isOurs(row, rules)) ?? null;
// The ends of the time of a row over that of another; null where a row has no interval.
const endsOver = (row, other) => [row.ci_low_us, other.ci_low_us].includes(null) ? [null, null] : [row.ci_low_us / other.ci_high_us, row.ci_high_us / other.ci_low_us];
// How a row compares with another of its cell: by the stored ratio of either, or else by the intervals of both times.
function pairOf(row, other) {
  const pair = plainPair(row, other), known = pair.verdict === null && !row.card.startsWith("host ") && pair.low !== null, most = Math.exp(anyFloor.ln);
  return {...pair, ...(known && (pair.low > most || pair.high < 1 / most) ? {verdict: pair.ratio > 1 ? "faster" : "slower", assumed: true} : {assumed: false})};
}
function plainPair(row, other) {
  const held = stored(row, other);
  if (held) return {...held, name: row.implementation, paired: true};
  const ratio = other.median_us / row.median_us, [low, high] = endsOver(other, row);
  const apart = low !== null && (low > 1 || high < 1) && Math.abs(Math.log(ratio)) > row.noise_floor;
  const verdict = row.noise_floor === null || low === null ? null : apart ? ratio > 1 ? "faster" : "slower" : "undecided";
  return {name: row.implementation, other: other.implementation, ratio, low, high, verdict, paired: false};
}
const pairText = pair => `${timesText(pair)} as fast as ${pair.other} (${pair.verdict ?? "no verdict, too few twins"}${pair.assumed ? ` by more than ${anyFloor.said}, no noise floor` : ""}${pair.paired ? "" : ", from both medians"})`;
// The implementation that the stored verdict calls the fastest (null: no verdict names one), and a sentence on it.
function winnerOf(cell) {
  const [first, ...others] = timed(cell), name = first.implementation;
  if (!others.length) return {name: null, sentence: `${name} is the only implementation with a time`};
  const best = others.find(row => row.implementation === first.best_other) ?? others[0], other = best.implementation, {verdict, assumed} = pairOf(first, best);
  if (verdict === "faster") return {name, sentence: `${name} is the fastest${assumed ? ` by more than ${anyFloor.said} (no noise floor: too few twins in the run)` : ""}`};
  const said = {
    same: `${name} and ${other} are the same within the noise`, undecided: `${name} has the lowest median, but the measurement does not tell it from ${other}`,
    slower: `${name} has the lowest median, but ${other} is faster in pairs`,
  }[verdict] ?? `${name} has the lowest median (no verdict: too few twins in the run)`;
  return {name: null, sentence: said};
}

const general = one => Number.isInteger(one) ? String(one) : typeof one === "number" ? String(Number(one.toPrecision(6))) : one === null || one === undefined ? "none" : one;
const away = octaves => `${Number(octaves.toPrecision(2))} octave${octaves === 1 ? "" : "s"} away`;
function gapSaid({name, held, asked, octaves}, rules) {
  const {prefix} = rules.axes.find(axis => axis.name === name), label = ["T", "H", "I", "E", "k"].includes(prefix) ? `${prefix}=` : `${name.replaceAll("_", " ")} `;
  const said = one => (one ?? null) === null && rules.rule.ranks.includes(name) ? "1" : general(one);
  return `${label}${said(held)}, not ${said(asked)}${octaves === Infinity ? "" : ` (${away(octaves)})`}`;
}

// The cells that differ from one in these axes alone (answers/around.py).
function alikeTo(cell, cells, ...but) {
  const fixed = Object.keys(cell.axes).filter(name => !but.includes(name));
  return cells.filter(one => one.bench === cell.bench && timed(one).length && fixed.every(name => one.axes[name] === cell.axes[name]));
}
const pointOf_ = (cell, row) => ({fastest: row.implementation, told_apart: winnerOf(cell).name === row.implementation, median_us: row.median_us, run: cell.run, row, cell});
function tokensOver(cell, cells, keep) {
  const seen = new Set(), near = alikeTo(cell, cells, "tokens", "phase");
  near.sort((a, b) => a.axes.tokens - b.axes.tokens || (a !== cell) - (b !== cell) || timed(b).length - timed(a).length);
  return near.flatMap(one => {
    const all = timed(one), rows = all.filter(keep);
    if (!rows.length || seen.has(one.axes.tokens)) return [];
    seen.add(one.axes.tokens);
    return [{tokens: one.axes.tokens, phase: one.axes.phase, ...pointOf_(one, rows[0]), ...(rows.length < all.length ? {told_apart: null} : {})}];
  });
}
const VARIED = {top_k: "k", skew: "skews", experts: "E"};
function axisOver(cell, cells, name) {
  const alike_ = (cell.axes[name] ?? null) !== null ? alikeTo(cell, cells, name) : [];
  const others = alike_.filter(one => one.card === cell.card && one.axes[name] !== cell.axes[name]).sort((a, b) => a.axes[name] - b.axes[name]);
  const rowOf = (one, here) => timed(one).find(row => row.implementation === here.implementation), here = timed(cell).find(row => others.some(one => rowOf(one, row)));
  return here ? others.flatMap(one => {
    const row = rowOf(one, here), [low, high] = row ? endsOver(row, here) : [];
    return row ? [{[name]: one.axes[name], implementation: row.implementation, ratio: row.median_us / here.median_us, low, high, run: one.run, cell: one}] : [];
  }) : [];
}
function formatsOver(cell, cells, rules) {
  if (!("weights" in cell.axes)) return [];
  const best = new Map();
  for (const one of alikeTo(cell, cells, "weights", "packed", "phase")) {
    const key = JSON.stringify([one.axes.weights, one.axes.packed]);
    if (!best.has(key) || timed(one)[0].median_us < timed(best.get(key))[0].median_us) best.set(key, one);
  }
  const found = [...best.values()].sort((a, b) => timed(a)[0].median_us - timed(b)[0].median_us);
  return found.map(one => ({weights: one.axes.weights, packed: one.axes.packed, ...pointOf_(one, timed(one)[0]), loss: lossOf(one, rules)}));
}
const lossOf = (cell, rules) => rules.losses[`${cell.axes.weights} ${cell.axes.dtype}`] ?? null;

// The answer to a question, of the same cell and with the same words as `ask` (answers/ask.py).
function answerOf(asked, cells, rules) {
  const question = readingOf(asked, rules), parts = question.implementations.map(one => one.toLowerCase());
  if (question.unsupported) return {kind: REFUSED, question, missing: [`${question.model}: ${question.unsupported}`], nearest: null, shard: shardSaid(question, rules)};
  const shard = shardSaid(question, rules);
  if (indivisible(question).length) return {kind: REFUSED, question, missing: indivisible(question), nearest: null, shard: null};
  const lacking = cell => question.implementations.filter((_, i) => !timed(cell).some(row => row.implementation.includes(parts[i])));
  const missing = (bench, found) => {
    if (!found) return `${bench}: no published row with a time`;
    const texts = found.gaps.map(gap => gapSaid(gap, rules));
    return `${bench}: the nearest measured cell has ${texts.length ? texts.join("; ") : `none of ${question.implementations.join(", ")}`}`;
  };
  const best = [];
  for (const bench of question.benches) {
    const found = nearest(cells, {bench, ...valuesFor(question, bench)}, rules.axes, rules.rule, question.model);
    const near = found.filter(one => one.octaves <= rules.rule.far), having = near.filter(one => !lacking(one.cell).length);
    if (having.length || (near.length && parts.length)) {
      const chosen = having[0] ?? near[0], of = found.map(one => one.cell), {cell} = chosen;
      const named = timed(cell).filter(row => parts.some(part => row.implementation.includes(part))), own = ownOf(cell, rules), other = rivalOf(cell, rules), {name, sentence} = winnerOf(cell);
      return {
        kind: MEASURED, question, nearest: chosen, cell, told_apart: name !== null, sentence, fastest: timed(cell)[0], ours: own, other, against: own && other ? pairOf(own, other) : null,
        compared: named.slice(1).map(row => pairOf(row, named[0])), lacking: lacking(cell), format: lossOf(cell, rules), ignored: question.ignored,
        over_tokens: tokensOver(cell, of, row => !named.length || parts.some(part => row.implementation.includes(part))), ...Object.fromEntries(Object.keys(VARIED).map(name => [`over_${name}`, axisOver(cell, of, name)])), over_formats: formatsOver(cell, of, rules),
        instead_of: best.map(([one, first]) => missing(one, first)), shard,
      };
    }
    best.push([bench, found[0]]);
  }
  return {kind: REFUSED, question, missing: best.map(([bench, first]) => missing(bench, first)), nearest: best[0]?.[1] ?? null, shard};
}

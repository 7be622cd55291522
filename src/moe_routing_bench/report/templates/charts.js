// Figures that the page draws from their marks, with Observable Plot: hover, links to rows, series that can be switched off, numbers as a table.
const charts = page.charts, tall = 250, line = 20, tinted = new Map();
function marksOf(chart) {
  return Array.from({length: chart.count}, (_, i) => Object.fromEntries(Object.entries(chart.marks).map(([name, held]) => [name, at(held, i)])));
}
// A row of this report, or the address of a row of another page.
const addressOf = row => row.includes("#") ? row : `#row-${row}`;
const tint = one => `light-dark(${one.light}, ${one.dark})`;
const number = (one, most = 4) => one === null || one === undefined ? dash : typeof one === "string" ? one : text(Number(one.toPrecision(most)));
// A number beside an axis, in few letters: labels of millions, and of millionths, would run into each other.
function shortIn(most) {
  return one => {
    const size = Math.abs(one);
    return size >= 1e6 ? `${number(one / 1e6, most)}M` : size >= 1e4 ? `${number(one / 1e3, most)}k` : size && size < 1e-4 ? Number(one.toPrecision(most)).toExponential() : number(one, most);
  };
}
const short = shortIn(4);
// Digits that tell the ticks of an axis between these ends apart, four at least.
function fineness([low, high]) { return Math.min(9, Math.max(4, 2 + Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low))))) || 4; }
function between(low, high) { return low === null || low === undefined ? "" : ` [${number(low)}, ${number(high)}]`; }
function wordsOf(chart, mark) {
  const doubt = mark.doubt ? `\n${mark.doubt}` : "";
  if (chart.kind === "bars") return `${mark.y}\n${mark.series}\n${mark.says ?? ""}${doubt}`;
  if (chart.kind === "matrix") return `${mark.y}\n${mark.x}: ${mark.series}, ${mark.says}${doubt}`;
  const value = chart.kind === "dots" ? `${chart.x.label}: ${number(mark.x)}${between(mark.low, mark.high)}`
    : `${chart.x.label}: ${number(mark.x)}${between(mark.x_low, mark.x_high)}\n${chart.y.label}: ${number(mark.y)}${between(mark.low, mark.high)}`;
  return [mark.series, ...(chart.kind === "dots" && mark.y !== mark.series ? [mark.y] : []), value, ...(mark.says ? [mark.says] : [])].join("\n") + doubt;
}
// Doubtful times are hollow, or pale where a mark has an area; where only the cache may have been warm they are small, hatched in print.
const isDoubtful = mark => Boolean(mark.doubt) && mark.doubt !== "L2 may be warm", isWarm = mark => mark.doubt === "L2 may be warm";
const opacityOf = mark => isDoubtful(mark) ? 0.5 : 1;
// The letters of the longest name on the left of a panel, and of the longest text on its right.
function lettersOf(marks) {
  return {name: Math.max(0, ...marks.map(mark => String(mark.y).length)), aside: Math.max(0, ...marks.map(mark => mark.aside?.length ?? 0))};
}
// One panel as SVG, of all marks or those in `view`; names on the left stand above their line where the panel is narrow, with what else stands at its right.
function panelOf(chart, marks, room, looks, view) {
  const names = chart.y.kind === "names" ? [...new Set(marks.map(mark => mark.y))] : null, {name: longest, aside} = names ? chart.letters ?? lettersOf(marks) : {name: 0, aside: 0};
  const heads = chart.kind === "matrix" ? [...new Set(marks.map(mark => mark.x))] : [];
  const within = mark => `${mark.says}${isWarm(mark) ? "‡" : ""}`, column = 7.4 * Math.max(0, ...heads.length ? marks.map(mark => within(mark).length) : []) + 3;  // has room for what a cell says
  const narrow = names && ((longest + aside) * 6.2 > room * (aside ? 0.5 : 0.4) || chart.kind === "matrix" && (room - longest * 6.2 < 60 * heads.length || 18 + longest * 6.7 + column * heads.length + asideOf(heads, column * heads.length) > room)), left = names ? narrow ? 10 : 18 + longest * 6.7 : 56, right = narrow ? 18 : 18 + aside * 6.7;
  const asides = new Map(marks.filter(mark => mark.aside).map(mark => [mark.y, mark.aside])), above = new Map((names ?? []).map(name => [name, broken(asides.has(name) ? `${name}: ${asides.get(name).replace(/ (?=µs)|(?<=\[.*) /g, "\u00a0")}` : name, Math.floor((room - left - 4) / 6.7))]));
  const wide = Math.max(room, heads.length && left + column * heads.length + asideOf(heads, column * heads.length));  // a panel that needs more scrolls
  const lines = narrow ? Math.max(...[...above.values()].map(one => one.length)) : 0, under = 14 * lines, step = narrow ? under + 24 : line;  // of a name above its marks
  const down = names ? step * names.length + 46 : tall, long = {x: wide - left - right, y: down - 50};
  const ticks = name => chart[name].kind === "log" ? ticksOf(view?.[name] ?? commonOf(chart[name]) ?? endsOn(chart, marks, name), long[name], name === "x" ? text => 6.2 * text.length + 10 : () => 15) : undefined;
  const baseOf = name => ticks(name) ? {base: labelsAll} : {};
  const said = name => chart[name].kind === "linear" ? shortIn(fineness(view?.[name] ?? commonOf(chart[name]) ?? endsOn(chart, marks, name))) : short;
  // What lies just below 0 takes little of an axis; panels of one scale all look at their common end.
  const commonOf = axis => axis === chart.x ? chart.ends : chart.rise, isBelow = axis => commonOf(axis) ? commonOf(axis)[0] < 0 : marks.some(mark => Math.min(mark[axis === chart.x ? "x" : "y"], ...(chart.kind === "dots" === (axis === chart.x) ? [mark.low ?? 0] : [mark.x_low ?? 0])) < 0);
  const scale = axis => ({inset: axis.kind === "names" || chart.kind === "bars" ? 0 : 6, type: axis.kind === "names" ? chart.kind === "lines" ? "point" : "band" : axis.kind, ...(axis.kind === "names" && chart.kind === "lines" ? {padding: 0.5, domain: [...new Set(marks.map(mark => mark.x))]} : {}), label: axis.kind === "names" ? null : axis.label, grid: axis.kind !== "names", nice: !view && axis.kind === "linear" && (isBelow(axis) ? 40 : true), ...(view?.[axis === chart.x ? "x" : "y"] ? {domain: view[axis === chart.x ? "x" : "y"]} : commonOf(axis) ? {domain: commonOf(axis)} : {})});
  const counted = chart.x.kind === "log" && ["tokens", "k", "E"].includes(chart.x.label),  // no half expert
     fill = mark => tint(looks.get(mark.series)), href = mark => mark.row ? addressOf(mark.row) : null, title = mark => wordsOf(chart, mark);
  // Names under a line stand aslant where they would run into each other.
  const under_ = chart.kind === "lines" && chart.x.kind === "names" ? [...new Set(marks.map(mark => mark.x))] : [], aslant = under_.reduce((sum, name) => sum + 6.2 * name.length + 8, 0) > wide - left - right, sunk = aslant ? 3.3 * Math.max(...under_.map(name => name.length)) : 0;
  const options = {
    clip: Boolean(view), width: wide, marginLeft: left, marginRight: right, marginBottom: 34 + sunk, ...(names ? {marginTop: 12} : {}), style: {fontSize: "11px", background: "none", overflow: "visible"}, color: {type: "identity"}, symbol: {type: "identity"}, opacity: {type: "identity"}, r: {type: "identity"},
    height: down + 4 + sunk, x: {...scale(chart.x), ...(aslant ? {tickRotate: -30} : {}), ...(counted ? {base: 2} : baseOf("x")), ticks: counted ? countsOn(marks, view?.x, long.x) : ticks("x") ?? Math.max(2, Math.min(Math.round(wide / 90), Math.round(long.x / 60))), tickFormat: counted ? text : chart.x.kind === "names" ? undefined : said("x")},
    y: {...scale(chart.y), ...(names ? {domain: names, type: "point", padding: 0.6, axis: narrow ? null : "left"} : {...baseOf("y"), ticks: ticks("y") ?? 6, tickFormat: said("y")})}, ariaLabel: `${marks[0]?.panel ?? ""}: ${marks.length} marks`,
  };
  if (chart.kind === "matrix") return Plot.plot({...options, width: Math.min(wide, left + 40 + 110 * heads.length), marginTop: riseOf(heads), marginRight: besideOf(heads, Math.min(wide - left, 40 + 110 * heads.length)), x: {...options.x, type: "band", domain: heads, tickRotate: rotated(heads) ? -30 : 0, axis: "top"}, y: {...options.y, type: "band", padding: 0.1},
    height: down - 46 + riseOf(heads) + 10, marginBottom: 10, marks: [...namesOf(above, under && under / 2 - 0.45 * (down - 46) / (names.length + 0.1)), Plot.cell(marks, {x: "x", y: "y", fill, fillOpacity: mark => isDoubtful(mark) ? 0.38 : 1, inset: 0.5, insetTop: under, title, href}),
      Plot.text(marks, {x: "x", y: "y", text: within, dy: under / 2, fill: mark => isDoubtful(mark) ? "var(--ink)" : "var(--page)", pointerEvents: "none"})]});
  const across = mark => chart.kind === "bars" ? (mark.low + mark.high) / 2 : mark.x;
  const tips = Plot.tip(marks, Plot.pointer({x: across, y: "y", title, fill: "var(--page)", stroke: "var(--muted)", maxRadius: 30, clip: false}));
  const reference = chart.reference === null ? [] : [(chart.kind === "dots" || chart.kind === "bars" ? Plot.ruleX : Plot.ruleY)([chart.reference], {stroke: "var(--muted)", strokeDasharray: "4 3"})];
  if (chart.kind === "bars") return Plot.plot({...options, y: {...options.y, type: "band", padding: 0.15}, marks: [...namesOf(above, under && under / 2 - 0.425 * (down - 42) / (names.length + 0.15)), ...asidesOf(asides, narrow), Plot.barX(marks, {x1: "low", x2: "high", y: "y", fill, fillOpacity: opacityOf, href, insetTop: under}), Plot.ruleY(marks.filter(mark => (mark.x_low ?? null) !== null), {x1: "x_low", x2: "x_high", y: "y", stroke: "var(--ink)", strokeWidth: 1.5, dy: under / 2, pointerEvents: "none"}), tips]});
  const known = (low, high) => marks.filter(mark => (mark[low] ?? null) !== null), sideways = chart.kind === "dots" ? ["low", "high"] : ["x_low", "x_high"];
  const bars = [Plot.link(known(...sideways), {x1: sideways[0], x2: sideways[1], y1: "y", y2: "y", stroke: fill}),
    ...(chart.kind === "dots" ? [] : [Plot.link(known("low", "high"), {x1: "x", x2: "x", y1: "low", y2: "high", stroke: fill})])];
  const joined = chart.kind === "lines" ? [Plot.line(marks, {x: "x", y: "y", z: mark => `${mark.series} ${mark.join ?? ""}`, sort: "x", stroke: fill, strokeWidth: 1.8})] : [];
  const place = (name, value) => { const to = {log: Math.log, linear: Number, names: one => under_.indexOf(one)}[chart[name].kind], [low, high] = chart[name].kind === "names" ? [under_[0], under_.at(-1)] : view?.[name] ?? commonOf(chart[name]) ?? endsOn(chart, marks, name); return long[name] * (to(value) - to(low)) / (to(high) - to(low) || 1); };
  const said_ = chart.kind === "lines" && chart.level ? Object.entries(sidesOf(marks.filter(mark => mark.text), mark => [place("x", mark.x), -place("y", mark.y)])).map(([dy, own]) => Plot.text(own, {x: "x", y: "y", text: "text", dy: Number(dy), fill: "var(--ink)", stroke: "var(--page)", strokeWidth: 4, pointerEvents: "none"})) : [];
  const front = chart.kind === "points" ? [...new Set(marks.map(mark => mark.join ?? null))].filter(join => join !== null).map(join => frontOf(marks.filter(mark => mark.join === join))) : [];
  return Plot.plot({...options, marks: [...reference, ...namesOf(above, under && -under / 2 - 8), ...asidesOf(asides, narrow), ...front, ...bars, ...joined, Plot.dot(marks, {x: "x", y: "y", fill: mark => isDoubtful(mark) ? "var(--page)" : fill(mark), stroke: mark => isDoubtful(mark) ? fill(mark) : "var(--page)", strokeWidth: mark => isDoubtful(mark) ? 1.5 : 0.5, r: mark => isWarm(mark) ? 2.5 : 4, symbol: mark => looks.get(mark.series).symbol, href}), ...said_, tips]});
}
// The points that no other beats, as steps: up to each where more is better along x, from each where less is.
function frontOf(points) {
  const sorted = [...points].sort((a, b) => a.x - b.x);
  return Plot.line(sorted, {x: "x", y: "y", curve: sorted.at(-1).y > sorted[0].y ? "step-before" : "step-after", stroke: "var(--muted)", strokeDasharray: "4 3"});
}
// Marks whose text has room above them, and those whose text has room below them alone; `place` is where a mark is, in pixels.
function sidesOf(marks, place) {
  const kept = [], sides = {"-11": [], 12: []};
  for (const mark of [...marks].sort((a, b) => a.x - b.x)) {
    const [x, y] = place(mark), half = 3.3 * mark.text.length + 2;
    const side = [-11, 12].find(dy => kept.every(one => Math.abs(one.x - x) >= one.half + half || Math.abs(one.y - y - dy) >= 14));
    if (!side) continue;
    kept.push({x, y: y + side, half});
    sides[side].push(mark);
  }
  return sides;
}
// The ends of what marks, their intervals and a reference take of an axis.
function endsOn(chart, marks, name) {
  const across = ["dots", "bars"].includes(chart.kind) ? "x" : "y", fields = chart.kind === "bars" ? ["low", "high", "x_low", "x_high"] : [name, ...(name === across ? ["low", "high"] : ["x_low", "x_high"])];
  const found = [...marks.flatMap(mark => fields.map(field => mark[field])), name === across ? chart.reference : null].filter(one => Number.isFinite(one) && (chart[name].kind !== "log" || one > 0));
  return [Math.min(...found), Math.max(...found)];
}
// Ticks of an axis of tokens: the numbers that were measured, which are powers of two more often than of ten; the largest first, as long as labels have room. (Of base 10, d3 writes few but the smallest of a decade.)
function countsOn(marks, view, pixels) {
  const all = [...new Set(marks.map(mark => mark.x))].sort((a, b) => b - a), [low, high] = view ?? [all.at(-1), all[0]];
  const kept = [], place = one => pixels * Math.log(one / low) / (Math.log(high / low) || 1), room = (one, other) => 3.1 * (text(one).length + text(other).length) + 10;
  for (const one of all) if (one >= low && one <= high && (!kept.length || place(kept.at(-1)) - place(one) >= room(one, kept.at(-1)))) kept.push(one);
  return kept;
}
// Ticks of a logarithmic axis, as many as have room for their labels; undefined where fewer than two would be left. Of base 10, d3 leaves out the labels of some.
const labelsAll = 1e6 + 0.5;
const mantissas = [Array.from({length: 90}, (_, i) => (i + 10) / 10), [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5], [1, 2, 5], [1, 2, 3], [1, 3], [1]];
function ticksOf([low, high], pixels, room) {
  const place = one => pixels * Math.log(one / low) / Math.log(high / low), first = Math.floor(Math.log10(low)), decades = Array.from({length: Math.max(0, Math.ceil(Math.log10(high)) - first) + 1}, (_, i) => 10 ** (first + i));
  const within = list => decades.flatMap(ten => list.map(one => Number((one * ten).toPrecision(3)))).filter(one => one >= low && one <= high);
  const fitting = mantissas.map(within).find(list => list.length && list.every((one, i) => !i || place(one) - place(list[i - 1]) >= (room(short(one)) + room(short(list[i - 1]))) / 2));
  return fitting?.length > 1 ? fitting : undefined;
}
// Headings of a matrix that do not fit above their columns rise to the right.
const rotated = names => Math.max(...[...names].map(name => name.length)) > 3;
// How much room the headings of a matrix need above it.
const riseOf = heads => rotated(heads) ? Math.max(64, 24 + 3.3 * Math.max(...heads.map(name => name.length))) : 44;
// How far the headings of a matrix, which rise to the right, reach over its last column.
function asideOf(names, wide) {
  if (!rotated(names)) return 18;
  return Math.max(18, ...names.map((name, i) => 6 * name.length - (names.length - i - 0.5) * Math.min(110, wide / names.length)));
}
// The same where columns and what lies beside them share a width.
function besideOf(names, all) {
  const left = names.map((_, i) => (names.length - i - 0.5) / names.length);
  return Math.max(18, rotated(names) ? Math.max(...names.map((name, i) => (6 * name.length - left[i] * all) / (1 - left[i]))) : 0);
}
// So far above the middle of their lines that no mark touches them.
function namesOf(above, dy) {
  return dy ? [Plot.text(above, {y: ([name]) => name, text: ([, lines]) => lines.join("\n"), lineHeight: 1.2, frameAnchor: "left", dy, textAnchor: "start", fill: "var(--ink)", stroke: "var(--page)", strokeWidth: 4, clip: false})] : [];
}
// At the ends of their lines, where these are not below their names.
function asidesOf(asides, narrow) {
  return narrow ? [] : [Plot.text(asides, {y: ([name]) => name, text: ([, text]) => text, frameAnchor: "right", dx: 10, textAnchor: "start", fill: "var(--ink)", clip: false})];
}
// A text in lines of at most so many letters, broken behind blanks; a word that is longer than a line also behind hyphens and underscores.
function broken(text, most) {
  const lines = [""];
  for (const part of text.split(/(?<= )/).flatMap(word => word.length > most ? word.split(/(?<=[_-])/) : word)) lines.at(-1) && (lines.at(-1) + part).trimEnd().length > most ? lines.push(part) : lines.push(lines.pop() + part);
  return lines;
}
function legendOf(chart, hidden, redraw) {
  const box = element("div", "", {class: "legend", role: "group", "aria-label": "Series, to switch off and on"});
  box.append(...chart.legend.map(one => {
    const button = element("button", one.name, {type: "button", "aria-pressed": "true"}), key = Plot.plot({width: 14, height: 14, margin: 0, style: {background: "none", display: "inline-block"}, color: {type: "identity"}, symbol: {type: "identity"},
      marks: [Plot.dot([one], {frameAnchor: "middle", fill: tint, r: 4.5, symbol: "symbol"})]});
    key.setAttribute("aria-hidden", "true");
    button.prepend(key);
    button.onclick = () => {
      hidden.has(one.name) ? hidden.delete(one.name) : hidden.add(one.name);
      button.setAttribute("aria-pressed", String(!hidden.has(one.name)));
      redraw();
    };
    return button;
  }));
  return box;
}
function numbersOf(chart, marks) {
  const made = element("details", "", {class: "numbers"});
  made.append(element("summary", marks.length === 1 ? "The number of this figure" : `The ${marks.length} numbers of this figure`));
  made.ontoggle = () => {
    if (made.children.length > 1) return;
    made.append(tableOf("Numbers of the figure", ["panel", "series", chart.x.kind === "names" ? "column" : chart.x.label, chart.y.kind === "names" ? "line" : chart.y.label, "interval", "in words"], marks.map(mark => [
      mark.panel, mark.row ? element("a", mark.series, {href: addressOf(mark.row)}) : mark.series, number(mark.x), number(mark.y), chart.kind === "bars" ? "" : between(mark.low, mark.high), mark.says ?? ""])));
  };
  return made;
}
function drawChart(name) {
  guarded(`#chart-${name}`, () => drawMarks(name));
}
function drawMarks(name) {
  const chart = charts[name], box = byId(`chart-${name}`), marks = marksOf(chart), hidden = new Set(), looks = new Map(chart.legend.map(one => [one.name, one]));
  const panels = element("div", "", {class: `panels ${chart.y.kind === "names" ? "tall" : ""}`}), of = [...new Set(marks.map(mark => mark.panel))];
  const views = new Map(), scaled = panel => ({...chart, ...chart.own[panel]}), alike = (panel, name) => of.filter(other => ["label", "kind"].every(part => scaled(other)[name][part] === scaled(panel)[name][part]));
  // Panels of one scale have the same ends, whatever series are switched off, and panels with names the same margins.
  const commonOf = (panel, name) => { const same = new Set(alike(panel, name)); return endsOn(scaled(panel), marks.filter(mark => same.has(mark.panel)), name); };
  const common = new Map(of.map(panel => [panel, {...scaled(panel), ends: chart.shared ? commonOf(panel, "x") : null, rise: chart.level ? commonOf(panel, "y") : null, ...(chart.kind === "matrix" ? {} : {letters: lettersOf(marks)})}]));
  const redraw = () => panels.replaceChildren(...of.map(panel => panelBox(common.get(panel), panel, marks.filter(mark => mark.panel === panel && !hidden.has(mark.series)), Math.max(280, Math.min(widthOf(panels, chart, of.length), 1340)), looks, views)));
  box.replaceChildren(legendOf(chart, hidden, redraw), panels, numbersOf(chart, marks));
  box.append(element("p", [chart.note, chart.from].filter(Boolean).map(text => `${text[0].toUpperCase()}${text.slice(1)}.`).join(" "), {class: "small from"}));
  redraw();
  tinted.set(name, redraw);
}
// A panel with its name, which draws itself again in another view and keeps the focus.
function panelBox(chart, panel, shown, wide, looks, views) {
  const axes = zoomed(chart), one = element("div", "", axes.length && shown.length ? {tabindex: 0, role: "group", "aria-label": `${panel}: + and - zoom, arrows move, 0 shows all`} : {});
  if (!shown.length) { one.append(element("h4", panel), element("p", "All of its series are switched off.", {class: "small"})); return one; }
  const full = Object.fromEntries(axes.map(name => [name, panelOf(chart, shown, wide, looks).scale(name).domain]));
  const paint = view => {
    views.set(panel, view);
    const svg = panelOf(chart, shown, wide, looks, view), head = element("h4", panel), all = element("button", "show all", {type: "button"});
    all.onclick = () => { paint(null); one.focus(); };
    if (view) head.append(" ", all);
    one.replaceChildren(head, svg.width.baseVal.value > wide ? scrolling(svg, panel) : svg);
    if (axes.length) zoomable(one, svg, chart, full, paint);
  };
  paint(views.get(panel) ?? null);
  return one;
}
// A matrix of many columns in a narrow window, of which numbers and headings stay readable.
function scrolling(svg, panel) {
  const box = element("div", "", {class: "scroll whole bare", tabindex: 0, role: "region", "aria-label": panel});
  box.append(svg);
  return box;
}
// What a panel of a matrix needs: names on the left, and columns in which a number of five letters has room.
function matrixWidth(chart) {
  const marks = marksOf(chart), panels = [...new Set(marks.map(mark => mark.panel))];
  return Math.max(...panels.map(panel => {
    const mine = marks.filter(mark => mark.panel === panel), names = [...new Set(mine.map(mark => mark.x))], all = 48 * names.length;
    return 44 + 6.7 * Math.max(...mine.map(mark => mark.y.length)) + all + asideOf(names, all);
  }));
}
function widthOf(panels, chart, count) {
  const wide = panels.clientWidth || 600, long = chart.y.kind === "names" && chart.legend.length && Math.max(...marksOf(chart).map(mark => mark.y.length)) > 24;
  const columns = chart.kind === "matrix" ? Math.min(2, count, Math.max(1, Math.floor(wide / matrixWidth(chart)))) : long ? 1 : Math.min(count, Math.max(1, Math.floor(wide / 380)));
  panels.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  return (wide - 24 * (columns - 1)) / columns;
}
// Drawn when they come near the window, and again when its width changes; on paper all of them.
let drawnAt = innerWidth;
const near = new IntersectionObserver(seen => seen.filter(one => one.isIntersecting).forEach(one => { near.unobserve(one.target); drawChart(one.target.id.slice("chart-".length)); }), {rootMargin: "800px"});
Object.keys(charts).forEach(name => near.observe(byId(`chart-${name}`)));
addEventListener("resize", () => { if (innerWidth !== drawnAt) { drawnAt = innerWidth; tinted.forEach(redraw => redraw()); } });
addEventListener("beforeprint", () => Object.keys(charts).filter(name => !tinted.has(name)).forEach(drawChart));

// A row's samples as a strip, and two rows side by side. Reads `page`, `value`, `element`, `brief` of rows.js and `stored` of answer.js.
function timesOf(row) {
  const held = page.samples.rows[row], median = value(row, "median_us"), us = one => median * (1 + one / page.samples.scale);
  return held && {kept: held.at.map(us), aside: (held.aside ?? []).map(us), every: held.every};
}
// Samples from top to bottom in the order in which they were taken, hollow those that were set aside; the band is the interval of the median.
// `ends`: of the scale, so that two strips can share one.
function strip(row, ends) {
  const times = timesOf(row), [wide, high, edge] = [640, 110, 12];
  if (!times) return element("p", "No sample of this row is stored.", {class: "small"});
  const [least, most] = ends ?? endsOf([row]), x = us => edge + (wide - 2 * edge) * (us - least) / (most - least || 1);
  const said = `${times.kept.length} samples${times.every > 1 ? `, one in ${times.every} of those stored` : ""}, ${brief(Math.min(...times.kept))} to ${brief(Math.max(...times.kept))} µs, median ${brief(value(row, "median_us"))}`;
  const svg = drawn("svg", {viewBox: `0 0 ${wide} ${high}`, class: "strip", role: "img", "aria-label": `${value(row, "implementation")}: ${said}`});
  const [low, up] = ["ci_low_us", "ci_high_us"].map(name => x(value(row, name) ?? value(row, "median_us")));
  svg.append(drawn("rect", {x: low, y: 0, width: Math.max(up - low, 1), height: high}), drawn("line", {x1: x(value(row, "median_us")), x2: x(value(row, "median_us")), y1: 0, y2: high}));
  const points = (list, kind) => list.forEach((us, i) => svg.append(drawn("circle", {cx: x(us), cy: 4 + (high - 8) * (i + 0.5) / list.length, r: 2.5, class: kind}, `${brief(us)} µs`)));
  points(times.kept, "");
  points(times.aside, "aside");
  const box = element("figure", "", {class: "strips"}), scale = element("div", "", {class: "ends"});  // not in the picture: there they would shrink with it
  scale.append(...[least, most].map(us => element("span", `${brief(us)} µs`)));
  box.append(svg, scale, element("figcaption", `${said}. From top to bottom in the order taken; band: 95 % interval of the median${times.aside.length ? "; hollow: set aside" : ""}.`));
  return box;
}
function endsOf(rows) {
  const all = rows.flatMap(row => [...(timesOf(row)?.kept ?? []), ...(timesOf(row)?.aside ?? []), value(row, "ci_low_us"), value(row, "ci_high_us")]).filter(one => one !== null);
  return [Math.min(...all), Math.max(...all)];
}
// A button per row; the second row that is chosen opens the comparison, a third takes the first one's place.
function chooserOf(row) {
  const button = element("button", "", {type: "button", class: "choose", "aria-pressed": String(chosenRows.includes(row)), "aria-label": `compare ${value(row, "implementation")}, ${value(row, "cell")}`, title: "choose two rows to compare them"});
  button.onclick = () => choose(row, !chosenRows.includes(row));
  return button;
}
function choose(row, wanted) {
  if (wanted) chosenRows.push(row); else chosenRows.splice(chosenRows.indexOf(row), 1);
  if (chosenRows.length > 2) mark(chosenRows.shift(), false);
  mark(row, wanted);
  showComparison();
  if (chosenRows.length === 2) history.replaceState(null, "", `#compare-${chosenRows.map(one => page.ids[one]).join("-")}`);
}
function mark(row, on) { lineOf(row).querySelector(".choose").setAttribute("aria-pressed", String(on)); }
function showComparison() {
  const box = byId("compared");
  box.hidden = !chosenRows.length;
  if (chosenRows.length < 2) return void box.replaceChildren(element("p", chosenRows.length ? `Chosen: ${nameOf(chosenRows[0])}. Choose another row (⇄) to compare.` : ""));
  const [a, b] = chosenRows, ends = endsOf([a, b]), strips = element("div", "", {class: "pair"});
  for (const row of [a, b]) {
    const one = element("section");
    one.append(element("h4", nameOf(row)), strip(row, ends));
    strips.append(one);
  }
  const close = element("button", "close", {type: "button"});
  close.onclick = () => { [a, b].forEach(row => mark(row, false)); chosenRows.length = 0; showComparison(); };
  box.replaceChildren(element("h3", "Two rows"), element("p", ratioOf(a, b), {id: "ratio"}), strips, tableOf("What differs", ["field", nameOf(a), nameOf(b)], differences(a, b)), close);
}
const nameOf = row => `${value(row, "bench")}: ${value(row, "implementation")}, ${value(row, "cell")}`;
const recordOf = row => Object.fromEntries(fieldsRead.map(name => [name, value(row, name)]));
function ratioOf(a, b) {
  const [one, two] = [recordOf(a), recordOf(b)], [first, second] = [one.implementation, two.implementation];
  if (one.median_us === null || two.median_us === null) return "One of them has no time: nothing can be compared.";
  const sameCell = one.bench === two.bench && one.cell === two.cell, sameCard = card(a) === card(b), found = sameCell && sameCard ? stored(one, two) : null;
  if (found?.verdict) return `${first} is ${found.verdict === "same" ? "the same within the noise" : found.verdict} (stored verdict): ${timesText(found)} as fast as ${second}, paired block by block.`;
  const why = !sameCell ? "they are of different cells" : !sameCard ? "they are of different cards" : "none was stored of this pair";
  const pair = found ?? {ratio: two.median_us / one.median_us, low: two.ci_low_us / one.ci_high_us, high: two.ci_high_us / one.ci_low_us};
  return `The time of ${second} over that of ${first}: ${timesText(pair)}${found ? ", paired block by block" : ", as wide as both intervals make it"}. No verdict: ${why}.`;
}
function differences(a, b) {
  const kept = page.fields.filter(({name}) => text(value(a, name)) !== text(value(b, name)) || name === "median_us");
  return kept.map(({name}) => [breaking(element("span"), name, 1), text(value(a, name)), text(value(b, name))]);
}
function followComparison() {
  const found = location.hash.match(/^#compare-(\w+)-(\w+)$/)?.slice(1).map(id => page.ids.indexOf(id));
  if (!found || found.includes(-1) || found[0] === found[1]) return;
  chosenRows.splice(0).forEach(row => mark(row, false));
  found.forEach(row => { chosenRows.push(row); mark(row, true); });
  showComparison();
  byId("compared").scrollIntoView();
}

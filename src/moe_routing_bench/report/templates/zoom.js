// Zoom into a panel of a figure: a drag across it with a mouse, or keys where it has the focus. A view is the domain of each scale that has numbers.
const least = 8, keys = {"+": "in", "=": "in", "-": "out", "ArrowLeft": "left", "ArrowRight": "right", "ArrowUp": "up", "ArrowDown": "down"};
const zoomed = chart => ["x", "y"].filter(name => chart.kind !== "matrix" && chart[name].kind !== "names");
// The domain between two places of the drawing, which works for logarithmic scales as for linear ones.
function domainOf(scale, ends) { return ends.map(scale.invert).sort((a, b) => a - b); }
function zoomable(box, svg, chart, full, set) {
  const scales = Object.fromEntries(zoomed(chart).map(name => [name, svg.scale(name)]));
  const domains = ends => Object.fromEntries(Object.entries(ends).map(([name, pair]) => [name, domainOf(scales[name], pair)]));
  dragged(svg, scales, ends => set(domains(ends)));
  box.onkeydown = event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== box) return;
    if (event.key === "0") return void set(null);
    const way = keys[event.key];
    if (!way) return;
    event.preventDefault();
    const ends = Object.fromEntries(Object.entries(scales).map(([name, scale]) => [name, moved(name, scale.range, way)]));
    const found = domains(ends);
    set(Object.keys(found).every(name => found[name][0] <= full[name][0] && found[name][1] >= full[name][1]) ? null : found);
  };
}
// Where the ends of an axis are looked for after a step: a sixth nearer to its middle, a little further back, so that as many steps show all again, or a fifth to one side.
function moved(name, [start, end], way) {
  const span = end - start, aside = {x: {left: -0.2, right: 0.2}, y: {up: 0.2, down: -0.2}}[name][way] ?? 0, narrower = {in: 1 / 6, out: -0.3}[way] ?? 0;
  return [start + span * (narrower + aside), end + span * (aside - narrower)];
}
// A drag marks a rectangle; one that is thin in a direction leaves that axis as it is. A press without a drag stays a click.
function dragged(svg, scales, done) {
  let from = null, area = null;
  const place = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const within = (at, [start, end]) => Math.min(Math.max(at, Math.min(start, end)), Math.max(start, end));
  const span = (name, to) => Math.abs(to[name] - from[name]) < least ? scales[name].range : [from[name], to[name]].map(at => within(at, scales[name].range));
  svg.ondragstart = event => event.preventDefault();
  svg.onpointerdown = event => { from = event.pointerType === "touch" || event.button ? null : place(event); };
  svg.onpointermove = event => {
    const to = place(event);
    if (!from || !area && Math.hypot(to.x - from.x, to.y - from.y) < least) return;
    if (!area) svg.append(area = drawn("rect", {class: "dragged"}));
    if (event.pointerId && !svg.hasPointerCapture(event.pointerId)) svg.setPointerCapture(event.pointerId);
    const [left, right] = span("x", to).sort((a, b) => a - b), [top, bottom] = "y" in scales ? span("y", to).sort((a, b) => a - b) : [0, svg.height.baseVal.value];
    for (const [name, one] of Object.entries({x: left, y: top, width: right - left, height: bottom - top})) area.setAttribute(name, one);
  };
  svg.onpointerup = event => {
    if (area) done(Object.fromEntries(Object.keys(scales).map(name => [name, span(name, place(event))])));
    area?.remove();
    from = area = null;
  };
  svg.onpointercancel = () => { area?.remove(); from = area = null; };
}

// Which lines of the table are laid out: of few rows all, of many those in sight and some around them, between spacers as high as the others.
const few = 150, around = 15, onPaper = 2000, scroller = table.closest(".scroll"), opened = new Map(), heights = new Map();  // of an opened row: what it opens to, and its height when it was last laid out
let lineTall = 24, laid = [0, 0], printing = false, placeOf = new Map();

function layOut() {
  opened.forEach((made, row) => { if (made.isConnected) heights.set(row, made.offsetHeight); });
  laid = printing ? [0, Math.min(shown.length, onPaper)] : shown.length <= few ? [0, shown.length] : inSight(around);
  const [from, to] = laid, held = document.activeElement, rows = shown.slice(from, to);
  const parts = rows.flatMap(row => opened.has(row) ? [lineOf(row), opened.get(row)] : [lineOf(row)]);
  if (!printing) parts.unshift(...spacer(topOf(from))), parts.push(...spacer(topOf(shown.length) - topOf(to)));
  body.replaceChildren(...parts);
  if (held !== document.activeElement && body.contains(held)) held.focus({preventScroll: true});
  const measured = rows.length && lineOf(rows[0]).getBoundingClientRect().height || lineTall, guessed = Math.abs(measured - lineTall) > 0.01;
  lineTall = measured;
  if (printing || shown.length > few) heads.forEach(head => { head.style.minWidth = printing ? "" : `${head.offsetWidth}px`; });  // columns do not jump as lines come and go
  if (guessed && shown.length > few && !printing) layOut();
}
function spacer(high) {
  const line = element("tr", "", {class: "spacer", "aria-hidden": "true"});
  line.append(element("td", "", {colspan: heads.length, style: `height: ${high}px`}));
  return high > 0 ? [line] : [];
}
// Places and heights of the rows that are open, in order.
function openPlaces() {
  const found = [...opened].filter(([row]) => placeOf.has(row)).map(([row, made]) => [placeOf.get(row), made.isConnected ? made.offsetHeight : heights.get(row) ?? 0]);
  return found.sort((a, b) => a[0] - b[0]);
}
function topOf(place) { return place * lineTall + openPlaces().reduce((sum, [at, high]) => at < place ? sum + high : sum, 0); }
function placeAt(top) {
  let above = 0;
  for (const [place, high] of openPlaces()) {
    const end = (place + 1) * lineTall + above;
    if (top < end) break;
    above += Math.min(high, top - end);
  }
  return Math.max(0, Math.min(shown.length, Math.floor((top - above) / lineTall)));
}
function inSight(more) {
  const {scrollTop, clientHeight} = scroller;
  return [Math.max(0, placeAt(scrollTop) - more), Math.min(shown.length, placeAt(scrollTop + clientHeight) + 1 + more)];
}
function scrolled() {
  const [from, to] = inSight(0);
  if (shown.length > few && !printing && (from < laid[0] || to > laid[1])) layOut();
}
// So that the row's line is there, below the heading.
function reveal(row) {
  if (!lineOf(row).isConnected) { scroller.scrollTop = topOf(placeOf.get(row)); layOut(); }
}
scroller.addEventListener("scroll", scrolled, {passive: true});
addEventListener("beforeprint", () => { printing = true; layOut(); });
addEventListener("afterprint", () => { printing = false; layOut(); });

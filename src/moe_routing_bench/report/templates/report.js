"use strict";
const columns = JSON.parse(document.getElementById("columns").textContent);
const data = JSON.parse(document.getElementById("data").textContent);
const body = document.querySelector("#rows tbody"), heads = [...document.querySelectorAll("#rows th")];
const at = Object.fromEntries(columns.map((c, i) => [c.name, i]));
const dash = "–";
let sortedBy = null, way = 1;

function show(v) {
  if (v === null) return dash;
  return typeof v === "number" && Math.abs(v) >= 10000 ? v.toLocaleString("en-US", {maximumFractionDigits: 0}) : String(v);
}
function text(v) {
  if (!Array.isArray(v)) return show(v);
  if (v.length === 2) return `${show(v[0])} to ${show(v[1])}`;
  return v[1] === null ? show(v[0]) : `${show(v[0])} [${show(v[1])}, ${show(v[2])}]`;
}
const numeric = columns.map((_, i) => data.some(r => typeof r[i] === "number" || Array.isArray(r[i])));
heads.forEach((head, i) => { if (numeric[i]) head.classList.add("n"); });
const lines = data.map(row => {
  const line = document.createElement("tr"), shown = row.map(text);
  row.forEach((v, i) => {
    const cell = line.insertCell();
    cell.textContent = shown[i];
    if (numeric[i]) cell.className = "n";
  });
  if (row[at.status] !== "ok") line.className = "bad";
  return {row, line, words: shown.concat(row.filter(v => typeof v === "number").map(String)).join(" ").toLowerCase()};
});
function compare(a, b) {
  const [x, y] = [a, b].map(l => Array.isArray(l.row[sortedBy]) ? l.row[sortedBy][0] : l.row[sortedBy]);
  if (x === null || y === null) return (x === null) - (y === null);
  return way * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
}
function draw() {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const picked = ["bench", "implementation"].map(n => [at[n], document.getElementById(n).value]);
  const shown = lines.filter(l => picked.every(([i, v]) => !v || l.row[i] === v) && words.every(w => l.words.includes(w)));
  if (sortedBy !== null) shown.sort(compare);
  body.replaceChildren(...shown.map(l => l.line));
  document.getElementById("count").textContent = `${shown.length} of ${data.length} rows`;
}
for (const name of ["bench", "implementation"]) {
  const select = document.getElementById(name);
  for (const value of new Set(data.map(r => r[at[name]]))) select.add(new Option(value, value));
  select.onchange = draw;
}
document.getElementById("filter").oninput = draw;
heads.forEach((head, i) => head.querySelector("button").onclick = () => {
  way = sortedBy === i ? -way : 1;
  sortedBy = i;
  heads.forEach((h, j) => h.setAttribute("aria-sort", j !== i ? "none" : way > 0 ? "ascending" : "descending"));
  draw();
});
draw();

"use strict";
// The rows are JSON, gzip and base64: a fifth of the bytes. The browser unpacks them, also of a page that is a file, and then runs the page's parts, each as a script of its own: what one of them throws leaves the others whole.
const unpacked = unpack().catch(error => {
  console.error(error);
  for (const box of document.querySelectorAll("#said, #problem")) box.textContent = `This browser cannot unpack the rows (${error.message}). They are in measurements.parquet, too; browsers since 2023 can.`;
  document.querySelectorAll(".chart").forEach(showPicture);
});
async function unpack() {
  const held = await fetch(`data:application/gzip;base64,${document.getElementById("data").textContent}`);
  globalThis.page = await new Response(held.body.pipeThrough(new DecompressionStream("gzip"))).json();
  document.querySelectorAll("script.part").forEach(runPart);
  performance.mark("opened");  // how long that took, for whoever asks the browser
}
// Scripts share their names; an exception of one is an event of the window before the next one runs.
function runPart(part) {
  const failed = event => failedAt(part.dataset.place, event.error ?? event.message);
  addEventListener("error", failed);
  document.body.append(Object.assign(document.createElement("script"), {textContent: `"use strict";\n${part.textContent}`}));
  removeEventListener("error", failed);
}
// The same for what a part does later.
function guarded(place, run) {
  try { run(); } catch (error) { console.error(error); failedAt(place, error); }
}
// A line at the place of a part that failed, and the pictures of its figures.
function failedAt(place, error) {
  for (const box of document.querySelectorAll(place)) {
    const said = Object.assign(document.createElement("span"), {className: "small", textContent: `This part of the page failed: ${error}. The other parts do not need it.`});
    if (box.matches(".chart")) showPicture(box);
    if (box.matches("#said, #problem")) box.replaceChildren(said); else box.append(said);
  }
}
// The same figure from the folder beside the page, as browsers without scripts show it, where this one cannot draw it.
function showPicture(box) { box.replaceChildren(document.createRange().createContextualFragment(box.parentElement.querySelector("noscript")?.textContent ?? "")); }
// After all scripts, and after the pictures of the page, which may have come before the rows were unpacked.
function whenLoaded(run) { document.readyState === "complete" ? queueMicrotask(run) : addEventListener("load", run); }

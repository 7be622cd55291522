"use strict";
// The rows are JSON, gzip and base64: a fifth of the bytes. The browser unpacks them, also of a page that is a file, and then runs the page's other scripts.
const unpacked = unpack().catch(error => {
  console.error(error);
  for (const id of ["said", "problem"]) document.getElementById(id).textContent = `This browser cannot unpack the rows (${error.message}). They are in measurements.parquet, too; browsers since 2023 can.`;
  document.querySelectorAll(".chart").forEach(showPicture);
});
async function unpack() {
  const held = await fetch(`data:application/gzip;base64,${document.getElementById("data").textContent}`);
  globalThis.page = await new Response(held.body.pipeThrough(new DecompressionStream("gzip"))).json();
  const script = document.createElement("script");
  script.textContent = document.getElementById("program").textContent;
  document.body.append(script);
  performance.mark("opened");  // how long that took, for whoever asks the browser
}
// The same figure from the folder beside the page, as browsers without scripts show it, where this one cannot draw it.
function showPicture(box) { box.replaceChildren(document.createRange().createContextualFragment(box.parentElement.querySelector("noscript").textContent)); }
// After all scripts, and after the pictures of the page, which may have come before the rows were unpacked.
function whenLoaded(run) { document.readyState === "complete" ? queueMicrotask(run) : addEventListener("load", run); }

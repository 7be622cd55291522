// What the report's charts use of Observable Plot: `make vendor` bundles it to plot.js.
export {barX, cell, dot, line, link, plot, pointer, ruleX, ruleY, text, tip} from "@observablehq/plot";

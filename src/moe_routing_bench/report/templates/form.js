// The controls of a form that asks: each has the name of its axis, and a value that is text.
const form = byId("question"), controls = new Map();
function control(name, label, says, made) {
  const box = element("label", `${label} `, {title: says});
  made.name = name;
  box.append(made);
  controls.set(name, made);
  return box;
}
function chooser(choices) {
  const made = element("select");
  made.append(...choices.map(([value, text]) => element("option", text, {value})));
  return made;
}
// A number of an axis, with values to choose from; `empty` says what no number means.
function numberControl(axis, known, empty) {
  const options = element("datalist", "", {id: `known-${axis.name}`});
  options.append(...known.map(one => element("option", "", {value: one})));
  const made = element("input", "", {type: "number", min: axis.scale === "linear" ? 0 : "any", step: "any", list: options.id, placeholder: empty});
  const box = control(axis.name, axis.label, axis.says, made);
  box.append(options);
  return box;
}
const canBe = (name, one) => Number.isFinite(Number(one)) && (axisOf(name).scale === "log" ? Number(one) > 0 : Number(one) >= 0);

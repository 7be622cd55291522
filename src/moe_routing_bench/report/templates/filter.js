// What the box above the table takes: words, and typed terms such as tokens>=4096. Reads `page`, `value` and `text` of rows.js.
const WORD = /(?:"[^"]*"|[^\s"])+/g, TYPED = /^(-?)([A-Za-z]\w*)(>=|<=|>|<|=|:)(.*)$/;
const orders = {">=": (a, b) => a >= b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, "<": (a, b) => a < b};
const spelling = new Map([...Object.entries(page.aliases), ...page.fields.map(f => [f.name, f.name])]);
const holdsNumbers = new Map(page.fields.map(f => [f.name, f.number]));
const searched = [...new Set(page.columns.flatMap(c => c.fields)), "reason"];

// {test, problem}: a test of a row (null where the term means nothing), and one line that says why.
function term(word) {
  const found = TYPED.exec(word);
  if (!found) return plainTerm(word.startsWith("-") && word.length > 1, unquoted(word.replace(/^-(?=.)/, "")));
  const [, minus, key, relation, given] = found, name = spelling.get(key) ?? spelling.get(key.toLowerCase());
  if (!name) return {test: null, problem: `no field is called ${key}; fields are ${page.columns.map(c => c.name).join(", ")}, and all that a row opens to`};
  const wanted = unquoted(given).toLowerCase();
  if (!wanted) return {test: null, problem: `${word} lacks a value`};
  const typed = typedTerm(name, relation, wanted);
  return minus && typed.test ? {test: row => !typed.test(row), problem: ""} : typed;
}
function unquoted(word) { return word.replaceAll('"', ""); }
function typedTerm(name, relation, wanted) {
  if (wanted === "none" && ":=".includes(relation)) return {test: row => value(row, name) === null, problem: ""};
  if (holdsNumbers.get(name)) {
    const number = Number(wanted.replaceAll(",", "")), order = orders[relation] ?? ((a, b) => a === b);
    if (Number.isNaN(number)) return {test: null, problem: `${name} holds numbers, and ${wanted} is none`};
    return {test: row => value(row, name) !== null && order(value(row, name), number), problem: ""};
  }
  if (relation in orders) return {test: null, problem: `${name} holds words, which have no order: ${name}:${wanted} finds those that contain it`};
  const same = relation === "=" ? held => held === wanted : held => held.includes(wanted);
  return {test: row => value(row, name) !== null && same(text(value(row, name)).toLowerCase()), problem: ""};
}
// A number finds rows that hold just this number in an axis or result; other words are looked for inside texts.
function plainTerm(not, word) {
  const number = Number(word), lower = word.toLowerCase();
  const holds = held => typeof held === "number" ? held === number : held !== null && text(held).toLowerCase().includes(lower);
  return {test: row => not !== searched.some(name => holds(value(row, name))), problem: ""};
}
function parsed(asked) {
  const terms = (asked.match(WORD) ?? []).map(term);
  return {tests: terms.map(t => t.test).filter(Boolean), problems: terms.map(t => t.problem).filter(Boolean)};
}

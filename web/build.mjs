/* Builds the page into the coordinator's static folder, with a digest of its sources (tests compare it). */
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../services/coordinator/rest/static");
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({
  entryPoints: [join(here, "src/page.tsx"), join(here, "src/page.css")],
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome115", "firefox120", "safari17.5"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
});
copyFileSync(join(here, "src/index.html"), join(out, "index.html"));
const licenses = ["preact", "uplot"].map(name => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8")}`);
writeFileSync(join(out, "licenses.txt"), licenses.join("\n\n"));

const files = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
  .filter(entry => entry.isFile())
  .map(entry => relative(here, join(entry.parentPath, entry.name)));
const digest = createHash("sha256");
const types = "src/rest.ts"; // what is built does not depend on them
for (const name of [...files, "package.json", "build.mjs"].filter(name => name !== types).sort()) {
  digest.update(name + "\n").update(readFileSync(join(here, name)));
}
writeFileSync(join(out, "sources.sha256"), digest.digest("hex") + "\n");

/* Builds the page into the coordinator's static folder, and the script of reports into that of millrace/report. Both get a
   digest of the sources (tests compare it). */
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const source = name => join(here, "src", name);
const page = join(here, "../services/coordinator/rest/static");
const report = join(here, "../millrace/report/static");
const licenses = ["preact", "uplot"].map(name => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8")}`).join("\n\n");
const options = {
  bundle: true,
  minify: true,
  target: ["chrome115", "firefox120", "safari17.5"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
};
for (const out of [page, report]) {
  rmSync(out, { recursive: true, force: true });
  mkdirSync(out, { recursive: true });
}
await build({ ...options, entryPoints: [source("page.tsx"), source("page.css")], outdir: page, format: "esm" });
copyFileSync(source("index.html"), join(page, "index.html"));
writeFileSync(join(page, "licenses.txt"), licenses);
// A report is copied and sent without the files beside it: its script carries the licenses.
const entries = [{ in: source("report.tsx"), out: "report" }, { in: source("page.css"), out: "report" }];
await build({ ...options, entryPoints: entries, outdir: report, format: "iife", banner: { js: `/*\n${licenses}*/` } });

const files = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
  .filter(entry => entry.isFile())
  .map(entry => relative(here, join(entry.parentPath, entry.name)));
const digest = createHash("sha256");
const types = "src/rest.ts"; // what is built does not depend on them
for (const name of [...files, "package.json", "build.mjs"].filter(name => name !== types).sort()) {
  digest.update(name + "\n").update(readFileSync(join(here, name)));
}
const built = digest.digest("hex") + "\n";
for (const out of [page, report]) writeFileSync(join(out, "sources.sha256"), built);

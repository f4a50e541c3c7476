/* The spec of a job: what was given apart from the defaults. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api";
import { Choice } from "../parts/small";
import type { SpecView } from "../rest";
import { problem } from "../state";

/* The leaves of a spec by path. A list is a leaf. */
export function leaves(tree: unknown, path = ""): [string, unknown][] {
  if (tree === null || typeof tree !== "object" || Array.isArray(tree)) return [[path, tree]];
  const fields = Object.entries(tree);
  if (!fields.length) return path ? [[path, tree]] : [];
  return fields.flatMap(([name, value]) => leaves(value, path ? `${path}.${name}` : name));
}

export const shown = (value: unknown): string => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));

const WHICH = ["given", "all"] as const;
export function Spec({ id, version }: { id: string; version: string }) {
  const [spec, set] = useState<SpecView | null>(null);
  const [which, choose] = useState<(typeof WHICH)[number]>("given");
  useEffect(() => { get<SpecView>(`/v1/jobs/${id}/spec`).then(set, problem); }, [id, version]);
  if (!spec) return null;
  const given = new Set(leaves(spec.given).map(([path]) => path));
  const rows = leaves(which === "given" ? spec.given : spec.spec);
  const save = () => {
    const file = URL.createObjectURL(new Blob([JSON.stringify(spec.given, null, 2)], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: file, download: `${id}.json` }).click();
    URL.revokeObjectURL(file);
  };
  return (
    <>
      <div class="bar">
        <Choice label="Fields" of={WHICH} chosen={which} choose={choose} />
        <small>{which === "given" ? "Fields that differ from the defaults." : "Every field; bold ones differ from the defaults."}</small>
        <span class="space" />
        <button type="button" onClick={save}>save as a file</button>
      </div>
      <table class="spec"><tbody>
        {rows.map(([path, value]) => (
          <tr key={path} class={which === "all" && given.has(path) ? "given" : ""}><th scope="row"><code>{path}</code></th><td><code>{shown(value)}</code></td></tr>
        ))}
      </tbody></table>
    </>
  );
}

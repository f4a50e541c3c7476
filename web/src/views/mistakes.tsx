/* What is wrong with a spec or with changes of one: each field with its value, the reason and the fix. */
import { Prose } from "../parts/prose";
import type { Mistake } from "../rest";

export function Mistakes({ of, error }: { of: Mistake[]; error: Error | null }) {
  if (!of.length) return error && <p class="problem" role="alert">{error.message}</p>;
  return (
    <div role="alert"><ul class="mistakes" aria-label="Mistakes">
      {of.map(mistake => (
        <li key={`${mistake.field} ${mistake.reason}`}>
          <code>{mistake.field}</code>{mistake.value && <>: <code>{mistake.value}</code></>}: {mistake.reason}.
          {mistake.fix && <> <b>Fix:</b> <Prose of={mistake.fix} /></>}
        </li>
      ))}
    </ul></div>
  );
}

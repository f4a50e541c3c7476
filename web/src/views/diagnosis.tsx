/* What slows a job down: the findings of the coordinator, with the figures that say so and what to change. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api";
import { duration, figure } from "../format";
import { Prose } from "../parts/prose";
import { IDLE_COLORS } from "../parts/timeline";
import type { DiagnosisView, FindingView, IdleCause, JobView } from "../rest";
import { problem } from "../state";

const percent = (share: number) => `${Math.round(100 * share)} %`;

export function Diagnosis({ job }: { job: JobView }) {
  const [found, set] = useState<DiagnosisView | null>(null);
  const about = Math.floor(job.step / 5); // it rests on ten steps, so that one more changes little
  useEffect(() => { if (job.step) get<DiagnosisView>(`/v1/jobs/${job.id}/diagnosis`).then(set, problem); }, [job.id, about, job.state]);
  if (!found) return null;
  const parts = (Object.entries(found.loop_s) as [IdleCause, number][]).sort((a, b) => b[1] - a[1]);
  return (
    <section class="card wide" aria-label="Diagnosis">
      <div class="bar">
        <h2>{found.bottleneck ? `Slowed down by: ${found.bottleneck.replaceAll("_", " ")}` : "Nothing slows it down much"}</h2>
        <small>steps {found.from_step} to {found.to_step}, {duration(found.step_s)} each{found.from_spans ? "" : "; no spans are kept, so it rests on step metrics alone"}</small>
      </div>
      <div class="ledger" role="img" aria-label={`A step: ${parts.map(([cause, seconds]) => `${cause} ${duration(seconds)}`).join(", ")}`}>
        {parts.map(([cause, seconds]) => <span key={cause} style={{ flex: (1000 * seconds) / found.step_s, background: `var(--${IDLE_COLORS[cause]})` }} title={`${cause.replaceAll("_", " ")} ${duration(seconds)}`} />)}
      </div>
      <p class="key">{parts.slice(0, 6).map(([cause, seconds]) => (
        <span key={cause}><i style={{ background: `var(--${IDLE_COLORS[cause]})` }} />{cause === "trainer" ? "training" : cause.replaceAll("_", " ")} {duration(seconds)}</span>
      ))}</p>
      {found.forecasts.length > 0 && found.simulated_s !== null && (
        <p>Simulated, a step takes {duration(found.simulated_s)}; with {found.forecasts.map((each, place) => (
          <span key={`${each.setting} ${each.value}`}>{place > 0 && ", "}<code>{each.setting}: {String(each.value)}</code> {duration(each.step_s)}</span>
        ))}.</p>
      )}
      <div class="findings">{found.findings.map(each => <Finding key={each.bottleneck} of={each} />)}</div>
    </section>
  );
}

function Finding({ of }: { of: FindingView }) {
  return (
    <details class="more finding" open={of.share >= 0.1}>
      <summary><b>{of.message}</b> <small>at most {percent(of.share)} of the time{of.member && ` · ${of.member}`}</small></summary>
      <table><tbody>{of.figures.map(each => <tr key={each.name}><th scope="row">{each.name}</th><td>{figure(each.value)} {each.unit}</td><td class="soft">{each.meaning}</td></tr>)}</tbody></table>
      <ul>{of.changes.map(each => <li key={each.advice}>{each.setting && <code>{each.setting}</code>} <Prose of={each.advice} /></li>)}</ul>
    </details>
  );
}

/* What every service did in some steps of a job, why trainer and replicas were idle, and the trace of one group. */
import { useEffect, useMemo, useState } from "preact/hooks";

import { get, query } from "../api";
import { duration, figure } from "../format";
import { colorOf, traceOf, type Range } from "../lanes";
import { Empty } from "../parts/small";
import { IDLE_COLORS, Lanes } from "../parts/timeline";
import type { IdleCause, JobView, SpanKind, SpanView, TimelineView } from "../rest";
import { link, problem } from "../state";
import { Diagnosis } from "./diagnosis";

const KINDS: SpanKind[] = ["train", "generate", "publish", "score", "tool", "evaluate", "queue", "pause", "issue"];
const SHOWN: Partial<Record<SpanKind, string>> = { train: "train, update", publish: "publication", evaluate: "evaluate, fetch", queue: "waiting", pause: "pause, checkpoint", tool: "environment, tools", issue: "others" };
const LANES = ["coordinator", "trainer", "rollout", "rewards", "environment"];

export function Timeline({ job, step }: { job: JobView; step?: number }) {
  const [wanted, want] = useState<{ from: number; to: number } | null>(step === undefined ? null : { from: step, to: step });
  const newest = wanted === null ? job.step : null; // without a choice it follows the job
  const [timeline, set] = useState<TimelineView | null>(null);
  const [range, setRange] = useState<Range>({ start: 0, end: 1 });
  const [hidden, hide] = useState(new Set<string>());
  const [chosen, choose] = useState<SpanView | null>(null);
  useEffect(() => {
    let current = true;
    const to = wanted?.to ?? job.step;
    get<TimelineView>(`/v1/jobs/${job.id}/timeline${query({ from_step: wanted?.from ?? Math.max(0, to - 2), to_step: to })}`).then(found => {
      if (!current) return;
      set(found);
      setRange({ start: found.start_s, end: Math.max(found.end_s, found.start_s + 1e-3) });
      choose(null);
    }, problem);
    return () => { current = false; };
  }, [job.id, wanted?.from, wanted?.to, newest]);
  if (!timeline) return <Empty>…</Empty>;
  const { from_step: from, to_step: to } = timeline;
  const move = (by: number) => want({ from: Math.max(0, from + by), to: Math.max(0, Math.min(job.step + 1, to + by)) });
  const toggle = (kind: string) => hide(new Set(hidden.has(kind) ? [...hidden].filter(each => each !== kind) : [...hidden, kind]));
  return (
    <>
      <div class="bar">
        <StepInput label="steps" value={from} set={value => want({ from: value, to: Math.max(value, to) })} />
        <StepInput label="to" value={to} set={value => want({ from: Math.min(from, value), to: value })} />
        <div class="buttons">
          <button type="button" aria-label="Earlier" onClick={() => move(-1)} disabled={from <= timeline.kept_from_step}>‹</button>
          <button type="button" aria-label="Later" onClick={() => move(1)} disabled={to > job.step}>›</button>
          <button type="button" aria-pressed={wanted === null} onClick={() => want(null)}>newest</button>
        </div>
        {LANES.map(kind => <label key={kind} class="inline"><input type="checkbox" checked={!hidden.has(kind)} onChange={() => toggle(kind)} /> {kind}</label>)}
        <small>{duration(timeline.end_s - timeline.start_s)}{timeline.dropped_spans > 0 && ` · ${figure(timeline.dropped_spans)} spans were not kept`}</small>
      </div>
      <div class="key">{KINDS.map(kind => <span key={kind}><i style={{ background: `var(--${colorOf(kind)})` }} />{SHOWN[kind] ?? kind}</span>)}</div>
      {timeline.lanes.length
        ? <Lanes {...{ timeline, hidden, range, setRange, chosen, choose }} />
        : <Empty>No spans of these steps are kept. The last 50 steps are, for a day.</Empty>}
      <p class="soft">Drag to zoom in, Escape to see all, arrows and + − on the keyboard, Ctrl and the wheel. Click a span for its trace.</p>
      <div class="cards">
        {chosen && <Trace job={job} timeline={timeline} span={chosen} choose={choose} />}
        <Diagnosis job={job} />
        <Idle timeline={timeline} />
      </div>
    </>
  );
}

function StepInput({ label, value, set }: { label: string; value: number; set: (value: number) => void }) {
  return (
    <label class="inline">{label}
      <input type="number" min={0} style={{ width: "80px" }} value={value} onChange={e => { if (e.currentTarget.value !== "") set(Math.max(0, Math.round(Number(e.currentTarget.value)))); }} />
    </label>
  );
}

/* Idle time of every lane by its cause; the longest first. */
function Idle({ timeline }: { timeline: TimelineView }) {
  const rows = useMemo(() => timeline.lanes
    .map(lane => ({ lane, causes: Object.entries(lane.idle_s).sort((a, b) => b[1] - a[1]) as [IdleCause, number][] }))
    .filter(row => row.causes.length)
    .sort((a, b) => b.causes[0][1] - a.causes[0][1]), [timeline]);
  if (!rows.length) return null;
  const length = timeline.end_s - timeline.start_s || 1;
  return (
    <section class="card" aria-label="Idle time"><h2>Idle time by cause</h2>
      <table><tbody>{rows.slice(0, 60).map(({ lane, causes }) => (
        <tr key={`${lane.kind} ${lane.member}`}><th scope="row">{lane.member}</th>
          <td class="key">{causes.map(([cause, seconds]) => (
            <span key={cause}><i style={{ background: `var(--${IDLE_COLORS[cause]})` }} />{cause.replaceAll("_", " ")} {duration(seconds)} ({figure(Math.round((100 * seconds) / length))} %)</span>
          ))}</td></tr>
      ))}</tbody></table>
    </section>
  );
}

function Trace({ job, timeline, span, choose }: { job: JobView; timeline: TimelineView; span: SpanView; choose: (span: SpanView) => void }) {
  const parts = traceOf(timeline, span), start = parts[0]?.span.start_s ?? 0;
  const end = Math.max(...parts.map(each => each.span.end_s)), length = end - start || 1;
  return (
    <section class="card wide" aria-label="Trace">
      <h2>{span.group ? `Group ${span.group}` : `Step ${span.step ?? "?"}`}</h2>
      <p class="soft">{span.kind.replaceAll("_", " ")}{span.detail && `, ${span.detail}`}: {duration(span.end_s - span.start_s)}
        {Object.entries(span.attributes).map(([name, value]) => ` · ${name.replaceAll("_", " ")} ${figure(value)}`)} · trace <code>{span.trace_id}</code>
        {span.step !== null && <> · <a href={link("job", job.id, "samples", String(span.step))}>samples of step {span.step}</a></>}</p>
      <div class="trace">{parts.slice(0, 200).map(({ span: each, lane }) => (
        <button type="button" class="plain" key={each.span_id} onClick={() => choose(each)} aria-pressed={each.span_id === span.span_id}>
          <span>{each.kind.replaceAll("_", " ")} <small>{lane.member}{each.detail && ` · ${each.detail}`}</small></span>
          <span class="track"><i style={{ marginLeft: `${(100 * (each.start_s - start)) / length}%`, width: `${Math.max(0.3, (100 * (each.end_s - each.start_s)) / length)}%`, background: `var(--${colorOf(each.kind)})` }} /></span>
          <small>{duration(each.end_s - each.start_s)}</small>
        </button>
      ))}</div>
    </section>
  );
}

/* All metrics of a job, in the groups of docs/metrics.md. */
import { Fragment } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

import { get, isReport } from "../api";
import { groupsOf, lineOf, mainOf, useCurves, useInView, type Group, type Points, type Zoom } from "../curves";
import { Chart, type Axis, type Mark } from "../parts/chart";
import { Choice, Empty } from "../parts/small";
import { saveMetrics } from "../export";
import { marksOf } from "../marks";
import type { Event, JobView, MetricView, StepMetrics } from "../rest";
import { printAll, problem, useKept, useSettled } from "../state";
import { Distributions } from "./distributions";

const AXES: readonly Axis[] = ["step", "time", "tokens"];
const MAIN = "Main";

export interface Look { axis: Axis; smoothing: number; log: boolean }
export const PLAIN_LOOK: Look = { axis: "step", smoothing: 0, log: false };

export function LookBar({ look, set }: { look: Look; set: (look: Look) => void }) {
  return (
    <>
      <Choice label="Horizontal axis" of={AXES} chosen={look.axis} choose={axis => set({ ...look, axis })} />
      <label class="inline">smoothing
        <input type="range" min={0} max={0.98} step={0.02} value={look.smoothing} onInput={e => set({ ...look, smoothing: Number(e.currentTarget.value) })} />
      </label>
      <label class="inline"><input type="checkbox" checked={look.log} onChange={e => set({ ...look, log: e.currentTarget.checked })} /> log scale</label>
    </>
  );
}

/* Before all metrics are known, those of the last step are drawn. */
const ofRow = (row: StepMetrics | null): MetricView[] =>
  Object.keys(row?.values ?? {}).map(key => ({ key, section: "", unit: "", meaning: "" }));

export function Metrics({ job, last, events }: { job: JobView; last: StepMetrics | null; events: Event[] }) {
  const [metrics, setMetrics] = useState<MetricView[] | null>(null);
  const [look, setLook] = useKept<Look>("metrics.look", PLAIN_LOOK);
  const [typed, search] = useState("");
  const text = useSettled(typed);
  const [zoom, setZoom] = useState<Zoom | null>(null);
  const { points, want } = useCurves(job.id, job.step, zoom);
  const young = job.step < 3 ? job.step : 3; // new metrics appear with the first steps
  useEffect(() => { get<MetricView[]>(`/v1/jobs/${job.id}/metrics/keys`).then(setMetrics, problem); }, [job.id, young, job.state]);
  const sections = useMemo(() => {
    const groups = groupsOf(metrics ?? ofRow(last));
    const found = new Map<string, Group[]>();
    if (!text) found.set(MAIN, mainOf(groups));
    for (const group of metrics ? groups : []) {
      if (!text || group.title.toLowerCase().includes(text.toLowerCase())) found.set(group.section, [...(found.get(group.section) ?? []), group]);
    }
    return [...found].filter(([, own]) => own.length);
  }, [metrics, text, metrics ? null : last]);
  const marks = useMemo(() => (points ? marksOf(events, points, look.axis) : []), [events, points, look.axis]);
  if (metrics && !metrics.length) return <Empty>No step is trained yet.</Empty>;
  const zoomed = (first: number, last: number) => points && last > first && setZoom({ first: points.steps[first], last: points.steps[last] });
  return (
    <>
      <div class="bar">
        <input type="search" aria-label="Search metrics" placeholder="Search metrics" value={typed} onInput={e => search(e.currentTarget.value)} />
        <LookBar look={look} set={setLook} />
        <span class="buttons">
          {!isReport() && <button type="button" title="All metrics of all steps as a CSV file" onClick={() => saveMetrics(job).catch(problem)}>CSV</button>}
          <button type="button" title="Draws every open chart, then prints" onClick={printAll}>print</button>
        </span>
        {zoom && <button type="button" onClick={() => setZoom(null)}>steps {zoom.first} to {zoom.last} ×</button>}
      </div>
      {metrics && !sections.length && <Empty>No metric matches.</Empty>}
      {sections.map(([name, groups]) => (
        <Fragment key={name}>
          <details open={name === MAIN || Boolean(text)}>
            <summary><h2>{name}</h2> <small>{groups.length}</small></summary>
            <Charts groups={groups} {...{ points, want, look, zoomed, marks }} reset={() => setZoom(null)} />
          </details>
          {name === MAIN && <Distributions job={job.id} step={job.step} zoom={zoom} />}
        </Fragment>
      ))}
    </>
  );
}

interface ChartsProps {
  groups: Group[]; points: Points | null; look: Look; marks: Mark[];
  want: (group: Group, wanted: boolean) => void; zoomed: (first: number, last: number) => void; reset: () => void;
}
function Charts({ groups, ...rest }: ChartsProps) {
  return <div class="charts">{groups.map(group => <OneChart key={group.mean} group={group} {...rest} />)}</div>;
}

function OneChart({ group, points, look, marks, want, zoomed, reset }: Omit<ChartsProps, "groups"> & { group: Group }) {
  const [element, seen] = useInView<HTMLDivElement>();
  useEffect(() => {
    if (!seen) return undefined;
    want(group, true);
    return () => want(group, false);
  }, [seen, group.mean]);
  const has = points?.metrics.has(group.mean);
  const lines = useMemo(() => (points && has ? [lineOf(points, group, "water", group.title)] : []), [points, has, group]);
  return (
    <div ref={element} class="card">
      {seen && points && has
        ? <Chart {...group} {...look} group="job" marks={marks} lines={lines} xs={xsOf(points, look.axis)} onZoom={zoomed} onReset={reset} />
        : <figure class="chart waiting"><figcaption><b>{group.title}</b></figcaption></figure>}
    </div>
  );
}

export const xsOf = (points: Points, axis: Axis): number[] =>
  axis === "step" ? points.steps : axis === "time" ? points.time_s : points.tokens;

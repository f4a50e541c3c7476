/* Several jobs side by side: what their specs have different, and their curves over each other. */
import { useEffect, useMemo, useState } from "preact/hooks";

import { get } from "../api";
import { groupsOf, lineOf, mainOf, useCurves, useInView, type Group, type Points } from "../curves";
import { figure } from "../format";
import { Chart, type Line } from "../parts/chart";
import { State } from "../parts/small";
import type { JobView, MetricView } from "../rest";
import { link, problem, useKept, usePolled, useSettled } from "../state";
import { LookBar, PLAIN_LOOK, xsOf, type Look } from "./metrics";
import { leaves, shown } from "./spec";

/* Most charts at a time. */
const MOST = 60;
export const COLORS = ["water", "warm", "good", "bad", "violet", "c6", "c7", "c8"];

export function Compare({ ids }: { ids: string[] }) {
  const [jobs] = usePolled(signal => Promise.all(ids.map(id => get<JobView>(`/v1/jobs/${id}`, signal))), 5000, [ids.join()]);
  const [metrics, setMetrics] = useState<MetricView[][]>([]);
  const [look, setLook] = useKept<Look>("metrics.look", PLAIN_LOOK);
  const [typed, search] = useState("");
  const text = useSettled(typed);
  const [only, show] = useState(true);
  useEffect(() => { Promise.all(ids.map(id => get<MetricView[]>(`/v1/jobs/${id}/metrics/keys`))).then(setMetrics, problem); }, [ids.join()]);
  const groups = useMemo(() => {
    const all = new Map(metrics.flat().map(metric => [metric.key, metric]));
    const found = groupsOf([...all.values()]);
    return (text ? found.filter(group => group.title.toLowerCase().includes(text.toLowerCase())) : mainOf(found)).slice(0, MOST);
  }, [metrics, text]);
  const [curves, setCurves] = useState<Record<string, Points>>({});
  const all = useMemo(() => (jobs ?? []).flatMap((job, at) => (curves[job.id] ? [{ job, points: curves[job.id], color: COLORS[at] }] : [])), [jobs, curves]);
  if (!jobs) return <p class="empty">…</p>;
  return (
    <>
      <div class="bar"><h1>Compare</h1><span class="key">
        {jobs.map((job, at) => <span key={job.id}><i style={{ background: `var(--${COLORS[at]})` }} /><a href={link("job", job.id)}>{job.name}</a> <State of={job.status} /> <small>step {figure(job.step)}</small></span>)}
      </span></div>
      <div class="bar">
        <input type="search" aria-label="Search metrics" placeholder="Search metrics" value={typed} onInput={e => search(e.currentTarget.value)} />
        <LookBar look={look} set={setLook} />
      </div>
      {jobs.map(job => <JobCurves key={job.id} job={job} groups={groups} set={points => setCurves(before => ({ ...before, [job.id]: points }))} />)}
      <div class="charts several">{groups.map(group => <Overlaid key={group.mean} group={group} all={all} look={look} />)}</div>
      <div class="bar"><h2>Specs</h2><label class="inline"><input type="checkbox" checked={only} onChange={e => show(e.currentTarget.checked)} /> only what differs</label></div>
      <Difference jobs={jobs} only={only} />
    </>
  );
}

function Difference({ jobs, only }: { jobs: JobView[]; only: boolean }) {
  const trees = jobs.map(job => new Map(leaves(job.spec).map(([path, value]) => [path, shown(value)])));
  const paths = [...new Set(trees.flatMap(tree => [...tree.keys()]))];
  const rows = paths.filter(path => !only || new Set(trees.map(tree => tree.get(path))).size > 1);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Differences of the specs"><table class="spec"><thead><tr><th>field</th>{jobs.map(job => <th key={job.id}>{job.name}</th>)}</tr></thead><tbody>
      {rows.map(path => <tr key={path}><th scope="row"><code>{path}</code></th>{trees.map((tree, at) => <td key={jobs[at].id}><code>{tree.get(path) ?? "–"}</code></td>)}</tr>)}
    </tbody></table></div>
  );
}

interface Own { job: JobView; points: Points; color: string }

function Overlaid({ group, all, look }: { group: Group; all: Own[]; look: Look }) {
  const [element, seen] = useInView<HTMLDivElement>();
  const joined = useMemo(() => together(all.filter(({ points }) => points.metrics.has(group.mean)).map(({ job, points, color }) => {
    const xs = xsOf(points, look.axis), start = look.axis === "time" ? points.time_s[0] : 0;
    return { xs: xs.map(x => x - start), line: { ...lineOf(points, group, color, job.name), least: undefined, greatest: undefined } };
  })), [all, group, look.axis]);
  return (
    <div ref={element} class="card">
      {seen && joined.xs.length > 0
        ? <Chart {...group} {...look} axis={look.axis === "time" ? "seconds" : look.axis} group="compare" lines={joined.lines} xs={joined.xs} />
        : <figure class="chart waiting"><figcaption><b>{group.title}</b></figcaption></figure>}
    </div>
  );
}

/* Fetches the curves of one job for all charts. */
function JobCurves({ job, groups, set }: { job: JobView; groups: Group[]; set: (points: Points) => void }) {
  const { points, want } = useCurves(job.id, job.step, null);
  useEffect(() => {
    const means = groups.map(group => ({ ...group, least: undefined, greatest: undefined }));
    means.forEach(group => want(group, true));
    return () => means.forEach(group => want(group, false));
  }, [groups]);
  useEffect(() => { if (points) set(points); }, [points]);
  return null;
}

/* Curves over different points as curves over the points of all. */
function together(found: { xs: number[]; line: Line }[]): { xs: number[]; lines: Line[] } {
  const xs = [...new Set(found.flatMap(each => each.xs))].sort((a, b) => a - b);
  const lines = found.map(({ xs: own, line }) => {
    const values = new Map(own.map((x, at) => [x, line.mean[at]]));
    return { ...line, mean: xs.map(x => values.get(x) ?? null) };
  });
  return { xs, lines };
}

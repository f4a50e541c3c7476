/* All jobs: their states, progress, and why one waits or failed. */
import { useMemo, useRef, useState } from "preact/hooks";

import { get, query } from "../api";
import { ago, duration, figure, heldOut, inPartition, oneLine } from "../format";
import { VirtualList } from "../parts/list";
import { Choice, Empty, Progress, State } from "../parts/small";
import type { JobPage, JobSummary } from "../rest";
import { go, link, problem, useKept, usePolled } from "../state";
import { Actions } from "./actions";

const FILTERS = ["all", "active", "queued", "succeeded", "failed", "cancelled"] as const;
type Filter = (typeof FILTERS)[number];
const ACTIVE = ["starting", "running", "paused"];
const PAGE = 200;
const ROW = 62;

/* Seconds until the job has trained all of its steps, at the pace so far. */
export function timeLeft(job: JobSummary): number | null {
  if (!ACTIVE.includes(job.state) || !job.steps || !job.step || !job.ran_s) return null;
  return ((job.steps - job.step) * job.ran_s) / job.step;
}

const lastHeldOut = (job: JobSummary): string => (job.evaluation_step === null
  ? heldOut(job.evaluation_before, job.evaluation_before_coverage) : heldOut(job.evaluation_last, job.evaluation_last_coverage));

/* Why the job waits, failed or was warned, in one line. */
export function reason(job: JobSummary): { text: string; kind: string } | null {
  if (job.failure) return { text: oneLine(job.failure), kind: "failed" };
  if (job.waiting) return { text: `Waits: ${job.waiting.message}`, kind: "waits" };
  const warning = job.warnings.filter(each => !each.over).pop();
  return warning ? { text: `Warning after step ${warning.step}: ${warning.message}`, kind: "waits" } : null;
}

function useJobs(): { jobs: JobSummary[]; total: number; more: () => void; again: () => void; ready: boolean } {
  const [page, again] = usePolled(signal => get<JobPage>(`/v1/jobs?limit=${PAGE}`, signal), 3000, []);
  const [older, setOlder] = useState<{ jobs: JobSummary[]; next: string | null }>({ jobs: [], next: "" });
  const loading = useRef(false);
  const jobs = useMemo(() => {
    const newest = page?.jobs ?? [], known = new Set(newest.map(job => job.id));
    return [...newest, ...older.jobs.filter(job => !known.has(job.id))];
  }, [page, older]);
  const more = () => {
    const cursor = older.next === "" ? page?.next : older.next;
    if (!cursor || loading.current) return;
    loading.current = true;
    get<JobPage>(`/v1/jobs${query({ limit: 500, cursor })}`)
      .then(found => setOlder({ jobs: [...older.jobs, ...found.jobs], next: found.next }), problem)
      .finally(() => { loading.current = false; });
  };
  return { jobs, total: page?.total ?? 0, more, again, ready: page !== null };
}

export function Jobs() {
  const { jobs, total, more, again, ready } = useJobs();
  const [text, search] = useState("");
  const [filter, choose] = useKept<Filter>("jobs.filter", "all");
  const [chosen, setChosen] = useState<string[]>([]);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = jobs.filter(job => {
    const fits = filter === "all" || job.state === filter || (filter === "active" && ACTIVE.includes(job.state));
    const inText = `${job.name} ${job.id} ${job.status} ${job.failure ?? ""}`.toLowerCase();
    return fits && words.every(word => inText.includes(word));
  });
  const toggle = (id: string) => setChosen(chosen.includes(id) ? chosen.filter(each => each !== id) : [...chosen, id].slice(-8));
  return (
    <section class="fill" aria-label="Jobs">
      <div class="bar">
        <h1>Jobs <small>{figure(total)}</small></h1>
        <input type="search" aria-label="Search jobs" placeholder="Search" value={text} onInput={e => { search(e.currentTarget.value); more(); }} />
        <Choice label="State" of={FILTERS} chosen={filter} choose={choose} />
        <span class="space" />
        <button type="button" disabled={chosen.length < 2} onClick={() => go("compare", chosen.join(","))}>
          compare{chosen.length > 1 ? ` ${chosen.length}` : "…"}
        </button>
        <a class="button main" href={link("submit")}>new job</a>
      </div>
      {ready && !jobs.length && <Empty>There are no jobs. Submit one here, or with <code>millrace submit job.yaml</code>.</Empty>}
      {ready && jobs.length > 0 && !shown.length && <Empty>No job matches.</Empty>}
      <VirtualList count={shown.length} rowHeight={ROW} label="Jobs" onEnd={more} class="jobs" row={index => {
        const job = shown[index];
        return <Row key={job.id} job={job} chosen={chosen.includes(job.id)} toggle={() => toggle(job.id)} changed={again} />;
      }} />
    </section>
  );
}

function Row({ job, chosen, toggle, changed }: { job: JobSummary; chosen: boolean; toggle: () => void; changed: () => void }) {
  const why = reason(job), left = timeLeft(job);
  return (
    <div class="row job" role="listitem" style={{ height: `${ROW}px` }}>
      <input type="checkbox" checked={chosen} onChange={toggle} aria-label={`Compare ${job.name}`} title="Compare" />
      <div class="what">
        <a href={link("job", job.id)}><b>{job.name}</b></a> <State of={job.status} />
        <small class={why?.kind} title={why?.text}>{why?.text ?? `${job.id}${inPartition(job)} · submitted ${ago(job.created_s)}`}</small>
      </div>
      <div class="how"><Progress done={job.step} of={job.steps} /><small>step {figure(job.step)}{job.steps || job.steps_known ? ` of ${figure(job.steps)}` : ""}</small></div>
      <div class="number"><b>{left !== null ? duration(left) : duration(job.ran_s)}</b><small>{left !== null ? "left" : "ran"}</small></div>
      <div class="number"><b>{figure(job.reward)}</b><small>reward</small></div>
      <div class="number held"><b>{lastHeldOut(job)}</b><small>held-out</small></div>
      <Actions job={job} changed={changed} />
    </div>
  );
}

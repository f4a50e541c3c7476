/* One job: its head, and tabs with what is known of it. */
import { useEffect, useRef, useState } from "preact/hooks";

import { follow, get } from "../api";
import { duration, figure, heldOut, inPartition, moment } from "../format";
import { Figure, Progress, State } from "../parts/small";
import type { Event, JobView, StepMetrics } from "../rest";
import { link, problem, usePolled } from "../state";
import { Actions } from "./actions";
import { Events } from "./events";
import { timeLeft } from "./jobs";
import { Metrics } from "./metrics";
import { Records } from "./records";
import { Samples } from "./samples";
import { Spec } from "./spec";
import { Timeline } from "./timeline";

const KEPT = 5000;
const TABS = ["metrics", "timeline", "samples", "records", "events", "spec"];

const numberIn = (text?: string) => (text !== undefined && /^\d+$/.test(text) ? Number(text) : undefined);
interface Read { job: JobView; last: StepMetrics | null }

function useEvents(id: string, changed: () => void): Event[] {
  const [events, set] = useState<Event[]>([]);
  const kept = useRef(changed);
  kept.current = changed;
  useEffect(() => {
    const aborted = new AbortController();
    let due = 0;
    set([]);
    void follow(id, aborted.signal, found => {
      set(before => [...before, ...found].slice(-KEPT));
      due ||= window.setTimeout(() => { due = 0; kept.current(); }, 300);
    }, problem);
    return () => { aborted.abort(); clearTimeout(due); };
  }, [id]);
  return events;
}

export function Job({ id, tab, more }: { id: string; tab: string; more: string[] }) {
  const [read, again] = usePolled<Read>(async signal => {
    const job = await get<JobView>(`/v1/jobs/${id}`, signal);
    const rows = await get<StepMetrics[]>(`/v1/jobs/${id}/metrics?after=${Math.max(-1, job.step - 2)}`, signal);
    return { job, last: rows[rows.length - 1] ?? null };
  }, 4000, [id]);
  const events = useEvents(id, again);
  useEffect(() => { document.title = read ? `${read.job.name} · Millrace` : "Millrace"; }, [read?.job.name]);
  if (!read) return <p class="empty">…</p>;
  const { job, last } = read;
  return (
    <>
      <Head job={job} last={last} changed={again} />
      <nav class="tabs" aria-label="Parts of the job">
        {TABS.map(each => <a key={each} href={link("job", id, each)} aria-current={each === tab ? "page" : undefined}>{each}</a>)}
      </nav>
      {tab === "metrics" && <Metrics job={job} last={last} events={events} />}
      {tab === "timeline" && <Timeline key={more[0]} job={job} step={numberIn(more[0])} />}
      {tab === "samples" && <Samples key={more[0]} job={job} step={more[0]} />}
      {tab === "records" && <Records job={job} events={events} />}
      {tab === "events" && <Events events={events} />}
      {tab === "spec" && <Spec id={id} version={job.state} />}
    </>
  );
}

/* Without `changed` nothing can be done to the job. */
export function Head({ job, last, changed }: { job: JobView; last: StepMetrics | null; changed?: () => void }) {
  const values = last?.values ?? {}, left = timeLeft(job);
  const seconds = values["timing_s/step"];
  return (
    <section class="head" aria-label="Job">
      <div class="bar">
        <h1>{job.name}</h1><State of={job.status} /><small class="id">{job.id}{inPartition(job)}</small><span class="space" />{changed && <Actions job={job} changed={changed} />}
      </div>
      {job.waiting && <p class="note waits">Waits: {job.waiting.message}</p>}
      {job.failure && <p class="note failed">{job.failure}</p>}
      {job.warnings.map(warning => (
        <p key={`${warning.cause} ${warning.step}`} class={`note ${warning.over ? "over" : "waits"}`}>
          {warning.over ? "It is over: after" : "Warning after"} step {warning.step}: {warning.message}
        </p>
      ))}
      <div class="figures">
        <div class="figure steps"><b>{figure(job.step)}<i> / {job.steps || job.steps_known ? figure(job.steps) : "?"}</i></b><Progress done={job.step} of={job.steps} /></div>
        <Figure name={left !== null ? "left" : "ran"} value={duration(left ?? job.ran_s)} title={`Submitted ${moment(job.created_s)}; ran ${duration(job.ran_s)}, queued ${duration(job.queued_s)}`} />
        <Figure name="reward" value={figure(job.reward)} />
        <Figure name="held-out before" value={heldOut(job.evaluation_before, job.evaluation_before_coverage)} />
        {job.evaluation_step !== null && <Figure name={`held-out after step ${job.evaluation_step}`} value={heldOut(job.evaluation_last, job.evaluation_last_coverage)} />}
        <Figure name="a step takes" value={typeof seconds === "number" ? duration(seconds) : figure(seconds)} />
        <Figure name="tokens/s and device" value={figure(values["perf/throughput"])} />
        <Figure name="response tokens" value={figure(values["response_length/mean"])} />
        <Figure name="staleness" value={figure(values["training/staleness/mean"])} />
      </div>
    </section>
  );
}

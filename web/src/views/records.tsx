/* What a job has left: its ledger, checkpoints, evaluations and publications. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api";
import { bytes, duration, figure, heldOut, moment } from "../format";
import { Empty } from "../parts/small";
import type { CheckpointSaved, EvaluationDone, Event, JobView, LedgerView, PublicationDone } from "../rest";
import { problem, usePolled } from "../state";

const PLACES = ["trained", "generated", "leased", "queued", "dropped"] as const;

export function Ledger({ job }: { job: JobView }) {
  const [ledger] = usePolled(signal => get<LedgerView>(`/v1/jobs/${job.id}/ledger`, signal), 3000, [job.id]);
  if (!ledger) return null;
  const reasons = Object.entries(ledger.reasons).sort((a, b) => b[1] - a[1]);
  return (
    <section class="card" aria-label="Ledger">
      <h2>Ledger</h2>
      <div class="ledger" role="img" aria-label={PLACES.map(place => `${ledger[place]} ${place}`).join(", ")}>
        {PLACES.map(place => <span key={place} class={`p-${place}`} style={{ flex: ledger[place] }} title={`${figure(ledger[place])} ${place}`} />)}
      </div>
      <p class="key">{PLACES.map(place => <span key={place}><i class={`p-${place}`} />{figure(ledger[place])} {place}</span>)} of {figure(ledger.issued)} issued</p>
      {reasons.length > 0 && (
        <table><caption>Dropped prompts by reason</caption><tbody>
          {reasons.map(([reason, count]) => <tr key={reason}><th scope="row">{reason.replaceAll("_", " ")}</th><td class="n">{figure(count)}</td></tr>)}
        </tbody></table>
      )}
    </section>
  );
}

const dataOf = <T,>(events: Event[], kind: string) => events.filter(event => event.kind === kind).map(event => ({ event, data: event.data as T })).reverse();

export function Records({ job, events }: { job: JobView; events: Event[] }) {
  const saved = dataOf<CheckpointSaved>(events, "checkpoint.saved"), scored = dataOf<EvaluationDone>(events, "evaluation.done");
  return (
    <div class="cards">
      <Ledger job={job} />
      <section class="card" aria-label="Evaluations">
        <h2>Evaluations</h2>
        {!scored.length && <Empty>None among the newest events.</Empty>}
        {scored.length > 0 && <table><thead><tr><th>after step</th><th>version</th><th>held-out</th><th>time</th></tr></thead><tbody>
          {scored.slice(0, 100).map(({ event, data }) => (
            <tr key={event.id}><td>{figure(data.step)}</td><td>{figure(data.version)}</td><td>{scores(data)}</td><td>{moment(event.time_s)}</td></tr>
          ))}
        </tbody></table>}
      </section>
      <section class="card" aria-label="Checkpoints">
        <h2>Checkpoints</h2>
        {job.checkpoint && <p>The last one: <code>{job.checkpoint}</code></p>}
        {!saved.length && <Empty>None among the newest events.</Empty>}
        {saved.length > 0 && <table><thead><tr><th>after step</th><th>size</th><th>took</th><th>folder</th></tr></thead><tbody>
          {saved.slice(0, 100).map(({ event, data }) => (
            <tr key={event.id}><td>{figure(data.step)}</td><td>{data.bytes === null ? "–" : bytes(data.bytes)}</td>
              <td>{typeof data.seconds === "number" ? duration(data.seconds) : "–"}</td><td><code>{data.path}</code></td></tr>
          ))}
        </tbody></table>}
      </section>
      <Publications job={job} />
    </div>
  );
}

/* The held-out score, and of several data sources each one's part of it. */
function scores(data: EvaluationDone): string {
  const { "val-aux/scored_prompts": scored, "val-aux/asked_prompts": asked } = data.metrics;
  const coverage = typeof scored === "number" && typeof asked === "number" ? { scored, asked } : null;
  const means = Object.entries(data.metrics).filter(([name]) => /^val-core\/.*\/mean@/.test(name));
  const parts = means.map(([name, value]) => `${name.slice("val-core/".length).replace(/\/[^/]+\/mean@.*$/, "")} ${figure(value)}`);
  return [heldOut(data.metrics["evaluation/held_out"], coverage), ...(means.length > 1 ? parts : [])].join(" · ");
}

function Publications({ job }: { job: JobView }) {
  const [found, set] = useState<PublicationDone[] | null>(null);
  const [open, show] = useState(-1);
  useEffect(() => { get<PublicationDone[]>(`/v1/jobs/${job.id}/publications?limit=50`).then(set, problem); }, [job.id, job.version]);
  return (
    <section class="card wide" aria-label="Publications">
      <h2>Publications</h2>
      {found && !found.length && <Empty>None yet.</Empty>}
      {found && found.length > 0 && <div class="scroll" tabIndex={0} role="region" aria-label="Table of publications"><table>
        <PublicationHead />
        <tbody>{found.map((each, at) => <Publication key={`${each.version} ${each.attempt}`} of={each} open={open === at} toggle={() => show(open === at ? -1 : at)} />)}</tbody>
      </table></div>}
    </section>
  );
}

const seconds = (value: number | string): string => (typeof value === "number" ? duration(value) : value);
const most = (values: (number | string)[]): number => Math.max(0, ...values.filter((value): value is number => typeof value === "number"));
const speed = (moved: number, time: number | string): string => (typeof time === "number" && time > 0 && moved ? figure(moved / time / 1e9) : "–");

const COLUMNS = ["version", "what", "from", "took", "phases", "replicas", "size", "GB/s", "longest pause", "failures"];
export const PublicationHead = () => <thead><tr>{COLUMNS.map(name => <th key={name}>{name}</th>)}</tr></thead>;

export function Publication({ of, open, toggle }: { of: PublicationDone; open: boolean; toggle: () => void }) {
  const [sender, ...receivers] = of.members;
  const phases = Object.entries(of.phases);
  const total = phases.reduce((sum, [, value]) => sum + (typeof value === "number" ? value : 0), 0) || 1;
  return (
    <>
      <tr>
        <td><button type="button" class="plain" aria-expanded={open} onClick={toggle} disabled={!sender}>{open ? "▾" : "▸"} {of.version}</button></td>
        <td>{of.content}</td><td>{of.source}</td><td>{seconds(of.seconds)}</td>
        <td><span class="phases">{phases.map(([name, value]) => (
          <span key={name} class={`ph-${name}`} style={{ flex: typeof value === "number" ? value / total : 0 }} title={`${name} ${seconds(value)}`} />
        ))}</span></td>
        <td>{figure(of.receivers)}</td><td>{sender ? bytes(sender.bytes) : "–"}</td><td>{sender ? speed(sender.bytes, sender.wire_s) : "–"}</td>
        <td>{duration(most(receivers.map(each => each.pause_s)))}</td><td>{figure(of.failures)}</td>
      </tr>
      {open && of.members.map((each, at) => (
        <tr key={each.member} class="inner">
          <td colSpan={3}><code>{each.member}</code> {at ? "receives" : "sends"}</td>
          <td colSpan={4}>prepare {seconds(each.prepare_s)} · {at ? "" : `gather ${seconds(each.gather_s)} · `}wire {seconds(each.wire_s)} · verify {seconds(each.verify_s)} · apply {seconds(each.apply_s)}</td>
          <td>{speed(each.bytes, each.wire_s)}</td><td>{at ? seconds(each.pause_s) : "–"}</td><td />
        </tr>
      ))}
    </>
  );
}

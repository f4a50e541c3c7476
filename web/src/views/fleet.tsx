/* Trainers and replicas: what they do, and draining them. */
import { useEffect, useState } from "preact/hooks";

import { get, send } from "../api";
import { figure, inPartition, plural } from "../format";
import { VirtualList } from "../parts/list";
import { Dialog, Empty, Figure, State } from "../parts/small";
import type { FleetView, JobPage, JobSummary, MemberView, PublicationDone } from "../rest";
import { link, problem, usePolled } from "../state";
import { drainable, MemberDetails, present, usage } from "./member";
import { Publication, PublicationHead } from "./records";

const ROW = 56;

export function Fleet() {
  const [fleet, again] = usePolled(signal => get<FleetView>("/v1/fleet", signal), 2000, []);
  const [text, search] = useState("");
  const [draining, ask] = useState<MemberView | null>(null);
  const [opened, open] = useState("");
  const all = fleet ? [...fleet.trainers, ...fleet.replicas] : [];
  const shown = all.filter(member =>
    `${member.id} ${member.kind} ${member.engine} ${member.host} ${member.device} ${member.state}`.toLowerCase().includes(text.toLowerCase()));
  const here = all.filter(present), replicas = here.filter(member => member.kind === "rollout");
  const sum = (read: (member: MemberView) => number) => replicas.reduce((total, member) => total + read(member), 0);
  const shownMember = all.find(member => member.id === opened);
  const drain = (member: MemberView) => {
    send("POST", `/v1/fleet/${member.id}/drain`).then(again, problem);
    ask(null);
  };
  return (
    <section class="fill" aria-label="Fleet">
      <div class="bar">
        <h1>Fleet <small>{fleet && `${plural(here.length - replicas.length, "trainer")}, ${plural(replicas.length, "replica")}, epoch ${fleet.epoch}`}</small></h1>
        <input type="search" aria-label="Search members" placeholder="Search" value={text} onInput={e => search(e.currentTarget.value)} />
      </div>
      {replicas.length > 0 && (
        <div class="figures">
          <Figure name="tokens/s" value={figure(Math.round(sum(member => member.tokens_per_s)))} />
          <Figure name="samples being generated" value={figure(sum(member => member.running))} />
          <Figure name="samples waiting in engines" value={figure(sum(member => member.waiting))} />
          <Figure name="free places" value={figure(sum(member => member.free))} />
          <Figure name="leases" value={figure(sum(member => member.leases))} />
        </div>
      )}
      <LastPublication version={Math.max(-1, ...here.map(member => member.version))} />
      {fleet && !all.length && <Empty>No trainers or replicas are connected.</Empty>}
      <VirtualList count={shown.length} rowHeight={ROW} label="Members" class="members" row={index => {
        const member = shown[index];
        return <Member key={member.id} of={member} open={() => open(member.id)} drain={() => ask(member)} />;
      }} />
      {opened && <MemberDetails id={opened} of={shownMember} onClose={() => open("")} drain={() => { open(""); ask(shownMember ?? null); }} />}
      {draining && (
        <Dialog title={`Drain ${draining.id}?`} onClose={() => ask(null)}>
          <p>It gets no new work, finishes what it has and leaves the fleet.</p>
          <div class="buttons">
            <button type="button" onClick={() => ask(null)}>keep it</button>
            <button type="button" class="danger" onClick={() => drain(draining)}>drain it</button>
          </div>
        </Dialog>
      )}
    </section>
  );
}

/* The newest publication of the job that runs, with the phases of each member. */
function LastPublication({ version }: { version: number }) {
  const [found, set] = useState<{ job: JobSummary; publication: PublicationDone } | null>(null);
  const [open, show] = useState(false);
  useEffect(() => {
    let current = true;
    const look = async () => {
      const { jobs } = await get<JobPage>("/v1/jobs?state=running&limit=1");
      const [publication] = jobs.length ? await get<PublicationDone[]>(`/v1/jobs/${jobs[0].id}/publications?limit=1`) : [];
      if (current) set(publication ? { job: jobs[0], publication } : null);
    };
    look().catch(problem);
    return () => { current = false; };
  }, [version]);
  if (!found) return null;
  return (
    <div class="card scroll" tabIndex={0} role="region" aria-label="Newest publication">
      <table><caption>Newest publication of <a href={link("job", found.job.id, "records")}>{found.job.name}</a></caption>
        <PublicationHead /><tbody><Publication of={found.publication} open={open} toggle={() => show(!open)} /></tbody></table>
    </div>
  );
}

/* Without `open` and `drain` nothing can be done to the member. */
export function Member({ of, open, drain }: { of: MemberView; open?: () => void; drain?: () => void }) {
  const [used, what] = usage(of);
  const state = of.trouble ? "not configured" : of.state;
  const why = of.trouble || of.gone || Object.entries(of.missing_boundaries).map(([name, reason]) => `sandbox without ${name}: ${reason}`).join("; ");
  return (
    <div class="row member" role="listitem" style={{ height: `${ROW}px` }}>
      <div class="what">
        <b>{of.id}</b> <State of={of.trouble ? "failed" : state} />
        <small class={why ? "waits" : ""} title={why}>{why || `${of.engine} ${of.engine_release} · ${of.device} × ${of.world_size} · ${of.host || of.address}${inPartition(of)}`}</small>
      </div>
      <div class="number version"><b>{of.version < 0 ? "–" : figure(of.version)}</b><small>version</small></div>
      <div class="number"><b>{figure(Math.round(of.tokens_per_s))}</b><small>tokens/s</small></div>
      <div class="number"><b>{figure(of.leases)}</b><small>leases</small></div>
      <div class="number load"><b>{figure(of.running)}<i> + {figure(of.waiting)}</i></b><small>running + waiting</small></div>
      <div class="number used"><b>{used}</b><small>{what}</small></div>
      <div class="number silent"><b>{figure(of.silent_s, 2)} s</b><small>since heard</small></div>
      <div class="buttons">{open && <button type="button" onClick={open}>details…</button>}{drain && drainable(of) && <button type="button" class="drain" onClick={drain}>drain…</button>}</div>
    </div>
  );
}

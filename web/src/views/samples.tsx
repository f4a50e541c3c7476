/* The samples of a job: one row a group; of one group its answers, rewards and tokens. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get, isReport, query } from "../api";
import { saveGroups } from "../export";
import { figure, oneLine, signed } from "../format";
import { VirtualList } from "../parts/list";
import { Choice, Empty } from "../parts/small";
import type { GroupPage, GroupView, JobView, SampleView } from "../rest";
import { link, problem } from "../state";
import { Prompt } from "./prompt";
import { Tokens } from "./tokens";

const ROW = 58;
const PURPOSES = ["all", "train", "evaluation"] as const;
interface Filter { step: string; purpose: (typeof PURPOSES)[number]; text: string; member: string; data_source: string; least: string; greatest: string }
const ANY: Filter = { step: "", purpose: "all", text: "", member: "", data_source: "", least: "", greatest: "" };

/* Pages of groups that fit the filter. A filter that fits few groups needs several requests for one page. */
function useGroups(job: string, filter: Filter, step: number) {
  const [groups, setGroups] = useState<GroupView[]>([]);
  const [state, setState] = useState<{ next: number | null; total: number; busy: boolean }>({ next: null, total: 0, busy: true });
  const current = useRef(0), looked = useRef(0), atTop = useRef(true);
  const load = async (cursor: number | null, before: GroupView[]) => {
    const own = (current.current += 1);
    setState(found => ({ ...found, busy: true }));
    const fields = { ...filter, purpose: filter.purpose === "all" ? "" : filter.purpose, limit: 50 };
    let all = before, next: number | null = cursor;
    try {
      do {
        const page: GroupPage = await get(`/v1/jobs/${job}/groups${query({ ...fields, cursor: next })}`);
        if (own !== current.current) return;
        all = [...all, ...page.groups];
        next = page.next;
        setGroups(all);
        setState({ next, total: page.total, busy: next !== null && all.length < before.length + 25 });
      } while (next !== null && all.length < before.length + 25);
      looked.current = performance.now();
    } catch (error) {
      problem(error as Error);
      setState(found => ({ ...found, busy: false }));
    }
  };
  const about = JSON.stringify([job, filter]);
  useEffect(() => { const timer = setTimeout(() => void load(null, []), 250); return () => clearTimeout(timer); }, [about]);
  useEffect(() => { // new steps appear at the top as long as nobody has scrolled further
    if (atTop.current && groups.length <= 50 && performance.now() - looked.current > 2000) void load(null, []);
  }, [step]);
  const more = () => { if (state.next !== null && !state.busy) { atTop.current = false; void load(state.next, groups); } };
  return { groups, more, ...state };
}

const nameOf = (group: GroupView) => `${group.step} ${group.purpose} ${group.prompt_id}`;
const rewards = (group: GroupView) => group.samples.map(sample => sample.reward).filter((reward): reward is number => reward !== null);
/* The greatest reward of all groups that are loaded: what a full dot stands for. */
const greatestOf = (groups: GroupView[]) => Math.max(0, ...groups.flatMap(rewards));
const mean = (values: number[]) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

export function Samples({ job, step = "" }: { job: JobView; step?: string }) {
  const [filter, set] = useState({ ...ANY, step });
  const { groups, more, total, next, busy } = useGroups(job.id, filter, job.step);
  const [chosen, choose] = useState<GroupView | null>(null);
  const [beside, putBeside] = useState<GroupView | null>(null);
  const shown = chosen ?? groups[0] ?? null;
  const greatest = useMemo(() => greatestOf(groups), [groups]);
  const text = (name: keyof Filter, label: string, width: number) => (
    <label class="inline">{label}
      <input type="text" style={{ width: `${width}px` }} value={filter[name]} onInput={e => set({ ...filter, [name]: e.currentTarget.value.trim() })} />
    </label>
  );
  const move = (event: KeyboardEvent) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !shown) return;
    event.preventDefault();
    const at = groups.findIndex(group => nameOf(group) === nameOf(shown)) + by;
    if (groups[at]) choose(groups[at]);
  };
  return (
    <>
      {!isReport() && (
        <div class="bar">
          <input type="search" aria-label="Search prompts and answers" placeholder="Search text" value={filter.text} onInput={e => set({ ...filter, text: e.currentTarget.value })} />
          <Choice label="Purpose" of={PURPOSES} chosen={filter.purpose} choose={purpose => set({ ...filter, purpose })} />
          {text("step", "step", 64)}{text("least", "reward from", 52)}{text("greatest", "to", 52)}{text("data_source", "source", 100)}{text("member", "member", 130)}
          <button type="button" title="The groups that are listed, as a file of JSON lines" disabled={!groups.length} onClick={() => saveGroups(job, groups)}>JSONL</button>
          <small role="status">{busy ? "looking…" : `${figure(groups.length)}${next === null ? "" : "+"} groups`} of {figure(total)} samples</small>
        </div>
      )}
      {!groups.length && !busy && <Empty>{total ? "No group matches." : "There are no samples yet."}</Empty>}
      <div class={`split ${chosen ? "open" : ""}`}>
        {groups.length > 0 && (
          <div class="side" onKeyDown={move}>
            <VirtualList count={groups.length} rowHeight={ROW} label="Groups" role="listbox" onEnd={more} class="groups" row={index => {
              const group = groups[index], active = shown !== null && nameOf(group) === nameOf(shown);
              return <GroupRow key={nameOf(group)} group={group} greatest={greatest} active={active} choose={() => choose(group)} />;
            }} />
          </div>
        )}
        {shown && (
          <div class={beside ? "pair" : "detail"}>
            <Group key={nameOf(shown)} job={job} group={shown} close={chosen ? () => choose(null) : undefined}
              keep={beside && nameOf(beside) === nameOf(shown) ? undefined : () => putBeside(shown)} />
            {beside && <Group key={`beside ${nameOf(beside)}`} job={job} group={beside} close={() => putBeside(null)} />}
          </div>
        )}
      </div>
    </>
  );
}

interface GroupRowProps { group: GroupView; greatest: number; active: boolean; choose: () => void }
function GroupRow({ group, greatest, active, choose }: GroupRowProps) {
  const found = rewards(group), first = group.samples[0];
  return (
    <div class="row group" role="option" aria-selected={active} style={{ height: `${ROW}px` }} onClick={choose}>
      <div class="what">
        <b title={first.question}>{oneLine(first.question || first.prompt).slice(0, 300) || group.prompt_id}</b>
        <small>step {group.step} · {group.purpose}{group.data_source && ` · ${group.data_source}`} · {group.samples.length} answers</small>
      </div>
      <div class="dots" aria-hidden="true">{group.samples.slice(0, 16).map((sample, at) => <Dot key={at} sample={sample} greatest={greatest} />)}</div>
      <div class="number"><b>{figure(mean(found))}</b><small>reward</small></div>
    </div>
  );
}

/* A reward as a dot: empty for 0 or less, else fuller for a higher one, by the greatest of all groups that are loaded. */
function Dot({ sample, greatest }: { sample: SampleView; greatest: number }) {
  if (sample.reward === null) return <i class="dot none" />;
  if (sample.reward <= 0 || greatest <= 0) return <i class="dot zero" />;
  return <i class="dot" style={{ opacity: 0.25 + (0.75 * sample.reward) / greatest }} />;
}

const SHOWS = ["text", "tokens"] as const;
function Group({ job, group, close, keep }: { job: JobView; group: GroupView; close?: () => void; keep?: () => void }) {
  const [show, choose] = useState<(typeof SHOWS)[number]>("text");
  const first = group.samples[0], average = mean(rewards(group));
  const several = new Set(group.samples.map(sample => sample.episode)).size < group.samples.length;
  const truth = first.ground_truth;
  return (
    <article class="card samples" aria-label={`Group of step ${group.step}`}>
      <div class="bar">
        <h2>Step {group.step}, {group.purpose}</h2><small>prompt {group.prompt_id}{group.data_source && ` · ${group.data_source}`} · {first.member}</small>
        <span class="space" />
        {first.record && !isReport() && <Choice label="Answers as" of={SHOWS} chosen={show} choose={choose} />}
        {!isReport() && <a class="button" href={link("job", job.id, "timeline", String(group.step))}>timeline</a>}
        {keep && <button type="button" onClick={keep} title="Keep this group beside the next one">keep beside</button>}
        {close && <button type="button" class="plain" aria-label="Close" onClick={close}>×</button>}
      </div>
      <h3>Prompt</h3>
      <Prompt job={job.id} sample={first} />
      {truth !== null && truth !== undefined && <><h3>Ground truth</h3><pre>{typeof truth === "string" ? truth : JSON.stringify(truth, null, 1)}</pre></>}
      {show === "tokens" && first.record
        ? <Tokens job={job.id} record={first.record} samples={group.samples} average={average} several={several} />
        : group.samples.map((sample, at) => <Answer key={at} number={at + 1} sample={sample} average={average} several={several} />)}
    </article>
  );
}

/* What is known of an answer, in one line. */
export interface FactsProps {
  number: number;
  sample: SampleView;
  average: number | null;
  /* Whether an episode has several trajectories. */
  several: boolean;
}
export function Facts({ number, sample, average, several }: FactsProps) {
  const above = sample.reward !== null && average !== null ? sample.reward - average : null;
  const parts = Object.entries(sample.details).filter(([, value]) => typeof value === "number" || typeof value === "string" || typeof value === "boolean");
  return (
    <p class="facts">
      <b>{number}</b>
      <b class={sample.reward_failure ? "failed" : ""}>{sample.reward_failure || `reward ${figure(sample.reward)}`}</b>
      {sample.advantage !== null && <span title="Mean over the sampled tokens of the advantage that the policy loss read.">advantage {signed(sample.advantage)}</span>}
      {sample.advantage === null && above !== null && <span title="Reward less the mean of the group; what an advantage begins with.">{signed(above)} against the group</span>}
      {parts.slice(0, 8).map(([name, value]) => <span key={name}>{name} {typeof value === "number" ? figure(value) : oneLine(String(value)).slice(0, 40)}</span>)}
      <span>{figure(sample.tokens)} tokens{sample.sampled_tokens !== null && sample.sampled_tokens !== sample.tokens && `, ${figure(sample.sampled_tokens)} sampled`}</span>
      <span class={sample.stop_reason === "length" ? "waits" : ""}>{sample.stop_reason.replaceAll("_", " ")}</span>
      <span>version {sample.versions.join(", ")}</span>
      {several && <span>episode {sample.episode + 1}</span>}
    </p>
  );
}

function Answer({ number, sample, average, several }: FactsProps) {
  return (
    <section class="answer" aria-label={`Answer ${number}`}>
      <Facts {...{ number, sample, average, several }} />
      {!sample.turns.length && <pre>{sample.answer}</pre>}
      {sample.turns.map((turn, at) => (
        <div key={at} class="turn">
          {turn.given && <div class="given"><small>given · {turn.given_tokens} tokens</small><pre>{turn.given}</pre></div>}
          <div class="sampled">
            <small>turn {at + 1} · {turn.sampled_tokens} tokens · reward {figure(turn.reward)} · {turn.stop_reason.replaceAll("_", " ")} · version {turn.versions.join(", ")}</small>
            <pre>{turn.answer}</pre>
          </div>
        </div>
      ))}
      {Object.keys(sample.metadata).length > 0 && <details class="more"><summary>metadata</summary><pre>{JSON.stringify(sample.metadata, null, 1)}</pre></details>}
    </section>
  );
}

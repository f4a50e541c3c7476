/* A form for a new job, made from the schema of job specs. The coordinator checks it while it is filled in. */
import { useEffect, useMemo, useState } from "preact/hooks";

import { get, Refused, send } from "../api";
import { Prose } from "../parts/prose";
import { Choice } from "../parts/small";
import type { JobView, Mistake, SpecView, ValidationView } from "../rest";
import { fieldsOf, valueAt, withValue, type Field, type Schema, type Tree } from "../schema";
import { go, problem, useKept } from "../state";
import { Mistakes } from "./mistakes";
import { shown } from "./spec";

const PAUSE_MS = 600;
const FIRST = ["name", "output", "model.path", "data.files", "data.procedural", "reward.function", "algorithm.preset", "schedule.steps",
  "schedule.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_response_tokens", "trainer.optimizer.lr"];
const WAYS = ["form", "JSON"] as const;

type Check = { state: "checking" | "valid" | "refused"; mistakes: Mistake[]; error: Error | null };

function useCheck(tree: Tree | null): Check {
  const [found, set] = useState<Check>({ state: "checking", mistakes: [], error: null });
  useEffect(() => {
    if (!tree) return undefined;
    let current = true;
    set(before => ({ ...before, state: "checking" }));
    const timer = setTimeout(() => {
      send<ValidationView>("POST", "/v1/spec/validate", tree).then(
        found => current && set({ state: found.valid ? "valid" : "refused", mistakes: found.mistakes, error: found.valid ? null : new Refused(found, 200) }),
        (error: Error) => current && set({ state: "refused", mistakes: [], error }),
      );
    }, PAUSE_MS);
    return () => { current = false; clearTimeout(timer); };
  }, [tree]);
  return found;
}

/* The spec of a job under another name, with another folder. */
function cloned(given: Tree): Tree {
  const next = (text: string) => (/-\d+$/.test(text) ? text.replace(/\d+$/, number => String(Number(number) + 1)) : `${text}-2`);
  return { ...given, name: next(String(given.name ?? "job")), output: next(String(given.output ?? "")) };
}

export function Submit({ from }: { from?: string }) {
  const [schema, setSchema] = useState<Schema | null>(null);
  const [draft, keepDraft] = useKept<Tree>("submit.draft", {});
  const [tree, setTree] = useState<Tree | null>(from ? null : draft);
  const [way, choose] = useState<(typeof WAYS)[number]>("form");
  const [text, search] = useState("");
  const [sending, setSending] = useState(false);
  const check = useCheck(tree);
  useEffect(() => { get<Schema>("/v1/spec/schema").then(setSchema, problem); }, []);
  useEffect(() => { if (from) get<SpecView>(`/v1/jobs/${from}/spec`).then(found => setTree(cloned(found.given)), problem); }, [from]);
  const fields = useMemo(() => (schema ? fieldsOf(schema) : []), [schema]);
  if (!schema || !tree) return <p class="empty">…</p>;
  const change = (path: string, value: unknown) => replace(withValue(tree, path, value));
  const replace = (changed: Tree) => { setTree(changed); if (!from) keepDraft(changed); };
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    setSending(true);
    try {
      const job = await send<JobView>("POST", "/v1/jobs", tree);
      if (!from) keepDraft({});
      go("job", job.id);
    } catch (error) {
      if (!(error instanceof Refused && error.mistakes.length)) problem(error as Error);
      setTree({ ...tree }); // checked again: the list of mistakes is up to date
    } finally { setSending(false); }
  };
  const all = fields.flatMap(flat), words = text.toLowerCase();
  const first = FIRST.flatMap(path => all.filter(field => field.path === path));
  const matching = all.filter(field => field.kind !== "section" && `${field.path} ${field.description}`.toLowerCase().includes(words));
  const edit = { tree, change, mistakes: check.mistakes };
  return (
    <form class="submit" onSubmit={submit} aria-label="New job" noValidate>
      <div class="bar">
        <h1>{from ? "Clone a job" : "New job"}</h1>
        <Choice label="Way of writing" of={WAYS} chosen={way} choose={choose} />
        {way === "form" && <input type="search" aria-label="Search fields" placeholder="Search fields" value={text} onInput={e => search(e.currentTarget.value)} />}
        <span class="space" />
        <small role="status">{check.state === "checking" ? "checking…" : check.state === "valid" ? "valid" : `${check.mistakes.length || 1} to correct`}</small>
        {!from && Object.keys(tree).length > 0 && <button type="button" onClick={() => replace({})}>clear</button>}
        <button type="submit" class="main" disabled={sending}>submit</button>
      </div>
      {check.state !== "valid" && <Mistakes of={check.mistakes} error={check.error} />}
      {way === "JSON" && <AsJson tree={tree} set={replace} />}
      {way === "form" && text && <div class="fields">{matching.map(field => <Entry key={field.path} field={field} {...edit} whole />)}</div>}
      {way === "form" && !text && <div class="fields">{first.map(field => <Entry key={field.path} field={field} {...edit} whole />)}</div>}
      {way === "form" && !text && fields.filter(field => field.kind === "section").map(field => <Section key={field.path} field={field} {...edit} />)}
    </form>
  );
}

const flat = (field: Field): Field[] => [field, ...field.fields.flatMap(flat)];

interface Edit { tree: Tree; change: (path: string, value: unknown) => void; mistakes: Mistake[] }

function Section({ field, ...edit }: Edit & { field: Field }) {
  const given = valueAt(edit.tree, field.path) !== undefined;
  return (
    <details>
      <summary><h2>{field.path}</h2> {given && <small>given</small>}<small class="soft"> {field.description.split("\n")[0]}</small></summary>
      <div class="fields">
        {field.fields.filter(each => each.kind !== "section").map(each => <Entry key={each.path} field={each} {...edit} />)}
      </div>
      {field.fields.filter(each => each.kind === "section").map(each => <Section key={each.path} field={each} {...edit} />)}
    </details>
  );
}

function Entry({ field, tree, change, mistakes, whole = false }: Edit & { field: Field; whole?: boolean }) {
  const value = valueAt(tree, field.path), id = `field-${field.path}${whole ? "-first" : ""}`;
  const own = mistakes.filter(mistake => mistake.field === field.path);
  const set = (found: unknown) => change(field.path, found);
  return (
    <div class={`entry ${own.length ? "wrong" : ""} ${value !== undefined ? "given" : ""}`}>
      <label for={id}>{whole ? field.path : field.name}{field.required && <i title="required"> *</i>}</label>
      <Input id={id} field={field} value={value} set={set} />
      <small class="soft" title={field.description}><Prose of={field.description} /></small>
      {own.map(mistake => <small key={mistake.reason} class="failed">{mistake.reason}. Fix: <Prose of={mistake.fix} /></small>)}
    </div>
  );
}

function Input({ id, field, value, set }: { id: string; field: Field; value: unknown; set: (value: unknown) => void }) {
  const hint = field.required ? (field.example === undefined ? "" : shown(field.example)) : `default: ${shown(field.initial ?? null)}`;
  if (field.kind === "switch" || field.kind === "choice") {
    const choices = field.kind === "switch" ? [true, false] : field.choices;
    return (
      <select id={id} value={value === undefined ? "" : JSON.stringify(value)} onChange={e => set(e.currentTarget.value === "" ? undefined : JSON.parse(e.currentTarget.value))}>
        <option value="">{hint}</option>
        {choices.map(each => <option key={String(each)} value={JSON.stringify(each)}>{String(each)}</option>)}
      </select>
    );
  }
  if (field.kind === "list" || field.kind === "json") return <Lines id={id} kind={field.kind} hint={hint} value={value} set={set} />;
  const number = field.kind === "number" || field.kind === "integer";
  return (
    <input id={id} type="text" inputMode={number ? "decimal" : "text"} placeholder={hint} autocomplete="off" spellcheck={false}
      value={value === undefined ? "" : shown(value)} title={number && field.least !== undefined ? `${field.least} to ${field.most ?? "∞"}` : ""}
      onInput={e => set(read(e.currentTarget.value, number))} />
  );
}

/* What was typed; what is no number goes to the coordinator as it is, which says what is wrong with it. */
function read(text: string, number: boolean): unknown {
  if (text === "") return undefined;
  return number && Number.isFinite(Number(text)) ? Number(text) : text;
}

function Lines({ id, kind, hint, value, set }: { id: string; kind: "list" | "json"; hint: string; value: unknown; set: (value: unknown) => void }) {
  const text = value === undefined ? "" : Array.isArray(value) && kind === "list" ? value.join("\n") : shown(value);
  const parse = (found: string): unknown => {
    if (!found.trim()) return undefined;
    if (kind === "list") return found.split("\n");
    try { return JSON.parse(found); } catch { return found; }
  };
  return <textarea id={id} rows={Math.min(6, Math.max(1, text.split("\n").length))} placeholder={kind === "list" ? `one a line; ${hint}` : `JSON; ${hint}`}
    spellcheck={false} value={text} onInput={e => set(parse(e.currentTarget.value))} />;
}

function AsJson({ tree, set }: { tree: Tree; set: (tree: Tree) => void }) {
  const [text, write] = useState(() => JSON.stringify(tree, null, 2));
  const [wrong, refuse] = useState("");
  const change = (found: string) => {
    write(found);
    try { set(JSON.parse(found)); refuse(""); } catch (error) { refuse((error as Error).message); }
  };
  return (
    <>
      <textarea class="whole" aria-label="Job spec as JSON" rows={24} spellcheck={false} value={text} onInput={e => change(e.currentTarget.value)} />
      {wrong && <p class="failed">{wrong}</p>}
    </>
  );
}

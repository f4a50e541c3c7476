/* What can be done with a job: pause, resume with changes, cancel, clone. */
import { useState } from "preact/hooks";

import { Refused, send } from "../api";
import { Dialog } from "../parts/small";
import type { JobState, JobSummary, JobView } from "../rest";
import { link, problem } from "../state";
import { Mistakes } from "./mistakes";

type Action = "pause" | "resume" | "cancel";
export const ACTIONS: Record<JobState, Action[]> = {
  queued: ["cancel"], starting: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"],
  succeeded: [], failed: ["resume"], cancelled: ["resume"],
};

export function Actions({ job, changed }: { job: JobSummary; changed: () => void }) {
  const [asking, ask] = useState<Action | null>(null);
  const act = (action: Action) => {
    const call = action === "cancel" ? send<JobView>("DELETE", `/v1/jobs/${job.id}`)
      : send<JobView>("POST", `/v1/jobs/${job.id}/${action}`);
    call.then(changed, problem);
    ask(null);
  };
  const click = (action: Action) => {
    if (action === "cancel" || (action === "resume" && job.state !== "paused")) ask(action);
    else act(action);
  };
  return (
    <div class="buttons">
      {ACTIONS[job.state].map(action => (
        <button type="button" key={action} onClick={() => click(action)}>
          {action}{action === "resume" && job.state !== "paused" ? "…" : ""}
        </button>
      ))}
      <a class="button" href={link("submit", job.id)}>clone…</a>
      {asking === "cancel" && (
        <Dialog title={`Cancel ${job.name}?`} onClose={() => ask(null)}>
          <p>The step in progress is finished. Trained steps and checkpoints are kept; the job can be resumed later.</p>
          <div class="buttons">
            <button type="button" onClick={() => ask(null)}>keep it running</button>
            <button type="button" class="danger" onClick={() => act("cancel")}>cancel the job</button>
          </div>
        </Dialog>
      )}
      {asking === "resume" && <Resume job={job} close={() => ask(null)} changed={changed} />}
    </div>
  );
}

/* `schedule.steps: 400` a line becomes {schedule: {steps: 400}}. */
export function changesOf(text: string): Record<string, unknown> {
  const changes: Record<string, unknown> = {};
  for (const line of text.split("\n").map(each => each.trim()).filter(Boolean)) {
    const [, path, value] = /^([\w.]+)\s*[:=]\s*(.+)$/.exec(line) ?? [];
    if (!path) throw new Error(`${line}: is no change. Fix: write a field and its value, such as schedule.steps: 400`);
    let at = changes;
    const names = path.split(".");
    for (const name of names.slice(0, -1)) at = (at[name] ??= {}) as Record<string, unknown>;
    at[names[names.length - 1]] = parsed(value);
  }
  return changes;
}

function parsed(value: string): unknown {
  try { return JSON.parse(value); } catch { return value; }
}

function Resume({ job, close, changed }: { job: JobSummary; close: () => void; changed: () => void }) {
  const [text, set] = useState("");
  const [error, refuse] = useState<Error | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    try {
      const changes = changesOf(text);
      await send("POST", `/v1/jobs/${job.id}/resume`, Object.keys(changes).length ? changes : undefined);
      close();
      changed();
    } catch (found) { refuse(found as Error); }
  };
  return (
    <Dialog title={`Resume ${job.name}`} onClose={close}>
      <form onSubmit={submit}>
        <p>It continues after step {job.step}, or from its last checkpoint if the trainer does not hold that any more.</p>
        <label>Changes of its spec, one a line; none: as it was
          <textarea name="changes" rows={4} placeholder="schedule.steps: 400" value={text} onInput={e => set(e.currentTarget.value)} />
        </label>
        {error && <Mistakes of={error instanceof Refused ? error.mistakes : []} error={error} />}
        <div class="buttons"><button type="button" onClick={close}>close</button><button type="submit" class="main">resume</button></div>
      </form>
    </Dialog>
  );
}

/* One member: what it uses of its hosts and GPUs, and the newest lines of its log. */
import { get } from "../api";
import { bytes, figure } from "../format";
import { Dialog, Empty } from "../parts/small";
import type { GpuView, LogView, MemberView } from "../rest";
import { usePolled } from "../state";

const percent = (part: number | null | undefined) => part === null || part === undefined ? "–" : `${figure(Math.round(100 * part))} %`;
const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);

/* A member's usage in one figure and what it says: its GPUs where they are measured, otherwise memory of its hosts. */
export function usage(of: MemberView): [string, string] {
  if (of.gpus.length) {
    const busy = of.gpus.flatMap(gpu => gpu.busy === null ? [] : [gpu.busy]);
    const memory = percent(sum(of.gpus.map(gpu => gpu.used_bytes)) / sum(of.gpus.map(gpu => gpu.size_bytes)));
    return [busy.length ? percent(sum(busy) / busy.length) : memory, busy.length ? `GPU, ${memory} full` : "GPU memory"];
  }
  return of.hosts.length ? [bytes(sum(of.hosts.map(host => host.process_bytes))), "memory"] : ["–", "memory"];
}

export const present = (member: MemberView) => member.state !== "left" && member.state !== "lost";
export const drainable = (member: MemberView) => present(member) && member.state !== "draining";

export function MemberDetails({ id, of, drain, onClose }: { id: string; of: MemberView | undefined; drain: () => void; onClose: () => void }) {
  return (
    <Dialog title={id} onClose={onClose} wide>
      {of && <Usage of={of} />}
      {of && present(of) ? <Log id={id} /> : <Empty>It is gone: its log is on its host.</Empty>}
      <div class="buttons">{of && drainable(of) && <button type="button" onClick={drain}>drain…</button>}<button type="button" onClick={onClose}>close</button></div>
    </Dialog>
  );
}

function Usage({ of }: { of: MemberView }) {
  if (!of.hosts.length && !of.gpus.length) return <Empty>It has reported no usage yet.</Empty>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Usage">
      <table><caption>Memory{of.cache_used !== null && `; engine cache ${percent(of.cache_used)} in use`}</caption>
        <thead><tr><th>host</th><th>its processes</th><th>all processes</th><th>of</th></tr></thead>
        <tbody>{of.hosts.map(host => (
          <tr key={host.host}><td>{host.host}</td><td>{bytes(host.process_bytes)}</td><td>{bytes(host.used_bytes)}</td><td>{bytes(host.size_bytes)}</td></tr>
        ))}</tbody></table>
      {of.gpus.length > 0 && (
        <table><caption>GPUs, with the work of all processes</caption>
          <thead><tr><th>host</th><th>GPU</th><th>busy</th><th>memory</th><th>of</th><th>power</th><th>temperature</th></tr></thead>
          <tbody>{of.gpus.map(gpu => <Gpu key={`${gpu.host} ${gpu.gpu}`} of={gpu} />)}</tbody></table>
      )}
    </div>
  );
}

function Gpu({ of }: { of: GpuView }) {
  return (
    <tr><td>{of.host}</td><td>{of.gpu}</td><td>{percent(of.busy)}</td><td>{bytes(of.used_bytes)}</td><td>{bytes(of.size_bytes)}</td>
      <td>{of.power_w === null ? "–" : `${figure(of.power_w)} W`}</td><td>{of.temperature_c === null ? "–" : `${figure(of.temperature_c)} °C`}</td></tr>
  );
}

function Log({ id }: { id: string }) {
  const [log] = usePolled(signal => get<LogView>(`/v1/fleet/${id}/log`, signal), 3000, [id]);
  if (!log) return <Empty>Its log is being asked for.</Empty>;
  if (!log.lines.length) return <Empty>It has logged nothing.</Empty>;
  const text = log.lines.map(line => [line.time.slice(11, 19), line.level.toUpperCase(), line.message, line.details].filter(Boolean).join(" "));
  return <pre class="log" tabIndex={0} role="log" aria-label={`Newest log lines of ${id}`}>{text.reverse().join("\n")}</pre>;
}

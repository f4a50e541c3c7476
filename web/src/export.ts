/* What the page shows, as files. */
import { get } from "./api";
import type { GroupView, JobView, StepMetrics } from "./rest";

function save(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const cell = (value: unknown): string => {
  const text = value === undefined || value === null ? "" : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/* All metrics of all kept steps: a row a step, a column a metric. */
export async function saveMetrics(job: JobView): Promise<void> {
  const rows = await get<StepMetrics[]>(`/v1/jobs/${job.id}/metrics`);
  const keys = [...new Set(rows.flatMap(row => Object.keys(row.values)))].sort();
  const lines = [["step", ...keys], ...rows.map(row => [row.step, ...keys.map(key => row.values[key])])];
  save(`${job.name}-metrics.csv`, "text/csv", lines.map(line => line.map(cell).join(",")).join("\n") + "\n");
}

/* The groups that are listed: a line a group. */
export function saveGroups(job: JobView, groups: GroupView[]): void {
  save(`${job.name}-samples.jsonl`, "application/jsonl", groups.map(group => JSON.stringify(group)).join("\n") + "\n");
}

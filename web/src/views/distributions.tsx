/* How values of a job are distributed within its steps. */
import { useEffect, useRef, useState } from "preact/hooks";

import { get, query } from "../api";
import { useInView, type Zoom } from "../curves";
import { Distribution } from "../parts/distribution";
import { Empty } from "../parts/small";
import type { HistogramView } from "../rest";
import { problem } from "../state";

const STEPS = 100;
const AT_MOST_EVERY_MS = 2000;

export function Distributions({ job, step, zoom }: { job: string; step: number; zoom: Zoom | null }) {
  const [element, seen] = useInView<HTMLDetailsElement>();
  const [open, show] = useState(true);
  const [found, set] = useState<HistogramView[] | null>(null);
  const looked = useRef(-AT_MOST_EVERY_MS);
  useEffect(() => {
    if (!seen || !open) return undefined;
    const aborted = new AbortController();
    const look = async () => {
      looked.current = performance.now();
      try {
        set(await get(`/v1/jobs/${job}/histograms${query({ points: STEPS, first: zoom?.first, last: zoom?.last })}`, aborted.signal));
      } catch (error) { if (!aborted.signal.aborted) problem(error as Error); }
    };
    const timer = setTimeout(look, Math.max(0, looked.current + AT_MOST_EVERY_MS - performance.now()));
    return () => { aborted.abort(); clearTimeout(timer); };
  }, [job, step, zoom?.first, zoom?.last, seen, open]);
  return (
    <details ref={element} open={open} onToggle={e => show(e.currentTarget.open)}>
      <summary><h2>Distributions</h2> {found && <small>{found.length}</small>}</summary>
      {found && !found.length && <Empty>These steps have none.</Empty>}
      <div class="charts">{(found ?? []).map(each => <div key={each.key} class="card"><Distribution of={each} /></div>)}</div>
    </details>
  );
}

/* Curves of one or several jobs: which metrics belong to one chart, and their points, fetched for the charts in view. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { get, query } from "./api";
import type { Line } from "./parts/chart";
import type { BandView, MetricView, SeriesView } from "./rest";
import { onShowAll, problem } from "./state";

/* Metrics that one chart shows: a mean with least and greatest value, or one metric alone. */
export interface Group { title: string; section: string; unit: string; meaning: string; mean: string; least?: string; greatest?: string }

export function groupsOf(metrics: MetricView[]): Group[] {
  const keys = new Set(metrics.map(metric => metric.key));
  return metrics.flatMap(({ key, section, unit, meaning }) => {
    const [, base, part] = /^(.*)\/(mean|max|min)$/.exec(key) ?? [];
    const whole = base !== undefined && ["mean", "max", "min"].every(each => keys.has(`${base}/${each}`));
    if (!whole) return [{ title: key, section, unit, meaning, mean: key }];
    return part === "mean" ? [{ title: base, section, unit, meaning, mean: key, least: `${base}/min`, greatest: `${base}/max` }] : [];
  });
}

const MAIN = [
  /^critic\/score\/mean$/, /^val-core\/.*\/mean@\d+$/, /^response_length\/mean$/, /^actor\/entropy$/, /^actor\/grad_norm$/,
  /^rollout_corr\/k3_kl$/, /^timing_s\/step$/, /^perf\/throughput$/, /^training\/staleness\/mean$/,
];
/* The charts that say most, in this order. */
export const mainOf = (groups: Group[]): Group[] => MAIN.flatMap(wanted => groups.filter(group => wanted.test(group.mean)).slice(0, 3));

export interface Points { steps: number[]; time_s: number[]; tokens: number[]; metrics: Map<string, BandView> }
export interface Zoom { first: number; last: number }
const AT_ONCE = 90;
const POINTS = 500;

const finite = (values: BandView["mean"]): (number | null)[] => values.map(value => (typeof value === "number" ? value : null));

export function lineOf(points: Points, group: Group, color: string, label: string): Line {
  const read = (key?: string) => (key ? points.metrics.get(key) : undefined);
  const mean = read(group.mean), least = read(group.least) ?? mean, greatest = read(group.greatest) ?? mean;
  return {
    label, color, mean: finite(mean?.mean ?? []),
    least: least && finite(least.least.length ? least.least : group.least ? least.mean : []),
    greatest: greatest && finite(greatest.greatest.length ? greatest.greatest : group.greatest ? greatest.mean : []),
  };
}

/* Points of the metrics of the charts in view. `step` is the newest step of the job: when it grows they are fetched again. */
export function useCurves(job: string, step: number, zoom: Zoom | null): { points: Points | null; want: (group: Group, wanted: boolean) => void } {
  const wanted = useRef(new Map<string, number>());
  const [points, set] = useState<Points | null>(null);
  const fetched = useRef({ keys: new Set<string>(), about: "", at: 0, tookMs: 0 });
  const [asked, ask] = useState(0);
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);

  const want = useMemo(() => (group: Group, more: boolean) => {
    for (const key of [group.mean, group.least, group.greatest]) {
      if (!key) continue;
      const count = (wanted.current.get(key) ?? 0) + (more ? 1 : -1);
      if (count > 0) wanted.current.set(key, count);
      else wanted.current.delete(key);
    }
    if (more) ask(number => number + 1);
  }, []);

  useEffect(() => {
    const about = `${job} ${step} ${zoom?.first} ${zoom?.last}`, past = fetched.current;
    const keys = [...wanted.current.keys()], fresh = past.about === about;
    const missing = fresh ? keys.filter(key => !past.keys.has(key)) : keys;
    if (!missing.length) return undefined;
    const aborted = new AbortController();
    const sameView = past.about.replace(/ \d+ /, " ") === about.replace(/ \d+ /, " ");
    const wait = fresh || !sameView ? 0 : Math.max(0, past.at + Math.max(1000, 10 * past.tookMs) - performance.now());
    const look = async () => {
      const began = performance.now();
      try {
        const found = await fetchPoints(job, missing, zoom, aborted.signal);
        if (aborted.signal.aborted) return;
        fetched.current = { keys: new Set(fresh ? [...past.keys, ...missing] : missing), about, at: performance.now(), tookMs: performance.now() - began };
        set(before => merged(fresh ? before : null, found));
      } catch (error) { if (!aborted.signal.aborted) problem(error as Error); }
    };
    timer.current = window.setTimeout(look, wait);
    return () => { aborted.abort(); clearTimeout(timer.current); };
  }, [job, step, zoom?.first, zoom?.last, asked]);
  return { points, want };
}

async function fetchPoints(job: string, keys: string[], zoom: Zoom | null, signal: AbortSignal): Promise<Points> {
  const parts: string[][] = [];
  for (let at = 0; at < keys.length; at += AT_ONCE) parts.push(keys.slice(at, at + AT_ONCE));
  const found = await Promise.all(parts.map(part =>
    get<SeriesView>(`/v1/jobs/${job}/series${query({ points: POINTS, first: zoom?.first, last: zoom?.last, keys: part })}`, signal)));
  const { steps, time_s, tokens } = found[0];
  let sum = 0;
  const metrics = new Map(found.flatMap(each => (each.steps.length === steps.length ? Object.entries(each.metrics) : [])));
  return { steps, time_s, tokens: tokens.map(each => (sum += each)), metrics };
}

function merged(before: Points | null, found: Points): Points {
  if (!before || before.steps.length !== found.steps.length || before.steps[0] !== found.steps[0]) return found;
  return { ...found, metrics: new Map([...before.metrics, ...found.metrics]) };
}

/* Whether an element is in view, or nearly. */
export function useInView<T extends Element>(): [{ current: T | null }, boolean] {
  const element = useRef<T>(null);
  const [seen, set] = useState(false);
  useEffect(() => {
    let inView = false, all = false;
    const tell = () => set(inView || all);
    const watch = new IntersectionObserver(found => { inView = found[found.length - 1].isIntersecting; tell(); }, { rootMargin: "200px" });
    watch.observe(element.current!);
    const forget = onShowAll(shown => { all = shown; tell(); });
    return () => { watch.disconnect(); forget(); };
  }, []);
  return [element, seen];
}

/* Where the lanes and spans of a timeline lie: pure computations for the canvas and the pointer. */
import type { LaneView, SpanKind, SpanView, TimelineView } from "./rest";

export interface PlacedSpan { span: SpanView; row: number }
export interface Lane { view: LaneView; top: number; height: number; rowHeight: number; rows: PlacedSpan[][] }
export interface Range { start: number; end: number }

const MOST_ROWS = 14;
const IDLE_PX = 5;
const GAP_PX = 7;
/* Roots of traces last as long as all of their parts, and say nothing on a lane of stages. */
const HIDDEN: SpanKind[] = ["group", "hold", "queue"];

/* Lanes from top to bottom. Spans that overlap lie in rows below each other; what has no row left lies in the last one. */
export function placed(timeline: TimelineView, hidden: Set<string>): { lanes: Lane[]; height: number } {
  let top = 0;
  const lanes = timeline.lanes.filter(view => !hidden.has(view.kind)).map(view => {
    const rows: PlacedSpan[][] = [], ends: number[] = [];
    for (const span of view.spans) {
      if (view.kind === "coordinator" && HIDDEN.includes(span.kind)) continue;
      let row = ends.findIndex(end => end <= span.start_s + 1e-7);
      if (row < 0) row = Math.min(ends.length, MOST_ROWS - 1);
      ends[row] = Math.max(ends[row] ?? 0, span.end_s);
      (rows[row] ??= []).push({ span, row });
    }
    const rowHeight = rows.length > 6 ? 6 : rows.length > 3 ? 8 : 11;
    const height = Math.max(18, rows.length * rowHeight) + IDLE_PX + GAP_PX;
    const lane = { view, top, height, rowHeight, rows };
    top += height;
    return lane;
  });
  return { lanes, height: top };
}

export const idleTop = (lane: Lane): number => lane.top + lane.height - IDLE_PX - GAP_PX / 2;
export const IDLE_HEIGHT = IDLE_PX;

export function laneAt(lanes: Lane[], y: number): Lane | undefined {
  return lanes.find(lane => y >= lane.top && y < lane.top + lane.height);
}

/* The span at a place; the shortest where several lie there. `slack_s`: how far beside it the pointer may be. */
export function spanAt(lane: Lane, y: number, time: number, slack_s: number): SpanView | undefined {
  const row = Math.floor((y - lane.top) / lane.rowHeight);
  const found = (lane.rows[row] ?? []).filter(({ span }) => span.start_s - slack_s <= time && time <= span.end_s + slack_s);
  return found.map(each => each.span).sort((a, b) => (a.end_s - a.start_s) - (b.end_s - b.start_s))[0];
}

/* All spans of the trace of `span`, in the order of their begin. */
export function traceOf(timeline: TimelineView, span: SpanView): { span: SpanView; lane: LaneView }[] {
  return timeline.lanes
    .flatMap(lane => lane.spans.filter(each => each.trace_id === span.trace_id).map(each => ({ span: each, lane })))
    .sort((a, b) => a.span.start_s - b.span.start_s);
}

/* Name of the colour of a kind of span. */
export function colorOf(kind: SpanKind): string {
  switch (kind) {
    case "generate": case "lease": return "water";
    case "train": case "update": case "step": return "good";
    case "publish": case "prepare": case "transfer": case "verify": case "commit": return "violet";
    case "pause": case "checkpoint": return "bad";
    case "score": return "c8";
    case "environment": case "tool": return "c6";
    case "evaluate": case "assess": case "fetch": return "c7";
    case "engine_queue": case "queue": case "job_queue": case "hold": case "admit": return "warm";
    default: return "soft";
  }
}

/* Times at which the axis has marks, round and at least `least` seconds apart. */
export function marks(range: Range, least: number): number[] {
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= least)!;
  const found: number[] = [];
  for (let time = Math.ceil(range.start / step) * step; time <= range.end; time += step) found.push(time);
  return found;
}

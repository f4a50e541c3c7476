/* The lanes of a timeline on a canvas that is as large as what is in view. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { duration } from "../format";
import { colorOf, IDLE_HEIGHT, idleTop, laneAt, marks, placed, spanAt, type Lane, type Range } from "../lanes";
import type { IdleCause, LaneView, SpanView, TimelineView } from "../rest";
import { color, faint, useRepaint } from "../state";

const NAMES = 128;
const HEAD = 20;
export const IDLE_COLORS: Record<IdleCause, string> = {
  starting: "soft", generation: "water", long_tail: "c6", rewards: "c8", environment: "c6", queue: "warm", trainer: "good",
  staleness_bound: "c7", publication: "violet", evaluation: "c7", checkpoint: "bad", coordination: "warm", unknown: "soft",
};
type Found = { lane: LaneView; span?: SpanView; idle?: LaneView["idle"][number]; x: number; y: number };
interface Props { timeline: TimelineView; hidden: Set<string>; range: Range; setRange: (range: Range) => void; chosen: SpanView | null; choose: (span: SpanView | null) => void }

export function Lanes({ timeline, hidden, range, setRange, chosen, choose }: Props) {
  const box = useRef<HTMLDivElement>(null), canvas = useRef<HTMLCanvasElement>(null);
  const { lanes, height } = useMemo(() => placed(timeline, hidden), [timeline, hidden]);
  const [size, setSize] = useState({ width: 900, height: 400 });
  const [found, point] = useState<Found | null>(null);
  const [dragged, drag] = useState<[number, number] | null>(null);
  const scale = (range.end - range.start) / Math.max(1, size.width - NAMES);
  const timeAt = (x: number) => range.start + (x - NAMES) * scale;

  const paint = () => {
    const context = canvas.current?.getContext("2d");
    if (!context) return;
    const ratio = devicePixelRatio || 1;
    canvas.current!.width = size.width * ratio;
    canvas.current!.height = size.height * ratio;
    context.scale(ratio, ratio);
    draw(context, { ...size, top: box.current!.scrollTop }, lanes, range, timeline.start_s, chosen);
    if (dragged) {
      context.fillStyle = faint("water", 0.2);
      context.fillRect(Math.min(...dragged), 0, Math.abs(dragged[1] - dragged[0]), size.height);
    }
  };
  useEffect(paint);
  useRepaint(paint);
  useEffect(() => {
    const element = box.current!; // the observer may still call when the view has been left
    const look = () => setSize({ width: element.clientWidth, height: element.clientHeight });
    const sizes = new ResizeObserver(look);
    sizes.observe(element);
    look();
    return () => sizes.disconnect();
  }, []);

  const at = (event: MouseEvent): { x: number; y: number; seen: Found | null } => {
    const place = canvas.current!.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top;
    const inside = y - HEAD + box.current!.scrollTop, lane = y > HEAD ? laneAt(lanes, inside) : undefined, time = timeAt(x);
    if (!lane || x < NAMES) return { x, y, seen: null };
    const span = spanAt(lane, inside, time, 2 * scale);
    const idle = lane.view.idle.find(each => each.start_s <= time && time <= each.end_s);
    return { x, y, seen: span || idle ? { lane: lane.view, span, idle: span ? undefined : idle, x, y } : null };
  };
  const zoom = (factor: number, around = (range.start + range.end) / 2) =>
    setRange(within({ start: around - (around - range.start) * factor, end: around + (range.end - around) * factor }, timeline));
  const shift = (share: number) => {
    const by = (range.end - range.start) * share;
    setRange(within({ start: range.start + by, end: range.end + by }, timeline));
  };
  const keys: Record<string, () => void> = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2),
    Escape: () => { setRange({ start: timeline.start_s, end: timeline.end_s }); choose(null); },
  };
  const release = (event: MouseEvent) => {
    const { x, seen } = at(event);
    if (dragged && Math.abs(x - dragged[0]) > 5) setRange(within({ start: timeAt(Math.min(...dragged)), end: timeAt(Math.max(...dragged)) }, timeline));
    else choose(seen?.span ?? null);
    drag(null);
  };
  const idle = lanes.flatMap(lane => Object.entries(lane.view.idle_s).map(([cause, seconds]) => `${lane.view.member} ${duration(seconds)} for ${cause}`));
  return (
    <div ref={box} class="lanes" tabIndex={0} onScroll={paint} onMouseLeave={() => { point(null); drag(null); }}
      onKeyDown={event => { const act = keys[event.key]; if (act) { event.preventDefault(); act(); } }}
      onWheel={event => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(at(event).x)); } }}>
      <div style={{ height: `${height + HEAD + 4}px` }}>
        <canvas ref={canvas} role="img" aria-label={`Timeline of ${lanes.length} lanes. Idle: ${idle.join(", ") || "not told"}`}
          style={{ width: `${size.width}px`, height: `${size.height}px` }}
          onMouseDown={event => { const { x } = at(event); if (x > NAMES) drag([x, x]); }} onMouseUp={release}
          onMouseMove={event => { const { x, seen } = at(event); point(seen); if (dragged) drag([dragged[0], x]); }} />
      </div>
      {found && !dragged && <Hint of={found} width={size.width} scrolled={box.current?.scrollTop ?? 0} />}
    </div>
  );
}

function within(range: Range, { start_s, end_s }: TimelineView): Range {
  const length = Math.min(Math.max(range.end - range.start, 1e-4), end_s - start_s);
  const start = Math.min(Math.max(range.start, start_s), end_s - length);
  return { start, end: start + length };
}

function Hint({ of, width, scrolled }: { of: Found; width: number; scrolled: number }) {
  const { span, idle, lane } = of;
  const length = span ? span.end_s - span.start_s : idle!.end_s - idle!.start_s;
  return (
    <div class="hint" style={{ left: `${Math.min(of.x + 12, width - 240)}px`, top: `${of.y + 16 + scrolled}px` }}>
      <b>{span ? span.kind.replaceAll("_", " ") : `idle: ${idle!.cause.replaceAll("_", " ")}`}</b> {duration(length)}
      <small>{lane.member}{span?.detail && ` · ${span.detail}`}{span?.group && ` · group ${span.group}`}{span?.step != null && ` · step ${span.step}`}</small>
    </div>
  );
}

function draw(context: CanvasRenderingContext2D, view: { width: number; height: number; top: number }, lanes: Lane[], range: Range, zero: number, chosen: SpanView | null): void {
  const scale = (view.width - NAMES) / (range.end - range.start), xOf = (time: number) => NAMES + (time - range.start) * scale;
  const [ink, soft, line] = [color("ink"), color("soft"), color("line")];
  const shades = new Map<string, string>();
  const shade = (name: string, share: number) => {
    const key = `${name} ${share}`;
    if (!shades.has(key)) shades.set(key, faint(name, share));
    return shades.get(key)!;
  };
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.save();
  context.translate(0, HEAD - view.top);
  for (const lane of lanes) {
    if (lane.top + lane.height < view.top || lane.top > view.top + view.height) continue;
    context.fillStyle = line;
    context.fillRect(0, lane.top + lane.height - 2, view.width, 1);
    for (const idle of lane.view.idle) {
      context.fillStyle = shade(IDLE_COLORS[idle.cause], 0.55);
      context.fillRect(xOf(idle.start_s), idleTop(lane), Math.max(1, (idle.end_s - idle.start_s) * scale), IDLE_HEIGHT);
    }
    for (const row of lane.rows) drawRow(context, row.map(each => each.span), lane, row[0].row, range, xOf, chosen, shade, ink);
    context.clearRect(0, lane.top, NAMES - 4, lane.height - 2);
    context.fillStyle = ink;
    const name = lane.view.kind === "coordinator" ? "coordinator" : lane.view.member;
    context.fillText(name, 6, lane.top + 9, NAMES - 12);
    if (lane.view.kind !== "coordinator" && lane.height > 28) { context.fillStyle = soft; context.fillText(lane.view.kind, 6, lane.top + 22, NAMES - 12); }
  }
  context.restore();
  context.clearRect(0, 0, view.width, HEAD);
  context.fillStyle = soft;
  const least = ((range.end - range.start) * 90) / Math.max(1, view.width - NAMES);
  for (const time of marks({ start: range.start - zero, end: range.end - zero }, least)) {
    context.fillText(time === 0 ? "0" : duration(time), xOf(time + zero) + 3, HEAD / 2);
    context.fillRect(xOf(time + zero), 2, 1, HEAD - 4);
  }
}

function drawRow(context: CanvasRenderingContext2D, spans: SpanView[], lane: Lane, row: number, range: Range, xOf: (time: number) => number,
  chosen: SpanView | null, shade: (name: string, share: number) => string, ink: string): void {
  const top = lane.top + row * lane.rowHeight, height = lane.rowHeight - 1;
  let past = -1;
  for (const span of spans) {
    if (span.end_s < range.start || span.start_s > range.end) continue;
    const x = Math.max(xOf(span.start_s), NAMES), end = xOf(span.end_s), width = Math.max(1, end - x);
    if (end < past + 0.5) continue; // within a pixel that is painted already
    past = end;
    const other = chosen !== null && chosen.trace_id !== span.trace_id;
    context.fillStyle = shade(colorOf(span.kind), other ? 0.18 : 0.78);
    context.fillRect(x, top, width, height);
    if (chosen?.span_id === span.span_id) { context.strokeStyle = ink; context.strokeRect(x, top, width, height); }
    if (height >= 10 && width > 46 && !other) {
      context.fillStyle = color("card");
      context.fillText(span.kind.replaceAll("_", " "), x + 4, top + height / 2 + 0.5, width - 6);
    }
  }
}

/* One chart: lines with bands over a shared horizontal axis. Hover is synchronous in all charts of a view. */
import { useLayoutEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import { clock, duration, figure, short } from "../format";
import { color, faint, useRepaint } from "../state";

/* `seconds`: since the start of each curve. */
export type Axis = "step" | "time" | "tokens" | "seconds";
export interface Line {
  label: string;
  /* Name of a colour of the style sheet. */
  color: string;
  mean: (number | null)[];
  least?: (number | null)[];
  greatest?: (number | null)[];
}
/* An event of the job, as a line across the chart. `x`: on the chart's horizontal axis. */
export interface Mark { x: number; text: string; color: string }
interface Props {
  title: string;
  unit: string;
  meaning: string;
  axis: Axis;
  xs: number[];
  lines: Line[];
  log: boolean;
  smoothing: number;
  group: string;
  marks?: Mark[];
  onZoom?: (first: number, last: number) => void;
  onReset?: () => void;
  height?: number;
}

/* Exponential moving average without bias; gaps stay gaps. */
export function smoothed(values: (number | null)[], share: number): (number | null)[] {
  let sum = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * share + value * (1 - share);
    weight = weight * share + (1 - share);
    return sum / weight;
  });
}

const positive = (values: (number | null)[]) => values.map(value => (value !== null && value > 0 ? value : null));
export const axisText = (axis: Axis, value: number): string => (axis === "time" ? clock(value) : axis === "seconds" ? duration(value) : short(value));

interface Drawn { series: uPlot.Series[]; bands: uPlot.Band[]; data: (number | null)[][] }

function drawn({ lines, log, smoothing, xs }: Props): Drawn {
  const fits = log ? positive : (values: (number | null)[]) => values;
  const found: Drawn = { series: [{}], bands: [], data: [xs] };
  const add = (series: uPlot.Series, values: (number | null)[]) => {
    found.series.push({ spanGaps: true, ...series });
    found.data.push(fits(values));
  };
  for (const line of lines) {
    const few = line.mean.filter(value => value !== null).length < 40;
    if (line.least?.length && line.greatest?.length) {
      const at = found.series.length;
      const hidden = { width: 0, points: { show: false } };
      add({ ...hidden, stroke: "transparent" }, line.greatest);
      add({ ...hidden, stroke: "transparent" }, line.least);
      found.bands.push({ series: [at, at + 1], fill: () => faint(line.color, 0.16) });
    }
    if (smoothing > 0) add({ width: 1, stroke: () => faint(line.color, 0.3), points: { show: false } }, line.mean);
    const main = smoothing > 0 ? smoothed(line.mean, smoothing) : line.mean;
    add({ label: line.label, width: 1.6, stroke: () => color(line.color), points: { show: few && main.length < 400, size: 4 } }, main);
  }
  return found;
}

const FONT = "11px system-ui, sans-serif";
/* Width of a vertical axis that cuts none of its labels. */
function widthOf(labels: string[] | null): number {
  const pen = document.createElement("canvas").getContext("2d")!;
  pen.font = FONT;
  return 14 + Math.ceil(Math.max(20, ...(labels ?? []).map(label => pen.measureText(label).width)));
}

function drawMarks(u: uPlot, marks: Mark[]): void {
  const { left, top, width, height } = u.bbox, pen = u.ctx;
  pen.save();
  for (const mark of marks) {
    const x = u.valToPos(mark.x, "x", true);
    if (x < left || x > left + width) continue;
    pen.strokeStyle = pen.fillStyle = faint(mark.color, 0.75);
    pen.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
    pen.fillRect(x - 2 * devicePixelRatio, top, 4 * devicePixelRatio, 4 * devicePixelRatio);
  }
  pen.restore();
}

/* The marks within a few pixels of the cursor, as text. */
function marksAt(u: uPlot | null, marks: Mark[]): string {
  const left = u?.cursor.left;
  if (!u || left === undefined || left < 0) return "";
  return marks.filter(mark => Math.abs(u.valToPos(mark.x, "x") - left) < 5).map(mark => mark.text).slice(0, 3).join("; ");
}

const ruled = (): Partial<uPlot.Axis> => ({
  stroke: () => color("soft"), grid: { stroke: () => faint("line", 0.7), width: 1 }, ticks: { show: false }, font: FONT,
});

export function Chart(props: Props) {
  const { title, unit, meaning, axis, lines, group, height = 150 } = props;
  const box = useRef<HTMLDivElement>(null), told = useRef<HTMLSpanElement>(null), plot = useRef<uPlot | null>(null);
  const kept = useRef(props);
  kept.current = props;
  const found = drawn(props), latest = useRef(found);
  latest.current = found;

  const tell = (at: number | null | undefined) => {
    const { xs, lines: now, axis: kind } = kept.current;
    // Without a cursor each curve tells its own newest value: an ended job has none where another one goes on.
    const valueOf = (line: Line) => line.mean[at ?? lastOf([line])];
    const values = now.map(line => `${now.length > 1 ? `${line.label} ` : ""}${figure(valueOf(line))}`).join(" · ");
    const x = at == null ? undefined : xs[at], event = marksAt(plot.current, kept.current.marks ?? []);
    const where = x === undefined ? "" : ` at ${kind === "step" ? "step " : ""}${axisText(kind, x)}`;
    if (told.current) told.current.textContent = xs.length ? `${values}${where}${event && `: ${event}`}` : "";
  };

  // What is drawn is never older than the rest of the page: who sees a new axis chosen also points at a chart of it.
  const shape = `${axis} ${props.log} ${found.series.length} ${props.smoothing > 0} ${lines.map(line => line.color)}`;
  useLayoutEffect(() => {
    const target = box.current!;
    const options: uPlot.Options = {
      width: target.clientWidth || 300, height, series: latest.current.series, bands: latest.current.bands,
      legend: { show: false }, padding: [8, 18, 0, 0],
      scales: { x: { time: axis === "time" }, y: { distr: props.log ? 3 : 1 } },
      axes: [
        { ...ruled(), size: 24, values: axis === "time" ? undefined : (_, ticks) => ticks.map(tick => axisText(axis, tick)) },
        { ...ruled(), size: (_, labels) => widthOf(labels), values: (_, ticks) => ticks.map(tick => (tick === null ? "" : figure(tick))) },
      ],
      cursor: {
        sync: { key: group, setSeries: false }, points: { size: 6 }, y: false,
        drag: { x: true, y: false, setScale: false },
      },
      hooks: {
        draw: [u => drawMarks(u, kept.current.marks ?? [])],
        setCursor: [u => tell(u.cursor.idx)],
        setSelect: [u => {
          const { left, width } = u.select;
          if (width < 4) return;
          kept.current.onZoom?.(u.posToIdx(left), u.posToIdx(left + width));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
    const made = new uPlot(options, latest.current.data as uPlot.AlignedData, target);
    plot.current = made;
    const sizes = new ResizeObserver(() => made.setSize({ width: target.clientWidth, height }));
    sizes.observe(target);
    return () => { sizes.disconnect(); made.destroy(); plot.current = null; };
  }, [shape, height, group]);
  useLayoutEffect(() => { plot.current?.setData(found.data as uPlot.AlignedData); tell(plot.current?.cursor.idx); }, [props.xs, lines, props.smoothing, props.log]);
  useLayoutEffect(() => plot.current?.redraw(false, true), [props.marks]);
  useRepaint(() => plot.current?.redraw(false, true));

  const move = (event: KeyboardEvent) => {
    const u = plot.current, by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") props.onReset?.();
    if (!u || !by) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(props.xs.length - 1, (u.cursor.idx ?? props.xs.length) + by));
    u.setCursor({ left: u.valToPos(props.xs[index], "x"), top: 10 });
  };
  const newest = lines.map(line => `${line.label} ${figure(line.mean[lastOf([line])])}`).join(", ");
  return (
    <figure class="chart" tabIndex={0} onKeyDown={move} onDblClick={props.onReset}>
      <figcaption title={meaning}><b>{title}</b>{unit && <small> {unit}</small>}<span ref={told} class="told" /></figcaption>
      <div ref={box} role="img" aria-label={`${title}: ${newest}`} style={{ height: `${height}px` }} />
    </figure>
  );
}

function lastOf(lines: Line[]): number {
  for (let index = (lines[0]?.mean.length ?? 0) - 1; index >= 0; index -= 1) {
    if (lines.some(line => line.mean[index] !== null)) return index;
  }
  return 0;
}

/* A distribution over steps: a map with one column a step, darker where more values are, and the bars of one step. */
import { useEffect, useRef, useState } from "preact/hooks";

import { figure } from "../format";
import type { HistogramView } from "../rest";
import { color, faint, useRepaint } from "../state";

const HEIGHT = 170, LEFT = 52, BOTTOM = 20, TOP = 6, GAP = 10;
const barsWidth = (width: number) => Math.min(110, 0.28 * width);
const mapWidth = (width: number) => width - LEFT - GAP - barsWidth(width);
const total = (counts: number[]) => counts.reduce((sum, count) => sum + count, 0);

interface Scale { least: number; greatest: number; height: (step: number, edge: number) => number }

/* Where an edge lies, as a share of the height. Bins of fixed edges are drawn equally high, as they differ much in width. */
function scaleOf({ fixed, edges }: HistogramView): Scale {
  const least = Math.min(...edges.map(each => each[0])), greatest = Math.max(...edges.map(each => each[each.length - 1]));
  const spread = greatest - least;
  const height = (step: number, edge: number) =>
    fixed ? edge / (edges[step].length - 1) : spread > 0 ? (edges[step][edge] - least) / spread : 0.5;
  return { least, greatest, height };
}

function ticksOf({ fixed, edges }: HistogramView, { least, greatest }: Scale): [number, string][] {
  if (!fixed) return least === greatest ? [[0.5, figure(least)]] : [0, 0.5, 1].map(share => [share, figure(least + share * (greatest - least))]);
  const own = edges[0], every = Math.ceil(own.length / 5);
  return own.flatMap((edge, at): [number, string][] => (at % every === 0 || at === own.length - 1 ? [[at / (own.length - 1), figure(edge)]] : []));
}

function paint(canvas: HTMLCanvasElement, of: HistogramView, chosen: number): void {
  const width = canvas.clientWidth, ratio = devicePixelRatio, pen = canvas.getContext("2d")!;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  pen.scale(ratio, ratio);
  const scale = scaleOf(of), inside = HEIGHT - TOP - BOTTOM, wide = mapWidth(width) / of.steps.length;
  const y = (share: number) => TOP + inside * (1 - share);
  const box = (step: number, bin: number, x: number, length: number) => {
    const top = y(scale.height(step, bin + 1)), bottom = y(scale.height(step, bin)), thick = Math.max(2, bottom - top);
    pen.fillRect(x, (top + bottom - thick) / 2, length, thick);
  };
  of.counts.forEach((counts, step) => {
    const most = Math.max(...counts);
    counts.forEach((count, bin) => {
      if (!count) return;
      pen.fillStyle = faint("water", 0.08 + 0.87 * Math.sqrt(count / most));
      box(step, bin, LEFT + step * wide, Math.max(1, wide - (wide > 4 ? 1 : 0)));
    });
  });
  const bars = LEFT + mapWidth(width) + GAP, most = Math.max(...of.counts[chosen]);
  pen.fillStyle = color("water");
  of.counts[chosen].forEach((count, bin) => count && box(chosen, bin, bars, Math.max(1, (barsWidth(width) * count) / most)));
  pen.strokeStyle = color("ink");
  pen.strokeRect(LEFT + chosen * wide - 0.5, TOP - 0.5, wide + 0.5, inside + 1);
  pen.strokeStyle = color("line");
  pen.strokeRect(bars - 0.5, TOP, 0, inside);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = color("soft");
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [share, text] of ticksOf(of, scale)) pen.fillText(text, LEFT - 5, Math.min(y(0) - 5, Math.max(TOP + 5, y(share))));
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  pen.fillText(figure(of.steps[0]), LEFT, HEIGHT - 3);
  pen.fillText(`step ${figure(of.steps[chosen])}`, bars, HEIGHT - 3);
  pen.textAlign = "right";
  if (of.steps.length > 1) pen.fillText(figure(of.steps[of.steps.length - 1]), LEFT + mapWidth(width), HEIGHT - 3);
}

/* In words, where most values of a step are. */
function told(of: HistogramView, step: number): string {
  const counts = of.counts[step], edges = of.edges[step], bin = counts.indexOf(Math.max(...counts));
  const from = edges[bin], to = edges[bin + 1] - (of.whole_numbers ? 1 : 0);
  return `${figure(counts[bin])} of ${figure(total(counts))} are ${from === to ? figure(from) : `${figure(from)} to ${figure(to)}`}`;
}

export function Distribution({ of }: { of: HistogramView }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, look] = useState<number | null>(null);
  const last = of.steps.length - 1, chosen = Math.min(over ?? last, last);
  const draw = () => { if (canvas.current?.clientWidth) paint(canvas.current, of, chosen); };
  const latest = useRef(draw);
  latest.current = draw;
  useEffect(draw, [of, chosen]);
  useRepaint(draw);
  useEffect(() => {
    const sizes = new ResizeObserver(() => latest.current());
    sizes.observe(canvas.current!);
    return () => sizes.disconnect();
  }, []);
  const point = (event: MouseEvent) => {
    const at = Math.floor(((event.offsetX - LEFT) / mapWidth(canvas.current!.clientWidth)) * of.steps.length);
    look(at >= 0 && at <= last ? at : null);
  };
  const move = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") look(null);
    if (!by) return;
    event.preventDefault();
    look(Math.max(0, Math.min(last, chosen + by)));
  };
  const words = told(of, chosen);
  return (
    <figure class="distribution" tabIndex={0} onKeyDown={move}>
      <figcaption title={of.meaning}><b>{of.key}</b><small> {of.unit}</small><span class="told">{words}</span></figcaption>
      <canvas ref={canvas} role="img" aria-label={`Distribution of ${of.key} in step ${figure(of.steps[chosen])}: ${words}`} style={{ height: `${HEIGHT}px` }}
        onMouseMove={point} onMouseLeave={() => look(null)} />
    </figure>
  );
}

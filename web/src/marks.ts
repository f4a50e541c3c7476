/* Events of a job that are worth a mark on its curves. */
import type { Points } from "./curves";
import { oneLine } from "./format";
import type { Axis, Mark } from "./parts/chart";
import type { Event, EventKind } from "./rest";

const COLORS: Partial<Record<EventKind, string>> = {
  "checkpoint.saved": "good", "training.warning": "warm", "member.out": "warm", "trainer.left": "warm", "job.rewound": "bad", "trainer.lost": "bad",
  "trainer.out_of_memory": "bad", "publication.failed": "bad", "checkpoint.failed": "bad",
};
/* Most marks of one chart: the newest. */
const MOST = 200;

/* The marks: at the step that the event names, else at the one that was trained last when it happened. */
export function marksOf(events: Event[], points: Points, axis: Axis): Mark[] {
  const xs = axis === "step" ? points.steps : axis === "time" ? points.time_s : points.tokens;
  return events.filter(event => COLORS[event.kind as EventKind]).slice(-MOST).flatMap(event => {
    const { step } = event.data as { step?: unknown };
    const next = typeof step === "number" ? points.steps.findIndex(each => each > step) : points.time_s.findIndex(time => time > event.time_s);
    const at = next < 0 ? xs.length - 1 : next - 1;
    if (at < 0) return [];
    return [{ x: axis === "time" ? event.time_s : xs[at], text: oneLine(event.message).slice(0, 120), color: COLORS[event.kind as EventKind]! }];
  });
}

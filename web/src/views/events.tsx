/* The events of a job, the newest first. */
import { useState } from "preact/hooks";

import { clock, figure } from "../format";
import { VirtualList } from "../parts/list";
import { Empty } from "../parts/small";
import type { Event, EventKind } from "../rest";

const BAD: EventKind[] = [
  "trainer.lost", "trainer.out_of_memory", "member.failed", "member.out", "lease.expired", "prompt.dropped", "group.dropped",
  "publication.failed", "checkpoint.failed", "tracker.failed", "report.failed", "training.warning",
];
const isBad = (event: Event) => (BAD as string[]).includes(event.kind);

export function Events({ events }: { events: Event[] }) {
  const [text, search] = useState("");
  const [bad, only] = useState(false);
  const shown = events.filter(event =>
    (!bad || isBad(event)) && `${event.kind} ${event.message}`.toLowerCase().includes(text.toLowerCase())).reverse();
  return (
    <>
      <div class="bar">
        <input type="search" aria-label="Search events" placeholder="Search events" value={text} onInput={e => search(e.currentTarget.value)} />
        <label class="inline"><input type="checkbox" checked={bad} onChange={e => only(e.currentTarget.checked)} /> only trouble</label>
        <small>{figure(shown.length)} of the newest {figure(events.length)}</small>
      </div>
      {!shown.length && <Empty>No events.</Empty>}
      <VirtualList count={shown.length} rowHeight={26} label="Events" class="events" row={index => {
        const event = shown[index];
        return (
          <div class="row event" key={event.id} role="listitem" title={event.message}>
            <time>{clock(event.time_s)}</time><small class={isBad(event) ? "failed" : ""}>{event.kind}</small><span>{event.message}</span>
          </div>
        );
      }} />
    </>
  );
}

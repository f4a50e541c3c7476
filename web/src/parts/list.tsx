/* A list of any length: only the rows in view are in the document. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface Props {
  count: number;
  rowHeight: number;
  row: (index: number) => ComponentChildren;
  label: string;
  role?: "list" | "listbox";
  /* Called when the last rows come into view. */
  onEnd?: () => void;
  class?: string;
}

const BEYOND = 8;

export function VirtualList({ count, rowHeight, row, label, role = "list", onEnd, class: name = "" }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  useEffect(() => {
    const found = box.current!;
    const look = () => setView({ top: found.scrollTop, height: found.clientHeight });
    const sizes = new ResizeObserver(look);
    sizes.observe(found);
    found.addEventListener("scroll", look, { passive: true });
    look();
    return () => { sizes.disconnect(); found.removeEventListener("scroll", look); };
  }, []);
  const first = Math.max(0, Math.floor(view.top / rowHeight) - BEYOND);
  const last = Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + BEYOND);
  useEffect(() => { if (last >= count) onEnd?.(); }, [last, count]);
  const rows = [];
  for (let index = first; index < last; index += 1) rows.push(row(index));
  return (
    <div ref={box} class={`rows ${name}`} role={role} aria-label={label} tabIndex={0}>
      <div style={{ height: `${count * rowHeight}px`, position: "relative" }} role="presentation">
        <div style={{ transform: `translateY(${first * rowHeight}px)` }} role="presentation">{rows}</div>
      </div>
    </div>
  );
}

/* Small parts of several views. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { figure } from "../format";

export const State = ({ of }: { of: string }) => <span class={`state s-${of}`}>{of}</span>;

export function Figure({ name, value, title }: { name: string; value: ComponentChildren; title?: string }) {
  return <div class="figure" title={title}><b>{value}</b><small>{name}</small></div>;
}

export function Progress({ done, of }: { done: number; of: number }) {
  const share = of ? Math.min(1, done / of) : 0;
  return (
    <div class="progress" role="progressbar" aria-label="steps trained" aria-valuemin={0} aria-valuemax={of || 1} aria-valuenow={done}
      title={`${figure(done)} of ${of ? figure(of) : "?"} steps`}>
      <span style={{ width: `${100 * share}%` }} />
    </div>
  );
}

interface DialogProps { title: string; onClose: () => void; children: ComponentChildren; wide?: boolean }
/* A modal dialog. Escape and a click beside it close it. */
export function Dialog({ title, onClose, children, wide = false }: DialogProps) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => { box.current!.showModal(); }, []);
  return (
    <dialog ref={box} class={wide ? "wide" : ""} aria-label={title} onClose={onClose}
      onClick={event => { if (event.target === box.current) box.current!.close(); }}>
      <h2>{title}</h2>
      {children}
    </dialog>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

interface ChoiceProps<T extends string> { label: string; of: readonly T[]; chosen: T; choose: (value: T) => void }
export function Choice<T extends string>({ label, of, chosen, choose }: ChoiceProps<T>) {
  return (
    <div class="choice" role="group" aria-label={label}>
      {of.map(each => (
        <button key={each} type="button" aria-pressed={each === chosen} onClick={() => choose(each)}>{each}</button>
      ))}
    </div>
  );
}

/* What every view shares: the route, the theme, polling, problems. */
import { useEffect, useRef, useState } from "preact/hooks";

import { isReport } from "./api";

/* The route is the hash: #/job/ID/tab. A bare #ID is an address of earlier releases. */
export function route(): string[] {
  const parts = location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
  return parts[0]?.startsWith("job-") ? ["job", ...parts] : parts;
}

export const go = (...parts: string[]): void => { location.hash = `#/${parts.map(encodeURIComponent).join("/")}`; };
export const link = (...parts: string[]): string => `#/${parts.map(encodeURIComponent).join("/")}`;

export function useRoute(): string[] {
  const [found, set] = useState(route);
  useEffect(() => {
    const changed = () => set(route());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return found;
}

/* What this browser keeps; a report in another page's frame may have no storage. */
const storage: Storage | null = (() => { try { return localStorage; } catch { return null; } })();

/* Theme: that of the system until the person chooses. */
export type Theme = "system" | "light" | "dark";
const THEME = "theme";
export const theme = (): Theme => (storage?.getItem(THEME) as Theme | null | undefined) ?? "system";

export function setTheme(chosen: Theme): void {
  if (chosen === "system") storage?.removeItem(THEME);
  else storage?.setItem(THEME, chosen);
  document.documentElement.dataset.theme = chosen;
  repaint();
}

const painters = new Set<() => void>();
const repaint = () => painters.forEach(paint => paint());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.documentElement.dataset.theme = theme();

/* Calls `paint` when colours change; what is drawn on a canvas does not follow a style sheet. */
export function useRepaint(paint: () => void): void {
  const kept = useRef(paint);
  kept.current = paint;
  useEffect(() => {
    const run = () => kept.current();
    painters.add(run);
    return () => { painters.delete(run); };
  }, []);
}

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);
/* Asks every chart of the view to be drawn, waits until all are, and prints in light colours. */
const SHOW_ALL = "show-all", LONGEST_MS = 15_000;
let shownAll = false;
/* Calls `call` with true before the page is printed, at once if that is so already, and with false after it. */
export const onShowAll = (call: (shown: boolean) => void): (() => void) => {
  const listen = () => call(shownAll);
  if (shownAll) listen();
  addEventListener(SHOW_ALL, listen);
  return () => removeEventListener(SHOW_ALL, listen);
};
const showAll = (shown: boolean) => { shownAll = shown; dispatchEvent(new Event(SHOW_ALL)); };
export async function printAll(): Promise<void> {
  const before = document.documentElement.dataset.theme;
  showAll(true);
  for (let waited = 0; waited < LONGEST_MS; waited += 100) {
    await new Promise(done => setTimeout(done, 100));
    if (![...document.querySelectorAll<HTMLElement>(".chart.waiting")].some(each => each.checkVisibility())) break;
  }
  document.documentElement.dataset.theme = "light";
  repaint();
  print();
  document.documentElement.dataset.theme = before;
  repaint();
  showAll(false);
}

/* A colour of the style sheet, `--name`, as the canvas takes it. */
export function color(name: string): string {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
export function faint(name: string, share: number): string {
  return color(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);
}

/* The problem that the banner shows. */
let tell: (error: Error | null) => void = () => {};
export const problem = (error: Error | null): void => tell(error);
export function useProblem(): [Error | null, (error: Error | null) => void] {
  const [found, set] = useState<Error | null>(null);
  tell = set;
  return [found, set];
}

/* What `ask` answers, asked again every `everyMs`; slower where answers take long, not at all while the page is hidden. */
export function usePolled<T>(ask: (signal: AbortSignal) => Promise<T>, everyMs: number, of: unknown[]): [T | null, () => void] {
  const [found, set] = useState<T | null>(null);
  const again = useRef<() => void>(() => {});
  useEffect(() => {
    const aborted = new AbortController();
    let timer = 0, asked = false;
    const look = async () => {
      clearTimeout(timer);
      if (asked) return;
      asked = true;
      const began = performance.now();
      if (!document.hidden) {
        try {
          const answer = await ask(aborted.signal);
          if (aborted.signal.aborted) return;
          set(answer);
          problem(null);
        } catch (error) {
          if (aborted.signal.aborted) return;
          problem(error as Error);
        }
      }
      asked = false;
      if (isReport()) return;
      timer = window.setTimeout(look, Math.max(everyMs, 5 * (performance.now() - began)));
    };
    again.current = look;
    const seen = () => { if (!document.hidden) void look(); };
    document.addEventListener("visibilitychange", seen);
    set(null);
    void look();
    return () => { aborted.abort(); clearTimeout(timer); document.removeEventListener("visibilitychange", seen); };
  }, of);
  return [found, () => again.current()];
}

/* A value as it was when it had not changed for a while: what is costly is drawn once, not for every letter. */
export function useSettled<T>(value: T, afterMs = 150): T {
  const [found, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), afterMs);
    return () => clearTimeout(timer);
  }, [value]);
  return found;
}

/* A value that is kept in this browser. */
export function useKept<T>(name: string, first: T): [T, (value: T) => void] {
  const [found, set] = useState<T>(() => {
    const kept = storage?.getItem(name) ?? null;
    return kept === null ? first : (JSON.parse(kept) as T);
  });
  return [found, value => { storage?.setItem(name, JSON.stringify(value)); set(value); }];
}

/* Requests to the coordinator's REST API, with its token. */
import type { Event, Mistake, Problem } from "./rest";

export class Refused extends Error {
  constructor(readonly problem: Partial<Problem>, readonly status: number) {
    const { detail = "The request failed.", fix = "" } = problem;
    super(fix ? `${detail} Fix: ${fix}` : detail);
  }
  get mistakes(): Mistake[] {
    return this.problem.mistakes ?? [];
  }
}

/* Nobody answers at the page's own address. */
export class Unreachable extends Error {
  constructor() {
    super(`The coordinator does not answer at ${location.origin}. What is shown may be old; the page goes on asking. Fix: see whether it runs, and whether this computer reaches it.`);
  }
}

const TOKEN = "token";
let declined = false;
let asking: Promise<string | null> | null = null;
let ask: () => Promise<string | null> = async () => null;

/* Names the function that asks the person for the token. */
export function asksWith(given: () => Promise<string | null>): void {
  ask = given;
}

/* Whether there is another token than the one that was refused. Several requests may be refused at the same time: the
   person is asked once. Somebody who enters no token is not asked again until the page is loaded again. */
async function hasAnother(refused: string | null): Promise<boolean> {
  if (sessionStorage.getItem(TOKEN) !== refused) return true;
  if (declined) return false;
  asking ??= ask().finally(() => { asking = null; });
  const given = await asking;
  if (given) sessionStorage.setItem(TOKEN, given);
  else declined = true;
  return Boolean(given);
}

export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
  const answer = await fetch(path, { ...options, headers }).catch(error => {
    throw error instanceof TypeError ? new Unreachable() : error; // fetch fails with a TypeError if there is no answer
  });
  if (answer.status === 401 && (await hasAnother(token))) return request(path, options);
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({ detail: `${answer.status} ${answer.statusText}` }));
    throw new Refused(problem, answer.status);
  }
  return answer;
}

/* Answers to `get` that a file carries: a report asks no coordinator. */
let carried: ((path: string) => unknown) | null = null;
export function answersFrom(file: (path: string) => unknown): void {
  carried = file;
}
/* Whether this is a report: it shows what it carries, and nothing can be asked or changed. */
export const isReport = (): boolean => carried !== null;

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  if (carried) return carried(path) as T;
  return (await request(path, { signal })).json();
}

/* The address of an image that a path answers, for `src`: of a blob, as `src` itself sends no token. Who asks revokes it. */
export async function picture(path: string, signal: AbortSignal): Promise<string> {
  if (carried) return carried(path) as string;
  return URL.createObjectURL(await (await request(path, { signal })).blob());
}

export async function send<T>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T> {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return (await request(path, { method, ...content })).json();
}

export const query = (fields: Record<string, string | number | string[] | null | undefined>): string => {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (Array.isArray(value)) value.forEach(each => found.append(name, each));
    else if (value !== null && value !== undefined && value !== "") found.set(name, String(value));
  }
  return found.size ? `?${found}` : "";
};

const sleep = (ms: number) => new Promise(done => setTimeout(done, ms));
export const EVENTS_SHOWN = 2000;

/* Calls `onEvents` with the job's events until `signal`; after the end of the job it looks whether it was resumed.
   EventSource cannot send a token, so the stream is read with fetch. */
export async function follow(
  job: string, signal: AbortSignal, onEvents: (events: Event[]) => void, onProblem: (error: Error) => void,
): Promise<void> {
  let last = "";
  while (!signal.aborted) {
    try {
      const headers: HeadersInit = last ? { "Last-Event-ID": last } : {};
      const path = `/v1/jobs/${job}/events${last ? "" : `?newest=${EVENTS_SHOWN}`}`;
      const answer = await request(path, { signal, headers });
      const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const frames = (text + part.value).split("\n\n");
        text = frames.pop()!;
        const found = frames.flatMap(frame => frame.split("\n").filter(line => line.startsWith("data: ")))
          .map(line => JSON.parse(line.slice(6)) as Event);
        if (found.length) {
          last = found[found.length - 1].id;
          onEvents(found);
        }
      }
    } catch (error) {
      if (!signal.aborted) onProblem(error as Error);
    }
    await sleep(2000);
  }
}

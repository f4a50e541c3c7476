/* The page: its frame, and which view the address names. */
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";

import { asksWith } from "./api";
import { Dialog } from "./parts/small";
import { link, setTheme, theme, useProblem, useRoute, type Theme } from "./state";
import { Compare } from "./views/compare";
import { Fleet } from "./views/fleet";
import { Job } from "./views/job";
import { Jobs } from "./views/jobs";
import { Submit } from "./views/submit";

const THEMES: Theme[] = ["system", "light", "dark"];
const MARKS = { system: "◐", light: "☀", dark: "☾" };

function View({ path }: { path: string[] }) {
  const [first, id, tab] = path;
  if (first === "job" && id) return <Job key={id} id={id} tab={tab ?? "metrics"} more={path.slice(3)} />;
  if (first === "compare" && id) return <Compare key={id} ids={id.split(",")} />;
  if (first === "submit") return <Submit key={id ?? ""} from={id} />;
  if (first === "fleet") return <Fleet />;
  return <Jobs />;
}

function TokenDialog({ done }: { done: (token: string | null) => void }) {
  const [value, set] = useState("");
  const enter = (event: SubmitEvent) => { event.preventDefault(); done(value || null); };
  return (
    <Dialog title="The coordinator asks for its token" onClose={() => done(null)}>
      <form onSubmit={enter}>
        <label>MILLRACE_TOKEN
          <input type="password" name="token" autocomplete="current-password" value={value} onInput={e => set(e.currentTarget.value)} />
        </label>
        <div class="buttons"><button type="submit" class="main">Enter</button></div>
      </form>
    </Dialog>
  );
}

function Page() {
  const path = useRoute();
  const [chosen, choose] = useState(theme);
  const [problem, setProblem] = useProblem();
  const [asking, ask] = useState<{ done: (token: string | null) => void } | null>(null);
  asksWith(() => new Promise(done => ask({ done: token => { ask(null); done(token); } })));
  useEffect(() => { setProblem(null); }, [path.join("/")]);
  const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  const here = path[0] === "fleet" ? "fleet" : "jobs";
  return (
    <>
      <header>
        <a class="brand" href={link("jobs")}>Millrace</a>
        <nav aria-label="Views">
          <a href={link("jobs")} aria-current={here === "jobs" ? "page" : undefined}>Jobs</a>
          <a href={link("fleet")} aria-current={here === "fleet" ? "page" : undefined}>Fleet</a>
          <a href="/docs">API</a>
        </nav>
        <button type="button" class="plain" title={`Colours: ${chosen}`} aria-label={`Colours: ${chosen}; change to ${next}`}
          onClick={() => { setTheme(next); choose(next); }}>{MARKS[chosen]}</button>
      </header>
      {problem && <p class="problem" role="alert">{problem.message}<button type="button" class="plain" aria-label="Close" onClick={() => setProblem(null)}>×</button></p>}
      <main><View path={path} /></main>
      {asking && <TokenDialog done={asking.done} />}
    </>
  );
}

render(<Page />, document.getElementById("page")!);

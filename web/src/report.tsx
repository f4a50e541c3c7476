/* The report of a job: what the page shows of it, from the data that the file carries. */
import { render } from "preact";

import { answersFrom } from "./api";
import { moment } from "./format";
import { Empty } from "./parts/small";
import type { BandView, GroupPage, HistogramView, JobReport, SeriesView } from "./rest";
import { useProblem } from "./state";
import { Diagnosis } from "./views/diagnosis";
import { Events } from "./views/events";
import { Member } from "./views/fleet";
import { Head } from "./views/job";
import { Metrics } from "./views/metrics";
import { Records } from "./views/records";
import { Samples } from "./views/samples";
import { Spec } from "./views/spec";

const report: JobReport = JSON.parse(document.getElementById("report")!.textContent!);

/* The places of the steps that a view has zoomed to. */
function within(steps: number[], asked: URLSearchParams): number[] {
  const first = Number(asked.get("first") ?? 0), last = Number(asked.get("last") ?? Infinity);
  return steps.flatMap((step, at) => (first <= step && step <= last ? [at] : []));
}

function series(asked: URLSearchParams): SeriesView {
  const { steps, time_s, tokens, metrics } = report.series, at = within(steps, asked);
  const pick = <T,>(values: T[]): T[] => (values.length ? at.map(each => values[each]) : []);
  const band = ({ mean, least, greatest }: BandView): BandView => ({ mean: pick(mean), least: pick(least), greatest: pick(greatest) });
  const wanted = asked.getAll("keys").filter(key => key in metrics);
  return {
    steps: pick(steps), time_s: pick(time_s), tokens: pick(tokens),
    metrics: Object.fromEntries(wanted.map(key => [key, band(metrics[key])])),
  };
}

function histograms(asked: URLSearchParams): HistogramView[] {
  return report.histograms.flatMap(each => {
    const at = within(each.steps, asked);
    return at.length ? [{ ...each, steps: at.map(n => each.steps[n]), edges: at.map(n => each.edges[n]), counts: at.map(n => each.counts[n]) }] : [];
  });
}

function groups(): GroupPage {
  return { groups: report.groups, next: null, total: report.groups.reduce((sum, group) => sum + group.samples.length, 0) };
}

/* What the coordinator would answer, by the end of the path. */
const ANSWERS: Record<string, (asked: URLSearchParams) => unknown> = {
  "metrics/keys": () => report.keys, series, histograms, groups,
  diagnosis: () => report.diagnosis, ledger: () => report.ledger, publications: () => report.publications, spec: () => report.spec,
};
const IMAGE = /^prompts\/[^/]+\/images\/\d+$/;
function image(asked: URLSearchParams): string {
  const digest = asked.get("sha256") ?? "", found = report.images[digest];
  if (!found) throw new Error(report.missing_images[digest] ?? "The report does not have it.");
  return found;
}

const OWN = `/v1/jobs/${report.job.id}/`;
answersFrom(path => {
  const [name, asked] = path.split("?");
  const own = name.startsWith(OWN) ? name.slice(OWN.length) : "";
  const answer = IMAGE.test(own) ? image : ANSWERS[own];
  if (!answer) throw new Error(`A report has no answer to ${path}.`);
  return answer(new URLSearchParams(asked));
});

function Report() {
  const [problem] = useProblem();
  const { job, last, events } = report, members = [...report.fleet.trainers, ...report.fleet.replicas];
  return (
    <>
      <header><b class="brand">Millrace</b><small>As of {moment(report.time_s)}</small></header>
      {problem && <p class="problem" role="alert">{problem.message}</p>}
      <main>
        <Head job={job} last={last} />
        <section aria-label="Metrics"><Metrics job={job} last={last} events={events} /></section>
        {report.diagnosis && <Diagnosis job={job} />}
        {report.groups.length > 0 && <section aria-label="Samples"><h1>Samples</h1><Samples job={job} /></section>}
        <section aria-label="Records"><h1>Records</h1><Records job={job} events={events} /></section>
        <section aria-label="Events"><h1>Events</h1><Events events={events} /></section>
        <section aria-label="Job spec"><h1>Job spec</h1><Spec id={job.id} version={job.state} /></section>
        <section aria-label="Fleet">
          <h1>Fleet <small>all members of the coordinator</small></h1>
          {!members.length && <Empty>No trainers or replicas are connected.</Empty>}
          <div role="list">{members.map(member => <Member key={member.id} of={member} />)}</div>
        </section>
      </main>
    </>
  );
}

render(<Report />, document.getElementById("page")!);

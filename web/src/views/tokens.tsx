/* The tokens of a group, coloured by their log-probability, by their version, or by whether they were sampled. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api";
import { figure } from "../format";
import { Choice, Empty } from "../parts/small";
import type { SampleView, TokensView } from "../rest";
import { COLORS } from "./compare";
import { Facts } from "./samples";

const BY = ["log-probability", "version", "sampled"] as const;
type By = (typeof BY)[number];
const MOST = 6000;
/* Nats at which a token has the full colour. */
const UNLIKELY = 5;

interface Props { job: string; record: string; samples: SampleView[]; average: number | null; several: boolean }

export function Tokens({ job, record, samples, average, several }: Props) {
  const [found, set] = useState<TokensView[] | Error | null>(null);
  const [by, choose] = useState<By>("log-probability");
  useEffect(() => { get<TokensView[]>(`/v1/jobs/${job}/tokens/${record}`).then(set, set); }, [job, record]);
  if (found === null) return <Empty>…</Empty>;
  if (found instanceof Error) return <Empty>{found.message}</Empty>;
  return (
    <>
      <div class="bar"><Choice label="Colour by" of={BY} chosen={by} choose={choose} /><Key by={by} all={found} /></div>
      {found[0] && !found[0].texts && <p class="soft">The tokenizer is not on the coordinator's host: tokens are shown as their ids.</p>}
      {found.map((tokens, at) => (
        <section key={at} class="answer" aria-label={`Tokens of answer ${at + 1}`}>
          {samples[at] && <Facts number={at + 1} sample={samples[at]} average={average} several={several} />}
          <Strip tokens={tokens} by={by} />
        </section>
      ))}
    </>
  );
}

function Key({ by, all }: { by: By; all: TokensView[] }) {
  if (by === "log-probability") return <span class="key"><span><i style={shade("warm", 0.15)} />likely</span><span><i style={shade("warm", 0.8)} />{-UNLIKELY} nats or less</span><span class="t-given">given</span></span>;
  if (by === "sampled") return <span class="key"><span><i style={shade("water", 0.35)} />sampled</span><span class="t-given">given</span></span>;
  const versions = [...new Set(all.flatMap(each => each.versions))].filter(version => version !== null).sort((a, b) => a - b);
  return <span class="key">{versions.map(version => <span key={version}><i style={shade(hue(version), 0.45)} />version {version}</span>)}<span class="t-given">given</span></span>;
}

const hue = (version: number) => COLORS[version % COLORS.length];
const shade = (name: string, share: number) => ({ background: `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)` });

function Strip({ tokens, by }: { tokens: TokensView; by: By }) {
  const start = tokens.prompt_tokens, ids = tokens.ids.slice(start, start + MOST);
  const style = (at: number) => {
    const logprob = tokens.logprobs[at], version = tokens.versions[at];
    if (logprob === null) return undefined;
    if (by === "sampled") return shade("water", 0.3);
    if (by === "version") return version === null ? undefined : shade(hue(version), 0.4);
    const value = typeof logprob === "number" ? logprob : -Infinity;
    return shade("warm", 0.08 + 0.72 * Math.min(1, -value / UNLIKELY));
  };
  return (
    <pre class="tokens">
      {ids.map((id, offset) => {
        const at = start + offset, logprob = tokens.logprobs[at];
        const text = tokens.texts ? tokens.texts[at] : `${id} `;
        const told = logprob === null ? `given · id ${id}` : `${figure(logprob)} nats · version ${tokens.versions[at]} · id ${id}`;
        return <span key={at} class={logprob === null ? "t-given" : ""} style={style(at)} title={told}>{text}</span>;
      })}
      {tokens.ids.length - start > MOST && <em> … {figure(tokens.ids.length - start - MOST)} more tokens</em>}
    </pre>
  );
}

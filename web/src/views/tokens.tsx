/* The tokens of a group, coloured by their log-probability, by how far engine and trainer differ there, by their
   advantage, by their version, or by whether they were sampled. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api";
import { figure, signed } from "../format";
import { Choice, Empty } from "../parts/small";
import type { SampleView, TokensView } from "../rest";
import { COLORS } from "./compare";
import { Facts } from "./samples";

const BY = ["log-probability", "engine − trainer", "advantage", "version", "sampled"] as const;
type By = (typeof BY)[number];
const MOST = 6000;
/* Nats at which a token has the full colour: of its log-probability, and of the gap between engine and trainer. */
const UNLIKELY = 5;
const APART = 0.5;
const FULL = 0.55;
/* The colours of values above and below 0. */
const SIDES: Partial<Record<By, [string, string]>> = { "engine − trainer": ["warm", "water"], advantage: ["good", "bad"] };

interface Props { job: string; record: string; samples: SampleView[]; average: number | null; several: boolean }

export function Tokens({ job, record, samples, average, several }: Props) {
  const [found, set] = useState<TokensView[] | Error | null>(null);
  const [by, choose] = useState<By>("log-probability");
  useEffect(() => { get<TokensView[]>(`/v1/jobs/${job}/tokens/${record}`).then(set, set); }, [job, record]);
  if (found === null) return <Empty>…</Empty>;
  if (found instanceof Error) return <Empty>{found.message}</Empty>;
  const known = BY.filter(way => !SIDES[way] || found.some(tokens => (way === "advantage" ? tokens.advantages : tokens.trainer_logprobs).length));
  const most = by === "advantage" ? Math.max(...found.map(mostOf)) : APART;
  return (
    <>
      <div class="bar"><Choice label="Colour by" of={known} chosen={by} choose={choose} /><Key by={by} all={found} most={most} /></div>
      {found[0] && !found[0].texts && <p class="soft">The tokenizer is not on the coordinator's host: tokens are shown as their ids.</p>}
      {found.map((tokens, at) => (
        <section key={at} class="answer" aria-label={`Tokens of answer ${at + 1}`}>
          {samples[at] && <Facts number={at + 1} sample={samples[at]} average={average} several={several} />}
          <Strip tokens={tokens} by={by} most={most} />
        </section>
      ))}
    </>
  );
}

const finite = (value: number | string | null | undefined) => (typeof value === "number" ? value : null);
const mostOf = (tokens: TokensView) => tokens.advantages.reduce<number>((most, value) => Math.max(most, Math.abs(finite(value) ?? 0)), 0);

function gapAt(tokens: TokensView, at: number): number | null {
  const engine = finite(tokens.logprobs[at]), trainer = finite(tokens.trainer_logprobs[at]);
  return engine === null || trainer === null ? null : engine - trainer;
}

/* What is known of a token, for people. */
function toldOf(tokens: TokensView, at: number): string {
  const id = `id ${tokens.ids[at]}`, gap = gapAt(tokens, at), advantage = finite(tokens.advantages[at]);
  if (tokens.logprobs[at] === null) return `given · ${id}`;
  const trained = [gap !== null && `trainer ${figure(tokens.trainer_logprobs[at])} (${signed(gap)})`, advantage !== null && `advantage ${signed(advantage)}`];
  return [`${figure(tokens.logprobs[at])} nats`, ...trained, `version ${tokens.versions[at]}`, id].filter(Boolean).join(" · ");
}

function Key({ by, all, most }: { by: By; all: TokensView[]; most: number }) {
  const sides = SIDES[by];
  if (sides) {
    const unit = (side: number) => (by === "advantage" ? "" : ` nats or ${side ? "less" : "more"}`);
    return <span class="key">{[most, -most].map((value, side) => <span key={side}><i style={shade(sides[side], FULL)} />{signed(value)}{unit(side)}</span>)}<span class="t-given">given</span></span>;
  }
  if (by === "log-probability") return <span class="key"><span><i style={shade("warm", 0.15)} />likely</span><span><i style={shade("warm", 0.8)} />{-UNLIKELY} nats or less</span><span class="t-given">given</span></span>;
  if (by === "sampled") return <span class="key"><span><i style={shade("water", 0.35)} />sampled</span><span class="t-given">given</span></span>;
  const versions = [...new Set(all.flatMap(each => each.versions))].filter(version => version !== null).sort((a, b) => a - b);
  return <span class="key">{versions.map(version => <span key={version}><i style={shade(hue(version), 0.45)} />version {version}</span>)}<span class="t-given">given</span></span>;
}

const hue = (version: number) => COLORS[version % COLORS.length];
const shade = (name: string, share: number) => ({ background: `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)` });

function Strip({ tokens, by, most }: { tokens: TokensView; by: By; most: number }) {
  const start = tokens.prompt_tokens, ids = tokens.ids.slice(start, start + MOST);
  const style = (at: number) => {
    const logprob = tokens.logprobs[at], version = tokens.versions[at];
    if (logprob === null) return undefined;
    const sides = SIDES[by];
    if (sides) {
      const value = by === "advantage" ? finite(tokens.advantages[at]) : gapAt(tokens, at);
      return value ? shade(sides[value > 0 ? 0 : 1], FULL * Math.min(1, Math.abs(value) / most)) : undefined;
    }
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
        return <span key={at} class={logprob === null ? "t-given" : ""} style={style(at)} title={toldOf(tokens, at)}>{text}</span>;
      })}
      {tokens.ids.length - start > MOST && <em> … {figure(tokens.ids.length - start - MOST)} more tokens</em>}
    </pre>
  );
}

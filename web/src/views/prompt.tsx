/* The prompt of a group: its text, with the pictures where they stand in it. */
import { useEffect, useState } from "preact/hooks";

import { picture } from "../api";
import { bytes } from "../format";
import type { ImageView, SampleView } from "../rest";

export function Prompt({ job, sample }: { job: string; sample: SampleView }) {
  const { prompt, images, image_mark: mark } = sample;
  const texts = mark ? prompt.split(mark) : [prompt];
  const placed = texts.length === images.length + 1;
  const shown = images.map((image, at) => <Picture key={`${image.sha256} ${at}`} job={job} prompt={sample.prompt_id} number={at + 1} image={image} />);
  if (!images.length) return <pre class="prompt">{prompt}</pre>;
  return (
    <>
      <pre class="prompt with-pictures">{placed ? texts.flatMap((text, at) => (at ? [shown[at - 1], text] : [text])) : prompt}</pre>
      {!placed && <div class="pictures">{shown}</div>}
    </>
  );
}

interface PictureProps { job: string; prompt: string; number: number; image: ImageView }
function Picture({ job, prompt, number, image }: PictureProps) {
  const [found, set] = useState<string | Error | null>(null);
  useEffect(() => {
    if (!image.media_type) return;
    const stop = new AbortController();
    let url = "";
    picture(`/v1/jobs/${job}/prompts/${prompt}/images/${number}?sha256=${image.sha256}`, stop.signal).then(
      made => { if (stop.signal.aborted) URL.revokeObjectURL(made); else set(url = made); },
      error => { if (!stop.signal.aborted) set(error as Error); },
    );
    return () => { stop.abort(); if (url.startsWith("blob:")) URL.revokeObjectURL(url); };
  }, [job, prompt, number, image.sha256]);
  const told = [image.media_type.split("/")[1]?.toUpperCase(), image.width !== null && `${image.width} × ${image.height}`, bytes(image.bytes)];
  const why = image.media_type ? (found instanceof Error ? found.message : null) : "It is neither PNG, JPEG, WebP nor GIF, so it is not shown.";
  const img = typeof found === "string" && (
    <img src={found} alt={`Image ${number} of the prompt`} width={image.width ?? undefined} height={image.height ?? undefined}
      onError={() => set(new Error("The browser cannot read it."))} />
  );
  return (
    <span class="picture">
      {img && (found.startsWith("blob:") ? <a href={found} target="_blank" rel="noopener" title="Open it alone">{img}</a> : img)}
      {why && <span class="missing" role="note">{why}</span>}
      <small title={`Image ${number} of the prompt, sha256 ${image.sha256}`}>{told.filter(Boolean).join(" · ")}</small>
    </span>
  );
}

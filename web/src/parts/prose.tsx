/* Text of the project with `code` in it. */
export function Prose({ of }: { of: string }) {
  return <>{of.split(/(`[^`]+`)/).map((part, at) => (part.startsWith("`") && part.length > 1 ? <code key={at}>{part.slice(1, -1)}</code> : part))}</>;
}

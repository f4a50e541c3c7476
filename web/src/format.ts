/* Numbers, durations and times as people read them. */
import type { Coverage } from "./rest";

export function figure(value: number | string | null | undefined, digits = 3): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "string") return value; // Infinity, NaN
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}

export const signed = (value: number): string => `${value < 0 ? "−" : "+"}${figure(Math.abs(value))}`;

/* A held-out score. One that is not of every held-out prompt says so: 0.42 (107 of 256). */
export function heldOut(value: number | string | null | undefined, coverage: Coverage | null): string {
  const partial = coverage !== null && coverage.scored !== coverage.asked;
  return partial ? `${figure(value)} (${figure(coverage.scored)} of ${figure(coverage.asked)})` : figure(value);
}

const SIZES = ["", "k", "M", "G", "T", "P"];
/* 12,345,678 as 12.3M. */
export function short(value: number): string {
  let size = 0;
  while (Math.abs(value) >= 1000 && size < SIZES.length - 1) { value /= 1000; size += 1; }
  return `${size ? Number(value.toPrecision(3)) : figure(value)}${SIZES[size]}`;
}

export const bytes = (value: number): string => short(value).replace(/([kMGTP]?)$/, " $1B");

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0095) return `${figure(seconds * 1000, 2)} ms`;
  if (seconds < 60) return `${figure(seconds, 2)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (hours < 1) return `${minutes} min`;
  return days < 1 ? `${hours} h ${minutes % 60} min` : `${days} d ${hours % 24} h`;
}

export function ago(unix: number): string {
  const seconds = Math.max(0, Date.now() / 1000 - unix);
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export const clock = (unix: number): string => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const moment = (unix: number): string => new Date(unix * 1000).toLocaleString([], { hour12: false });
export const plural = (count: number, word: string): string => `${figure(count)} ${word}${count === 1 ? "" : "s"}`;
export const oneLine = (text: string): string => text.replace(/\s*\n\s*/g, " ");

/* ` · NAME`, of a job or member of another partition than the default one. */
export const inPartition = (of: { partition: string }): string => (of.partition && of.partition !== "default" ? ` · ${of.partition}` : "");

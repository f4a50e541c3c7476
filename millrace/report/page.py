"""The report as one HTML page."""

from millrace.report import tables
from millrace.report.contents import Contents
from millrace.report.markup import document
from millrace.report.sections import curves_section, head, samples_section

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --quiet: #5c6670; --line: #d8dee4; --back: #fff; --panel: #f6f8fa;
  --bad: #b3261e; --warn: #8a5a00; --c0: #0b63ce; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #0e7490;
  --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --quiet: #9aa4af; --line: #333a42; --back: #14171a;
  --panel: #1c2126; --bad: #ff8a80; --warn: #f0b64a; --c0: #6cb2ff; --c1: #ff9d66; --c2: #6bdc8b; --c3: #cf9bff;
  --c4: #67d5e8; --c5: #e7c35a; } }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 16px; }
h1 { margin: 8px 0 0; overflow-wrap: anywhere; } h2 { margin: 32px 0 8px; border-bottom: 1px solid var(--line); }
h3 { margin: 8px 0 4px; font-size: 1em; }
.quiet, .unit, dt { color: var(--quiet); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; } dt { font-size: .85em; }
.trouble { padding: 8px 12px; border-left: 4px solid var(--warn); background: var(--panel); white-space: pre-wrap;
  overflow-wrap: anywhere; } .failed { border-color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 8px; background: var(--panel); border-radius: 6px; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 8px; font-size: .85em; }
.name { font-weight: 600; overflow-wrap: anywhere; } .last { margin-left: auto; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
polyline { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; } .faint { opacity: .35; }
.band { fill: currentColor; opacity: .14; } .point { fill: currentColor; opacity: 0; }
.point:hover, .single { opacity: 1; } .broken { stroke: var(--bad); stroke-dasharray: 2 2; }
.grid { stroke: var(--line); } .tick { fill: var(--quiet); font-size: 10px; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .key::before { content: "■ "; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9em; }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; text-align: left; }
.right { text-align: right; font-variant-numeric: tabular-nums; }
details { margin: 6px 0; } summary { cursor: pointer; overflow-wrap: anywhere; unicode-bidi: isolate; }
.text { margin: 0 0 4px; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace;
  unicode-bidi: isolate; } .given { color: var(--quiet); } code { overflow-wrap: anywhere; unicode-bidi: isolate; }
@media print { details { break-inside: avoid; } }
"""


def report_page(contents: Contents) -> str:
    """The whole page. Texts of users and models are escaped; it loads nothing and runs nothing."""
    sections = (
        head(contents),
        curves_section(contents.metrics),
        tables.evaluations_section(contents.metrics),
        samples_section(contents.samples),
        tables.ledger_section(contents.ledger),
        tables.publications_section(contents.events),
        tables.checkpoints_section(contents.events),
        tables.fleet_section(contents.fleet),
        tables.events_section(contents.events),
        tables.spec_section(contents.job.spec),
    )
    return document(f"{contents.job.name}: Millrace", STYLE, [one for one in sections if one is not None])

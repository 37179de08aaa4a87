"""The style sheet. Colours of spans can be distinguished in light and dark, and with most weak colour vision."""

from mmpack.view.shapes import SHAPES

STYLE = (
    """
.mmpack{--fg:#1b1f24;--soft:#59636e;--bg:#fff;--card:#f6f8fa;--line:#d0d7de;--bad:#b3261e;--good:#0a7d33;
--text:#c9d1d9;--image:#5b8def;--video:#a371f7;--audio:#b8a800;--loss:#3fb37f;--observation:#e0a030;--placeholder:#e5534b;
color:var(--fg);background:var(--bg);font:14px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){.mmpack{--fg:#e6edf3;--soft:#9aa4af;--bg:#0d1117;--card:#161b22;
--line:#30363d;
--bad:#ff8078;--good:#4ac26b;--text:#4a535e;--image:#3f6fd0;--video:#8250df;--audio:#8a7d00;--loss:#2a8a5f;
--observation:#a97314;
--placeholder:#c93c37}}
body.mmpack{margin:0 auto;max-width:1100px;padding:1.5rem 1rem}
.mmpack h1{font-size:1.5rem;margin:0 0 .3rem}.mmpack h2{font-size:1.1rem;margin:1.8rem 0 .5rem}
.mmpack h3{font-size:1rem;margin:0 0 .5rem;display:flex;flex-wrap:wrap;gap:.3rem .6rem;align-items:baseline}
.mmpack p{margin:.3rem 0}.mmpack .bad{color:var(--bad)}.mmpack .good{color:var(--good)}
.mmpack .mm-note{color:var(--soft);font-size:.85rem}
.mmpack .mm-card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.9rem 1rem;
margin:0 0 1rem}
.mmpack .mm-cause{font:600 .8rem ui-monospace,monospace;border:1px solid currentColor;border-radius:1em;
padding:0 .6em;
color:var(--bad);white-space:nowrap}
.mmpack .wide{overflow-x:auto;max-width:100%}
.mmpack table{border-collapse:collapse;margin:.5rem 0;font-size:.85rem;background:none}
.mmpack td,.mmpack th{border:1px solid var(--line);padding:.25em .6em;text-align:left;vertical-align:top;
min-width:3.2em;
color:var(--fg);background:none}
.mmpack th{color:var(--soft);font-weight:600}.mmpack td,.mmpack th{overflow-wrap:break-word}
.mmpack .mm-rows td:nth-child(n+3){overflow-wrap:anywhere}
.mmpack code{font:.85rem/1.5 ui-monospace,monospace;white-space:pre-wrap;background:none;color:inherit}
.mmpack mark{background:none;color:var(--bad);font-weight:700}
.mmpack .mm-rows td{min-width:6.5em}.mmpack .mm-rows td:last-child{min-width:16em}
.mmpack .mm-rows td:nth-child(2){min-width:4em}
@media(max-width:560px){.mmpack td:first-child:has(+td .mm-bar){min-width:8em}.mmpack .mm-bar{width:80px}}
@media(min-width:560px){.mmpack td:first-child{white-space:nowrap}}
.mmpack .mm-key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;color:var(--soft);font-size:.85rem;margin:.5rem 0}
.mmpack .mm-key svg{width:1em;height:1em;vertical-align:-.15em;margin-right:.3em}
.mmpack .mm-overview{display:flex;gap:.6rem;align-items:stretch;margin:.3rem 0 .6rem}
.mmpack .mm-names{display:flex;flex-direction:column;justify-content:space-around;font-size:.8rem;
color:var(--soft);
white-space:nowrap}
.mmpack .mm-strip{flex:1;min-width:0;height:56px;display:block;overflow:visible}
.mmpack .mm-drift{width:100%;height:90px;display:block;border:1px solid var(--line);border-radius:4px}
.mmpack rect.mm-text{fill:var(--text)}.mmpack rect.mm-image{fill:var(--image)}
.mmpack rect.mm-video{fill:var(--video)}.mmpack rect.mm-audio{fill:var(--audio)}
.mmpack rect.mm-loss{fill:var(--loss)}.mmpack rect.mm-observation{fill:var(--observation)}
.mmpack rect.mm-placeholder{fill:var(--placeholder)}.mmpack rect.mm-empty{opacity:.35}
.mmpack .mm-mark{stroke:var(--bad);stroke-width:2;vector-effect:non-scaling-stroke}
.mmpack .mm-axis{stroke:var(--soft);stroke-width:1;vector-effect:non-scaling-stroke}
.mmpack .mm-bar{width:160px;height:10px;display:block}.mmpack .mm-bar rect{fill:var(--image)}
.mmpack .mm-up{fill:var(--image)}.mmpack .mm-down{fill:var(--observation)}
.mmpack .mm-zoom td,.mmpack .mm-zoom th{text-align:center;white-space:pre;min-width:2.2em;padding:.2em .35em;
font:.78rem/1.35 ui-monospace,monospace}
.mmpack .mm-zoom th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
.mmpack .mm-zoom small{display:block;color:var(--soft)}
.mmpack .mm-zoom td{border-bottom-width:4px}
.mmpack td.mm-text{border-bottom-color:var(--text)}.mmpack td.mm-image{border-bottom-color:var(--image)}
.mmpack td.mm-video{border-bottom-color:var(--video)}.mmpack td.mm-audio{border-bottom-color:var(--audio)}
.mmpack td.mm-loss{border-bottom-color:var(--loss)}
.mmpack td.mm-observation{border-bottom-color:var(--observation)}
.mmpack td.mm-placeholder{border-bottom-color:var(--placeholder)}
.mmpack td.mm-none{color:var(--soft)}
.mmpack .mm-zoom td.mm-unlike{background:color-mix(in srgb,var(--bad) 16%,transparent)}
.mmpack .mm-zoom td.mm-unlike small{color:inherit}.mmpack .mm-zoom th.mm-at{color:var(--bad)}
.mmpack .mm-around{display:flex;gap:.6rem;margin:.2rem 0}.mmpack .mm-around b{flex:none;width:3.6em;
font-weight:400;
color:var(--soft);font-size:.85rem}
.mmpack .mm-pictures{display:flex;flex-wrap:wrap;gap:1rem;margin:.6rem 0}
.mmpack figure{margin:0;max-width:220px}.mmpack figure svg{max-width:100%;height:auto;display:block;
border:1px solid var(--line)}
.mmpack figcaption{font-size:.8rem;color:var(--soft);margin-top:.3rem}.mmpack figcaption b{color:var(--fg)}
.mmpack .mm-grid{stroke:#fff;stroke-width:.5;fill:none}.mmpack .mm-grid-back{stroke:#000;stroke-width:1.3;
fill:none;opacity:.55}
.mmpack .mm-two{display:grid;grid-template-columns:repeat(2,minmax(0,320px));gap:.4rem 1rem;margin:.4rem 0}
.mmpack .mm-two figure{max-width:none}.mmpack .mm-two svg{width:100%}
.mmpack details{margin:.5rem 0}.mmpack summary{cursor:pointer;color:var(--soft)}
.mmpack dl{margin:.4rem 0}.mmpack dt{font-weight:600}.mmpack dd{margin:0 0 .4rem}
"""
    + SHAPES
)

"""Contrast as WCAG 2.1 defines it, measured in a browser: of every text with the colours behind it, which may be
transparent; of words in a drawing with the shapes that lie below them.
"""

CONTRAST = """
const paint = d.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = color => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data].map((v, k) => k < 3 ? v : v / 255); };
const over = (top, under, share = 1) =>
  top.slice(0, 3).map((v, k) => v * top[3] * share + under[k] * (1 - top[3] * share));
const ground = e => { const own = rgba(w.getComputedStyle(e).backgroundColor);
  if (own[3] === 1) return own; return over(own, e.parentElement ? ground(e.parentElement) : [255, 255, 255]); };
const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = c.slice(0, 3).map(v => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const below = word => { let back = ground(word.closest("svg")); const at = word.getBoundingClientRect();
  for (const e of word.closest("svg").querySelectorAll("rect, text")) {
    if (e === word) return back;
    const box = e.getBoundingClientRect(), style = w.getComputedStyle(e);
    if (e.nodeName !== "rect" || style.fill === "none" || box.left > at.left + 1 || box.right < at.left + 1
      || box.top > at.top + at.height / 2 || box.bottom < at.top + at.height / 2) continue;
    back = over(rgba(style.fill), back, Number(style.opacity)); } };
all("details").forEach(e => e.open = true);
all(".row")[0]?.focus();
let worst = {ratio: 99}, count = 0, words = 0;
const note = (e, front, back) => { const value = ratio(over(front, back), back);
  if (value < worst.ratio) worst = {ratio: value, what: e.outerHTML.slice(0, 120)}; };
for (const e of all("body *")) {
  if (e.closest("svg, script, style") || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  note(e, rgba(w.getComputedStyle(e).color), ground(e)); count++;
}
for (const e of all("svg.mm-d text")) { note(e, rgba(w.getComputedStyle(e).fill), below(e)); words++; }
return {...worst, count, words};
"""

# What scrolls can be reached by keys and has a name, and so has each drawing; headings leave out no level.
REACHED = """
all("details").forEach(e => e.open = true);
const named = e => e.getAttribute("aria-label") || e.closest("[aria-hidden=true]");
const scrolls = all("body *").filter(e => e.scrollWidth > e.clientWidth + 1
  && ["auto", "scroll"].includes(w.getComputedStyle(e).overflowX));
const moved = scrolls.map(e => { e.focus(); e.scrollLeft = 40;
  return e.getAttribute("tabindex") === "0" && d.activeElement === e && e.scrollLeft > 0; });
return { overflow: root.scrollWidth - root.clientWidth, scrolls: scrolls.length,
  unreached: scrolls.filter((e, k) => !moved[k] && !e.querySelector("a[href], [tabindex='0']"))
    .map(e => e.outerHTML.slice(0, 80)),
  unnamed: all("svg[role=img], [tabindex='0'][role=group]").filter(e => !named(e)).map(e => e.outerHTML.slice(0, 80)),
  drawings: all("svg[role=img]").length, levels: all("h1, h2, h3, h4").map(e => Number(e.nodeName[1])),
  light: rgbSum(w.getComputedStyle(d.body).backgroundColor) > 384 };
function rgbSum(color) { return color.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0); }
"""

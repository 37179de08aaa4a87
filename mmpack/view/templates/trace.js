(() => {
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", LONGEST = 63;
const all = (s, e = document) => [...e.querySelectorAll(s)];
const now = document.getElementById("now");
let unit = null;
const number = text => [...text].reduce((sum, c) => sum * 64 + DIGITS.indexOf(c), 0);
const numbers = (text, width) => text.match(RegExp(`.{${width}}`, "g")) || [];
const ids = p => {
  const packed = p.dataset.i || "";
  return packed ? numbers(packed.slice(1), +packed[0]).map(number) : [];
};
const parts = p => {
  const text = p.textContent;
  if (p.dataset.l === undefined) return text.split(/(?<= )/);
  const out = [];
  let from = 0, length = 0;
  for (const c of p.dataset.l) {
    const digit = DIGITS.indexOf(c);
    length += digit;
    if (digit === LONGEST) continue;
    out.push(text.slice(from, from += length));
    length = 0;
  }
  return out;
};
const open = row => {
  if (row.units) return row.units;
  row.units = [];
  for (const p of all(".p", row)) {
    const at = +p.dataset.s, more = p.dataset.m || "", known = ids(p);
    if (p.dataset.n) {
      row.units.push({row, more, el: p, at, n: +p.dataset.n, id: known[0]});
      continue;
    }
    const logprobs = numbers(p.dataset.p || "", 2).map(number);
    const kept = numbers(p.dataset.q || "", 3).map(number);
    p.replaceChildren(...parts(p).map((part, k) => {
      const el = document.createElement("i");
      el.textContent = part;
      const text = p.dataset.l === undefined ? null : part;
      row.units.push({row, more, el, at: at + k, n: 1, id: known[k], text, logprob: logprobs[k],
        kept: kept[k]});
      return el;
    }));
  }
  for (const u of row.units) u.el.unit = u;
  return row.units;
};
const select = u => {
  if (unit) unit.el.classList.remove("on");
  unit = u;
  if (!u) { now.hidden = true; return; }
  const fold = u.el.closest("details");
  u.el.classList.add("on");
  const last = u.at + u.n - 1, cells = [];
  const put = (text, name = "span") => {
    const cell = document.createElement(name);
    cell.textContent = text;
    cells.push(cell);
  };
  put(u.n > 1 ? `tokens ${u.at}–${last}` : `token ${u.at}`, "b");
  if (u.id !== undefined) put(`id ${u.id}`);
  if (u.text) put(`“${u.text}”`, "q");
  if (u.text === "") put("goes on with the character before");
  put(u.row.dataset.k);
  if (u.logprob !== undefined && u.logprob < 4095) put(`logprob ${(-u.logprob / 100).toFixed(2)}`);
  if (u.kept !== undefined && u.kept < 262143) put(`1 of ${u.kept} kept ids`);
  if (u.more) put(u.more);
  if (u.row.dataset.m) put(u.row.dataset.m);
  now.replaceChildren(...cells);
  now.hidden = false;
  return fold;
};
const show = u => {
  const fold = select(u);
  if (fold && !fold.open) fold.open = true;
  u.el.scrollIntoView({block: "nearest"});
};
const enter = row => {
  const units = open(row);
  if (units.length) select(row.last || units[0]);
};
const step = (list, from, by) => list[Math.min(Math.max(list.indexOf(from) + by, 0), list.length - 1)];
const go = el => { el.focus(); el.scrollIntoView({block: "nearest"}); };
document.addEventListener("focusin", e => {
  const row = e.target.closest(".row");
  if (row && row === e.target) enter(row); else if (!row) select(null);
});
document.addEventListener("mouseover", e => {
  const row = e.target.closest(".row");
  if (!row) return;
  open(row);
  const el = e.target.closest(".p i, .p.f");
  if (el && el.unit) select(el.unit);
});
document.addEventListener("click", e => {
  const row = e.target.closest(".row"), el = e.target.closest(".p i, .p.f");
  if (row && el && el.unit) { row.last = el.unit; if (!getSelection().toString()) row.focus({preventScroll: true}); }
  const figure = e.target.closest("figure");
  if (figure && e.target.closest("svg")) figure.classList.toggle("big");
});
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const here = document.activeElement, row = here.classList.contains("row") ? here : null;
  if (e.key === "n" || e.key === "p") {
    const articles = all("article"), mine = here.closest("article");
    const next = mine ? step(articles, mine, e.key === "n" ? 1 : -1) : articles[0];
    if (next) { next.focus(); next.scrollIntoView({block: "start"}); }
    return;
  }
  if (here.tagName === "FIGURE" && (e.key === "Enter" || e.key === "Escape")) {
    here.classList.toggle("big", e.key === "Enter" ? undefined : false);
    go(here);
    e.preventDefault();
    return;
  }
  if (!row && here.tagName !== "ARTICLE") return;
  if (e.key === "ArrowDown" || e.key === "ArrowUp") {
    const rows = all(".row"), by = e.key === "ArrowDown" ? 1 : -1;
    go(row ? step(rows, row, by) : here.querySelector(".row") || here);
    e.preventDefault();
  } else if (row) {
    const units = open(row), mine = unit && unit.row === row ? unit : units[0];
    const to = {ArrowRight: () => step(units, mine, 1), ArrowLeft: () => step(units, mine, -1),
      Home: () => units[0], End: () => units.at(-1)}[e.key];
    if (!to || !units.length) return;
    row.last = to();
    show(row.last);
    e.preventDefault();
  }
});
})();

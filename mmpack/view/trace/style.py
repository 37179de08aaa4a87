"""The style sheet, light and dark. A role has a colour, a letter and a name; the loss has a solid bar and a word.

Text on any ground has a contrast of 4.5 or more; a test measures it.
"""

from mmpack.view.shapes import SHAPES

_ROLES = ("prompt", "picture", "video", "observation", "response", "thought", "action", "audio")
_LIGHT = ("#5b6572", "#1d5fc9", "#7a3bc4", "#8a5600", "#086d85", "#a82a6c", "#157038", "#5a6100")
_DARK = ("#9aa6b2", "#7fb0ff", "#c39bff", "#e2b04a", "#55c7d9", "#f48fc0", "#5fd08a", "#c9d34a")


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--{name}:{value};" for name, value in zip(_ROLES, values, strict=True))


STYLE = (
    f"""
:root{{--fg:#1b2129;--soft:#56616d;--bg:#fff;--card:#f7f8fa;--line:#d8dee5;--focus:#0b57d0;--on:#ffe08a;
--onfg:#1b2129;
--good:#0b6b33;--bad:#a5221b;--badge:#fff;{_colours(_LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{--fg:#e6ebf1;--soft:#a3aeb9;--bg:#0f141a;--card:#171d25;--line:#303a45;
--focus:#8ab8ff;--on:#ffd966;--onfg:#14181d;--good:#6fdc95;--bad:#ff9a92;--badge:#0f141a;{_colours(_DARK)}}}}}
"""
    + "".join(f".{name}{{--c:var(--{name})}}\n" for name in _ROLES)
    + """
*{box-sizing:border-box}
html{scroll-padding:.8rem 0 4rem}
body{margin:0;color:var(--fg);background:var(--bg);font:14px/1.5 system-ui,sans-serif;overflow-wrap:anywhere;
padding-bottom:3.4rem}
a{color:var(--focus)}ul{list-style:none;margin:0;padding:0}
.skip{position:absolute;left:-99em}.skip:focus{left:.5rem;top:.5rem;background:var(--bg);padding:.3rem .6rem;
z-index:3}
:focus{outline:none}:focus-visible{outline:2px solid var(--focus);outline-offset:1px}
header{padding:1.1rem 1.4rem .8rem;border-bottom:1px solid var(--line)}
h1{font-size:1.3rem;margin:0;font-weight:650}.facts{margin:.1rem 0;color:var(--soft)}
.note{color:var(--soft);font-size:.86rem;margin:.2rem 0}
summary{cursor:pointer;color:var(--soft)}
.wide{overflow-x:auto}.wide table{border-collapse:collapse;font-size:.86rem;margin:.4rem 0}
.wide td,.wide th{border:1px solid var(--line);padding:.15em .6em;text-align:left}
.mm-note{color:var(--soft);font-size:.86rem;margin:.2rem 0}.sums h2{font-size:.95rem;margin:.9rem 0 .3rem}
.overview{margin:.4rem 0 .2rem}.overview small{color:var(--soft)}
.key-of-all{margin-top:.5rem}.keys{display:grid;grid-template-columns:repeat(auto-fill,minmax(19rem,1fr));
gap:.2rem 1.2rem;
margin:.4rem 0}
.keys li{display:grid;grid-template-columns:1.7rem 6.4rem 1fr;align-items:baseline;font-size:.86rem}
.keys span{color:var(--soft)}
.help{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;color:var(--soft);font-size:.86rem}
kbd{font:600 .8rem ui-monospace,monospace;border:1px solid var(--line);border-radius:4px;padding:0 .35em;
color:var(--fg)}
.letter,.key{display:inline-block;min-width:1.35em;text-align:center;border-radius:4px;
font:700 .78rem/1.35 ui-monospace,
monospace;background:var(--c);color:var(--badge);justify-self:start;padding:0 .2em}
.key,.mark{--m:#ff7aa2}.key.target,.mark.target{--m:#35d6ff}.key.action,.mark.action{--m:#ffd633}
.key{background:#10151b;color:var(--m);border:1.5px solid var(--m)}.key.target{border-style:dashed}
.key.action{border-radius:1em}
.bar{display:inline-block;width:6px;height:1.1em;background:var(--fg);vertical-align:-.2em;margin-left:.4em}
.cols{display:grid;grid-template-columns:15rem minmax(0,1fr);gap:1.4rem;padding:0 1.4rem;max-width:100rem}
nav{position:sticky;top:0;align-self:start;max-height:100vh;overflow:auto;padding:1rem 0;font-size:.86rem}
nav h2,.episode>h2{font-size:.95rem;font-weight:400;color:var(--soft);margin:.9rem 0 .3rem}
nav h2{font-size:.86rem}nav h2 b,.episode>h2 b{color:var(--fg)}
nav li{padding:.1rem 0 .1rem calc(var(--d,0)*.9rem)}nav small{display:block;color:var(--soft)}
nav a{text-decoration:none}nav a:hover{text-decoration:underline}
.d1{--d:1}.d2{--d:2}.d3{--d:3}.d4{--d:4}.d5{--d:5}.d6{--d:6}
main{padding:.4rem 0 1rem;min-width:0}
article{border:1px solid var(--line);border-radius:10px;background:var(--card);padding:.8rem 1rem;margin:0 0 1.1rem;
content-visibility:auto;contain-intrinsic-size:auto 640px}
h3{margin:0;font-size:1.02rem;display:flex;flex-wrap:wrap;gap:.1rem .8rem;align-items:baseline}
h3 small{font-weight:400;color:var(--soft);font-size:.86rem}
.scores{margin:.35rem 0 0;display:flex;flex-wrap:wrap;gap:.3rem}
.sc{display:inline-block;border:1px solid var(--s,var(--soft));border-radius:5px;padding:0 .45em;
font:.8rem/1.5 system-ui,
sans-serif;white-space:normal;background:var(--bg);margin:0 .15rem;--s:var(--soft)}
.sc b{color:var(--s)}.sc .what{color:var(--soft)}
.sc.reward{--s:var(--good)}.sc.cost{--s:var(--bad);border-style:dashed}.sc.verdict{--s:var(--fg);border-style:dotted}
.problems{margin:.4rem 0;font-size:.86rem;color:var(--bad)}
.strip{display:flex;gap:1rem;overflow-x:auto;padding:.7rem 2px .5rem;align-items:flex-start}
figure{margin:0;flex:none;max-width:100%;min-width:11rem;border-radius:6px}
figure svg{display:block;max-width:calc(100vw - 3.5rem);height:auto;border:1px solid var(--line);border-radius:6px;
background:var(--bg);cursor:zoom-in}
.strip figure:only-child{display:flex;flex-wrap:wrap;gap:.4rem 1.1rem}.strip figure:only-child figcaption{width:18rem}
figure.big{width:100%}figure.big svg{width:100%;max-height:92vh;cursor:zoom-out}
figcaption{font-size:.84rem;margin-top:.3rem;contain:inline-size}figcaption small{display:block;color:var(--soft)}
.marks li{margin:.1rem 0}
.blank{fill:color-mix(in srgb,var(--c) 12%,var(--bg));--c:var(--picture)}.blank.video{--c:var(--video)}
.blank.image{--c:var(--picture)}.grid{stroke:var(--soft);stroke-width:.6;stroke-opacity:.35;fill:none}
.mark{fill:none}.mark .halo{stroke:#10151b;stroke-width:3.8;stroke-linejoin:round;stroke-opacity:.8}
.mark .line{stroke:var(--m);stroke-width:1.8;stroke-linejoin:round}
.mark.target .line{stroke-dasharray:6 4}
.mark text{fill:var(--m);stroke:#10151b;stroke-width:3.5;stroke-linejoin:round;paint-order:stroke;
font:700 13px ui-monospace,monospace}
.film{display:flex;gap:.7rem;overflow-x:auto;padding:.2rem 2px .6rem;margin:0 0 .6rem}
.film a{flex:none;text-decoration:none;font-size:.8rem;border-radius:5px}
.film svg{display:block;border:1px solid var(--line);border-radius:5px;background:var(--bg)}
.film .halo{stroke-width:2.8}.film .line{stroke-width:1.3}.film .region text,.film .target text{display:none}
.film span{display:block;contain:inline-size;color:var(--soft)}.film b{color:var(--fg)}
.prefix{margin:.5rem 0;padding:.3rem .7rem;border:1px dashed var(--line);border-radius:6px;color:var(--soft);
font-size:.88rem}
.rows{margin:.5rem 0 .3rem;border-radius:6px;overflow:hidden}
.row{display:grid;grid-template-columns:9.6rem minmax(0,1fr);gap:.8rem;padding:.28rem .6rem .28rem .7rem;
position:relative;
background:color-mix(in srgb,var(--c) 6%,var(--bg));border-bottom:1px solid var(--line);scroll-margin:4rem}
.row::before{content:"";position:absolute;left:0;top:0;bottom:0;width:2px;background:var(--c);opacity:.45}
.row.loss{background:color-mix(in srgb,var(--c) 13%,var(--bg))}.row.loss::before{width:6px;opacity:1}
.row:focus-visible{outline-offset:-2px}
.gut{font-size:.84rem;display:grid;grid-template-columns:1.7rem 1fr;align-content:start}
.gut small{grid-column:2;color:var(--soft);font-size:.78rem;font-variant-numeric:tabular-nums}
.inloss{color:var(--soft)}
.txt{font:.84rem/1.6 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;min-width:0}
.txt i{font-style:normal;border-radius:2px}
.txt i:hover{background:color-mix(in srgb,var(--c) 30%,transparent)}
.txt .on,.txt .f.on{background:var(--on);color:var(--onfg);outline:2px solid var(--focus)}
.p.g{border-bottom:2px solid var(--fg)}.p.reward{box-shadow:0 2px var(--good)}
.p.cost{border-bottom:2px dashed var(--bad)}
.p.f{border:1px solid var(--line);border-radius:5px;padding:0 .4em;background:var(--bg)}
sup{font:700 .7rem ui-monospace,monospace;color:var(--soft);margin:0 .15em}
.gap{color:var(--soft);font-style:italic}
.more summary{font:.82rem system-ui,sans-serif}.fields{font-size:.86rem}
dl{margin:.3rem 0}dl div{display:grid;grid-template-columns:11rem minmax(0,1fr);gap:.8rem}
dt{color:var(--soft)}dd{margin:0;font-family:ui-monospace,monospace;font-size:.82rem}
:root{--image:var(--picture)}
.symbols{position:absolute}
#now{position:fixed;left:0;right:0;bottom:0;background:var(--bg);border-top:1px solid var(--line);
padding:.45rem 1.4rem;
display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;font-size:.88rem;max-height:30vh;overflow:auto;z-index:2}
#now[hidden]{display:none}#now q{quotes:none;font-family:ui-monospace,monospace}
#now span{color:var(--soft)}
@media(max-width:760px){.cols{display:block;padding:0 .7rem}nav{position:static;max-height:14rem}
header{padding:.8rem .7rem}.row{grid-template-columns:minmax(0,1fr);gap:.1rem}article{padding:.6rem}
.gut{display:flex;gap:.5rem;align-items:baseline;flex-wrap:wrap}.gut small{grid-column:auto}
dl div{grid-template-columns:minmax(0,1fr);gap:0}}
@media print{nav,#now,.help{display:none}.cols{display:block}article{content-visibility:visible}}
"""
    + SHAPES
)

"""How the report looks, light and dark.

The series' colours stay apart for colour-blind readers (at least 26 in CIELAB for each kind) and stand out from the box
by a contrast of 3 or more, text by 5.9.
"""

STYLE = """
:root{--page:#f4f6f8;--box:#fff;--text:#1b1f24;--soft:#57606a;--line:#d0d7de;--grid:#dde2e7;--row:#1b1f240a;--shade:#1b1f2438;--warn:#b3261e;
--s1:#0072b2;--s2:#d55e00;--s3:#2a333d;--s4:#8c95a0}
@media (prefers-color-scheme:dark){:root{--page:#0f1318;--box:#171c23;--text:#e6e9ee;--soft:#a6b0bb;--line:#39424e;
--grid:#2b333d;--row:#e6e9ee0c;--shade:#e6e9ee38;--warn:#ff9b93;--s1:#56b4e9;--s2:#f0803c;--s3:#f2f4f7;--s4:#7d8794}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1152px;margin:0 auto;padding:16px}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;line-height:1.3;margin:0 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .25rem}
p{margin:.25rem 0 .75rem;max-width:75ch}
header p,section>p,figure p{color:var(--soft)}
section{margin:2rem 0}
ul{padding-left:1.25rem;margin:.25rem 0}
li{overflow-wrap:anywhere;margin:.25rem 0;max-width:90ch}
.scroll{overflow-x:auto;max-width:100%}
section>.scroll{background:linear-gradient(to right,var(--box) 30%,transparent),
linear-gradient(to left,var(--box) 30%,transparent) 100% 0,linear-gradient(to right,var(--shade),transparent),
linear-gradient(to left,var(--shade),transparent) 100% 0,var(--box);background-repeat:no-repeat;
background-size:48px 100%,48px 100%,14px 100%,14px 100%,auto;background-attachment:local,local,scroll,scroll,local;border:1px solid var(--line);border-radius:6px}
.scroll:focus-visible{outline:2px solid var(--s1);outline-offset:1px}
table{border-collapse:collapse;font-size:14px;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600}
tbody tr:last-child td{border-bottom:0}
tbody tr:nth-child(even) td{background:var(--row)}
@media (max-width:600px){th,td{padding:5px 7px}}
.n{text-align:right}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(354px,100%),1fr));gap:16px;align-items:start}
figure{margin:0;padding:12px;background:var(--box);border:1px solid var(--line);border-radius:6px;min-width:0}
figcaption{font-weight:600;overflow-wrap:anywhere;line-height:1.35;margin-bottom:6px}
figure p,details,.legend{font-size:13px}
figure details{margin-top:6px}
summary{cursor:pointer;color:var(--soft)}
details table{font-size:13px}
.legend{list-style:none;padding:0;margin:6px 0;display:flex;flex-wrap:wrap;gap:2px 14px}
.legend li{display:flex;align-items:center;gap:6px;margin:0}
.key{width:12px;height:12px;border-radius:2px}
.k1{background:var(--s1)}.k2{background:var(--s2)}.k3{background:var(--s3)}.k4{background:var(--s4)}
.diamond{width:9px;height:9px;margin:0 2px;transform:rotate(45deg);background:var(--box);border:1.5px solid var(--text)}
svg{display:block;width:100%;min-width:328px;max-width:420px;height:auto;font-size:12px;fill:var(--text)}
.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}
text{dominant-baseline:central;stroke:none}
.label{text-anchor:end}
.tick,.axis{text-anchor:middle;fill:var(--soft)}
.value{font-variant-numeric:tabular-nums;paint-order:stroke;stroke:var(--box);stroke-width:3px;stroke-linejoin:round}
.grid{stroke:var(--grid)}
.reference{stroke:var(--text);stroke-width:1.5;stroke-dasharray:4 3}
.halo,.whisker{fill:none;stroke:var(--box);stroke-width:3.5}
.whisker{stroke:var(--text);stroke-width:1.2}
.mark{fill:var(--box);stroke:var(--text);stroke-width:1.5}
dl{display:grid;grid-template-columns:minmax(90px,max-content) 1fr;gap:4px 16px;margin:.25rem 0;font-size:14px}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;background:var(--box);border:1px solid var(--line);border-radius:6px;padding:10px 12px;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
.warning{color:var(--warn)}
"""

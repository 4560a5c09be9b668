"""The page's stylesheet: light and dark by the reader's setting, one column on a phone, ink on paper when printed.

Text has a contrast of at least 7:1, lines and bars of 4.5:1 against their background, in both schemes.
"""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#16181d;--soft:#4a4f5a;--grid:#c9cdd6;--line:#d9dce3;
--run-a:#123f8f;--run-b:#b8500c;--good:#1a6b35;
--font:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1d2026;--ink:#eceef2;--soft:#b8bdc9;--grid:#454b58;
--line:#343944;--run-a:#7aaeff;--run-b:#ffc795;--good:#7fd69a}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 var(--font)}
a{color:var(--run-a)}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:3px solid var(--run-a);outline-offset:2px}
.skip{position:absolute;left:-999px}
.skip:focus{left:1rem;top:1rem;background:var(--paper);padding:.5rem}
header,main,footer{max-width:72rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:1.6rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem}
h3{font-size:1rem;margin:0 0 .25rem}
p{margin:.5rem 0;max-width:46rem}
.lead{color:var(--soft);margin:.25rem 0 0;overflow-wrap:anywhere}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;margin:1rem 0 0;padding:.5rem 0;
border-block:1px solid var(--line)}
nav a{display:inline-block;padding:.25rem 0}
.tiles{display:flex;flex-wrap:wrap;gap:.75rem;margin:1.25rem 0 0}
.tiles div{flex:1 1 8.5rem;background:var(--card);border-radius:.5rem;padding:.75rem 1rem}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:.1rem 0 0;font-size:1.25rem;line-height:1.3;font-weight:600;font-variant-numeric:tabular-nums}
.tiles dd small{display:block;font-size:.85rem;font-weight:400;color:var(--soft)}
.tiles dd{white-space:nowrap}
.two .tiles dd{font-size:1rem}
.two .tiles .key{width:1em}
.key{display:inline-block;width:1.4em;height:0;border-top:.28em solid;vertical-align:.22em;margin-right:.4em}
.key.a{border-color:var(--run-a)}.key.b{border-color:var(--run-b)}.key.dashed{border-top-style:dashed}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:.75rem 0 0}
.legend li{overflow-wrap:anywhere}
.legend.small{margin:0;font-size:.875rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1rem}
.grid>*{min-width:0}
.maps{grid-template-columns:repeat(auto-fill,minmax(min(100%,25rem),1fr))}
th code{white-space:nowrap}
figure,.card{margin:0;background:var(--card);border-radius:.5rem;padding:1rem;min-width:0}
figure svg{display:block;width:100%;height:auto;margin:.25rem 0}
figcaption{color:var(--soft);font-size:.875rem}
figcaption span{display:block}
summary{cursor:pointer;padding:.35rem 0;font-size:.9rem}
.scroll{overflow-x:auto;max-width:100%}
.tall{max-height:24rem;overflow-y:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.875rem}
caption{text-align:left;color:var(--soft);padding:.25rem 0 .5rem}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600}
th:first-child,td.text,th.text{text-align:left}
td.text{overflow-wrap:anywhere;min-width:9rem;white-space:pre-wrap}
.wide{width:100%}
.tall thead th{position:sticky;top:0;background:var(--card)}
.heat{width:100%;margin-bottom:.5rem}
.heat th,.heat td{text-align:center;padding:.12rem .2rem;border:1px solid var(--card);font-size:.8rem}
.heat th:first-child{text-align:right;font-weight:400}
.heat abbr{text-decoration:none}
.bar{display:block;height:.6rem;border-radius:.3rem;
background:linear-gradient(90deg,#00224e,#434e6c,#7d7c78,#bbae6c,#fee838)}
.scale{display:grid;grid-template-columns:auto 1fr auto;gap:.6rem;align-items:center;font-size:.85rem;
color:var(--soft);max-width:24rem;margin:.25rem 0 .75rem}
.note{border-left:.25rem solid var(--run-b);padding:.1rem 0 .1rem .75rem;margin:1rem 0}
.differs{font-weight:600}
.differs::after{content:" \\2260"}
code{font-size:.9em;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:.875rem;padding-block:2.5rem 3rem}
@media (max-width:40rem){body{font-size:15px}.tiles{gap:.5rem}.tiles div{flex-basis:40%}
.tiles div{padding:.6rem .75rem}figure,.card{padding:.75rem}
.heat th,.heat td{font-size:.72rem;padding:.1rem .05rem}
.stack thead{position:absolute;left:-999px}
.stack tr{display:block;border-bottom:1px solid var(--line);padding:.5rem 0}
.stack th,.stack td{display:block;border:0;padding:.1rem 0;text-align:left}
.stack td[data-label]::before{content:attr(data-label);display:block;color:var(--soft);font-size:.8rem}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#333;--grid:#bbb;--line:#bbb;
--run-a:#123f8f;--run-b:#b8500c;--good:#1a6b35}body{font-size:10pt}nav,.skip,figure details{display:none}
details::details-content{content-visibility:visible;block-size:auto}summary{display:none}
figure,.card,.tiles div{border:1px solid var(--line);break-inside:avoid}h2,h3{break-after:avoid}tr{break-inside:avoid}
.scroll,.tall{overflow:visible;max-height:none}.heat td,.bar,.key{print-color-adjust:exact;
-webkit-print-color-adjust:exact}.grid{grid-template-columns:1fr 1fr}a{color:inherit;text-decoration:none}}
"""

"""Checks of the pages in a browser: axe-core, and what its release here does not find or only suspects."""

from __future__ import annotations

from importlib.resources import files

from tools.docs.browser import Browser

_FINDINGS = """
return axe.run(document, {resultTypes: ['violations']}).then(result => result.violations
  .filter(each => ['serious', 'critical'].includes(each.impact))
  .map(each => `${each.id}: ${each.nodes[0].html.slice(0, 120)} (${each.nodes.length})`));
"""


def problems(browser: Browser) -> list[str]:
    """Return a line for each problem of the open page, from axe-core those that are serious or critical."""
    browser.run(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8"))
    return [*browser.run(_FINDINGS), *browser.run(PROBLEMS)]


PROBLEMS = r"""
const problems = [];
const say = (what, element) => problems.push(`${what}: ${element.outerHTML.slice(0, 120)}`);
const named = e => (e.textContent.trim() || e.getAttribute('aria-label')
  || [...e.querySelectorAll('img')].some(i => i.alt));

if (!document.documentElement.lang) problems.push('no language');
if (!document.title) problems.push('no title');
if (document.querySelectorAll('main').length !== 1) problems.push('not one main');
if (document.querySelectorAll('h1').length !== 1) problems.push('not one h1');
let level = 0;
for (const h of document.querySelectorAll('h1, h2, h3, h4')) {
  if (Number(h.tagName[1]) > level + 1) say('skipped level', h);
  level = Number(h.tagName[1]);
}
for (const i of document.images) if (!i.hidden && !i.getAttribute('alt')) say('no alternative text', i);
for (const s of document.querySelectorAll('svg:not([aria-hidden])')) {
  if (s.getAttribute('role') !== 'img' || !s.getAttribute('aria-label')) say('no text', s);
}
for (const e of document.querySelectorAll('a[href], button, summary')) if (!named(e)) say('no name', e);
for (const e of document.querySelectorAll('input:not([type=hidden]), select, textarea, progress')) {
  if (!e.labels?.length && !e.getAttribute('aria-label')) say('no label', e);
}
for (const e of document.querySelectorAll('th')) if (!e.scope) say('no scope', e);
for (const e of document.querySelectorAll('[tabindex]:not([aria-label])')) say('no label', e);
for (const e of document.querySelectorAll('[aria-labelledby]')) {
  if (!document.getElementById(e.getAttribute('aria-labelledby'))) say('no label', e);
}
const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push(`id twice: ${id}`);

// https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio
const rgb = text => text.match(/[\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const background = e => {
  for (; e; e = e.parentElement) {
    const colour = rgb(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !e.checkVisibility()) continue;
  const style = getComputedStyle(e);
  const colour = rgb(e.closest('svg') ? style.fill : style.color);
  const [high, low] = [luminance(colour), luminance(background(e))].sort((a, b) => b - a);
  if ((high + 0.05) / (low + 0.05) < 4.5) say('little contrast', e);
}
if (document.documentElement.scrollWidth > innerWidth) problems.push('the page is wider than the window');
return problems;
"""
"""Body of a function that returns a line for each problem of the page."""

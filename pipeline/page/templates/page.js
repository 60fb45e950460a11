// Replace the sections of the page that have changed on the server. Without this script, the page reloads.
"use strict";

const INTERVAL_MS = 3000;
const shown = new Map();
for (const section of document.querySelectorAll("section[id]")) {
  shown.set(section.id, section.innerHTML);
}
let etag = null;

async function refresh() {
  if (document.hidden) return;
  const headers = etag === null ? {} : { "If-None-Match": etag };
  const response = await fetch(location.href, { headers, cache: "no-store" });
  if (response.status === 304 || !response.ok) return;
  etag = response.headers.get("ETag");
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const [id, before] of shown) {
    const section = fresh.getElementById(id);
    if (section === null) continue;
    const html = section.innerHTML;
    const current = document.getElementById(id);
    // A section stays as it is until it changes on the server, and while it has the focus.
    if (html === before || current.contains(document.activeElement)) continue;
    // And what was typed into it.
    if ([...current.querySelectorAll("input, textarea")].some(e => e.value !== e.defaultValue)) continue;
    shown.set(id, html);
    // What the reader has opened or closed stays so.
    const summary = details => details.querySelector("summary").textContent;
    const open = new Map([...current.querySelectorAll("details")].map(each => [summary(each), each.open]));
    for (const each of section.querySelectorAll("details")) each.open = open.get(summary(each)) ?? each.open;
    // "stopping" and "started" are over when the button is another one.
    const action = node => node.querySelector("form")?.getAttribute("action");
    if (id === "job" && action(section) !== action(current)) document.querySelector(".notice")?.remove();
    current.replaceChildren(...section.childNodes);
  }
}

setInterval(() => refresh().catch(() => {}), INTERVAL_MS);

"use strict";
// Asks for the page's body every second, and shows it if it differs, unless a text is selected or a chart looked at.
const run = document.getElementById("run");
const gone = document.getElementById("gone");
let last = "";
async function look() {
  try {
    const answer = await fetch("body" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const text = await answer.text();
    gone.hidden = true;
    if (text !== last && getSelection().isCollapsed && !run.querySelector("svg.chart:hover")) show(text);
  } catch {
    gone.hidden = false;
  }
  setTimeout(look, 1000);
}
function show(text) {
  const left = run.querySelector(".scroll")?.scrollLeft ?? 0;
  run.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
  run.querySelectorAll("svg.chart").forEach(follow);
  const scroll = run.querySelector(".scroll");
  if (scroll) scroll.scrollLeft = left;
  document.title = run.querySelector("h1").textContent + " (gradwire watch)";
  last = text;
}
look();

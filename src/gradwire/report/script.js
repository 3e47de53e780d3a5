"use strict";
// Toggling: a method's button shows and hides its lines in every chart.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const line of document.querySelectorAll(".series"))
      if (line.dataset.name === button.dataset.name) line.classList.toggle("off", !shown);
  });
}

// Hovering: the loss of every line where the pointer is.
const tip = document.getElementById("tip");
const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
function written(value, unit) {
  if (unit === "bit/s") return written(value, "bytes").replace("B", "bit/s");
  if (unit === "s") return value.toPrecision(3) + " s";
  if (unit !== "bytes") return Math.round(value) + " " + unit;
  const [name, size] = Object.entries(units).filter(([, size]) => value >= size).pop() ?? ["B", 1];
  return (value / size).toPrecision(3) + " " + name;
}
function valueAt(axis, pixel) {
  const share = (pixel - axis.start) / (axis.end - axis.start);
  return axis.log ? axis.low * (axis.high / axis.low) ** share : axis.low + share * (axis.high - axis.low);
}
function lossAt(points, x) {
  if (x < points[0][0] || x > points.at(-1)[0]) return null;
  const next = points.findIndex((point) => point[0] >= x);
  if (next <= 0) return points[0][1];
  const [[x0, y0], [x1, y1]] = [points[next - 1], points[next]];
  return y0 + ((y1 - y0) * (x - x0)) / (x1 - x0 || 1);
}
function row(line, x) {
  const loss = lossAt(JSON.parse(line.dataset.points), x);
  if (loss === null) return null;
  const div = document.createElement("div");
  div.className = [...line.classList].find((name) => name.startsWith("tone"));
  const name = document.createElement("span");
  name.textContent = line.dataset.name;
  div.append(name, loss.toPrecision(3));
  return [loss, div];
}
function follow(svg) {
  const { x: axis, unit } = JSON.parse(svg.dataset.axis);
  const cross = svg.querySelector(".cross");
  const hide = () => { tip.hidden = true; cross.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    if (pixel < axis.start || pixel > axis.end) return hide();
    const x = valueAt(axis, pixel);
    const lines = [...svg.querySelectorAll(".series[data-points]:not(.off)")];
    const rows = lines.map((line) => row(line, x)).filter(Boolean).sort((a, b) => b[0] - a[0]);
    if (!rows.length) return hide();
    const head = document.createElement("b");
    head.textContent = written(x, unit);
    tip.replaceChildren(head, ...rows.map(([, div]) => div));
    tip.hidden = false;
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
    cross.setAttribute("x1", pixel); cross.setAttribute("x2", pixel);
    cross.style.visibility = "visible";
  });
}
document.querySelectorAll("svg.chart").forEach(follow);

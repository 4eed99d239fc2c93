#pragma once

#include <string_view>

namespace lockstep::detail {

/// The page of a RunReport. Its data takes the place of `/*run*/null`.
inline constexpr std::string_view run_page = R"page(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lockstep run</title>
<style>
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1b2330; --dim: #5a6575; --line: #d5dae2;
  --data: #7b5ea7; --forward: #2f74c0; --backward: #17876d; --communication: #d1601f; --optimizer: #9a8400;
  --c0: #2f74c0; --c1: #d1601f; --c2: #17876d; --c3: #7b5ea7; --c4: #9a8400; --c5: #b83280; --c6: #0e8ba0; --c7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161d; --card: #1b212b; --text: #e6eaf0; --dim: #a3aebd; --line: #364152;
    --data: #b394dd; --forward: #6cb0f2; --backward: #45c7a5; --communication: #f2935c; --optimizer: #d6c04a;
    --c0: #6cb0f2; --c1: #f2935c; --c2: #45c7a5; --c3: #b394dd; --c4: #d6c04a; --c5: #f07ab8; --c6: #52c8dd; --c7: #a3aebd;
  }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 20px; background: var(--back); color: var(--text); font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px; }
header, .wide { grid-column: 1 / -1; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 15px; margin: 0 0 6px; }
p { margin: 4px 0; color: var(--dim); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
/* Wide pictures scroll on a narrow screen. */
.wide svg { min-width: 760px; }
svg text { fill: var(--dim); font-size: 11px; }
svg .axis { stroke: var(--dim); stroke-width: 1; }
svg .grid { stroke: var(--line); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 8px; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.env td { text-align: left; overflow-wrap: anywhere; }
.env td:first-child { color: var(--dim); white-space: nowrap; width: 1%; }
.key { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--dim); font-size: 12px; margin-top: 4px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
</style>
</head>
<body>
<main id="main"><noscript>This page draws its pictures by JavaScript, which is off.</noscript></main>
<script>
"use strict";
const run = /*run*/null;
const phases = ["data", "forward", "backward", "communication", "optimizer"];
const main = document.getElementById("main");
const number = (value) => (typeof value === "string" ? NaN : value);
const shown = (value, digits = 4) =>
  !Number.isFinite(value) ? String(value) : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
const ms = (seconds) => (1e3 * seconds).toFixed(2);

function node(name, attributes = {}, ...children) {
  const drawn = ["svg", "line", "rect", "text", "polyline", "circle", "g", "title"].includes(name);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function card(title, wide, ...children) {
  const made = node("section", wide ? { class: "wide" } : {}, node("h2", {}, title), ...children);
  main.append(made);
  return made;
}
function key(entries) {
  const made = node("div", { class: "key" });
  for (const [name, color] of entries.slice(0, 24)) {
    made.append(node("span", {}, node("i", { style: "background:" + color }), name));
  }
  if (entries.length > 24) made.append(node("span", {}, "and " + (entries.length - 24) + " more"));
  return made;
}
const rankColor = (i) => "var(--c" + (i % 8) + ")";

function ticks(low, high, count, whole) {
  const raw = Math.max((high - low) / count, whole ? 1 : 0), power = Math.pow(10, Math.floor(Math.log10(raw)));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const made = [];
  for (let at = Math.ceil(low / unit - 1e-9) * unit; at <= high + 1e-9 * unit; at += unit) made.push(Math.abs(at) < 1e-9 * unit ? 0 : at);
  return made;
}

// A frame with axes. Returns the picture and the scales.
function frame(width, height, x, y, xName, yName) {
  const left = yName === null ? 110 : 62, bottom = height - 34, top = 10, right = width - 14;
  const picture = node("svg", { viewBox: "0 0 " + width + " " + height, role: "img" });
  const scale = (range, from, to) => (value) => from + ((value - range[0]) / (range[1] - range[0])) * (to - from);
  const sx = scale(x, left, right), sy = scale(y, bottom, top);
  if (yName !== null) {
    for (const tick of ticks(y[0], y[1], 5)) {
      picture.append(node("line", { x1: left, x2: right, y1: sy(tick), y2: sy(tick), class: "grid" }),
        node("text", { x: left - 6, y: sy(tick) + 4, "text-anchor": "end" }, shown(tick)));
    }
    picture.append(node("text", { transform: "translate(12 " + (top + bottom) / 2 + ") rotate(-90)", "text-anchor": "middle" }, yName));
  }
  for (const tick of ticks(x[0], x[1], width < 500 ? 6 : 10, ["epoch", "step", "optimizer step"].includes(xName))) {
    picture.append(node("line", { x1: sx(tick), x2: sx(tick), y1: bottom, y2: bottom + 4, class: "axis" }),
      node("text", { x: sx(tick), y: bottom + 16, "text-anchor": "middle" }, shown(tick)));
  }
  picture.append(node("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }),
    node("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xName));
  return { picture, sx, sy, left, right, top, bottom };
}

function chart(series, xName, yName, fromZero) {
  const finite = series.map((one) => ({ ...one, points: one.points.map(([x, y]) => [number(x), number(y)]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)) }));
  const all = finite.flatMap((one) => one.points);
  const lost = series.reduce((sum, one) => sum + one.points.length, 0) - all.length;
  if (all.length === 0) return node("p", {}, lost > 0 ? "None of the " + lost + " values is finite." : "No values yet.");
  const range = (values, zero) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    if (zero) low = Math.min(0, low);
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    return [low, high];
  };
  const yRange = range(all.map((point) => point[1]), fromZero);
  const margin = 0.05 * (yRange[1] - yRange[0]);
  yRange[1] += margin;
  if (yRange[0] !== 0) yRange[0] -= margin;
  const { picture, sx, sy } = frame(360, 240, range(all.map((point) => point[0]), false), yRange, xName, yName);
  for (const one of finite) {
    picture.append(node("polyline", { points: one.points.map(([x, y]) => sx(x).toFixed(1) + "," + sy(y).toFixed(1)).join(" "),
      fill: "none", stroke: one.color, "stroke-width": one.thin ? 1.3 : 2.2, "stroke-opacity": one.thin ? 0.85 : 1, "stroke-linejoin": "round" }));
    if (!one.thin && one.points.length <= 60) {
      for (const [x, y] of one.points) {
        picture.append(node("circle", { cx: sx(x), cy: sy(y), r: 3, fill: one.color }, node("title", {}, one.name + ": " + shown(y, 6) + " at " + shown(x, 8))));
      }
    }
  }
  const made = node("div", {}, picture);
  if (series.length > 1 || series[0].always) made.append(key(series.map((one) => [one.name, one.color])));
  if (lost > 0) made.append(node("p", {}, lost + " values are not finite and are left out."));
  return made;
}

function table(names, rows, style) {
  const made = node("table", style ? { class: style } : {});
  if (names) made.append(node("tr", {}, ...names.map((name) => node("th", {}, name))));
  for (const row of rows) made.append(node("tr", {}, ...row.map((cell) => node("td", {}, cell))));
  return made;
}

const last = run.epochs[run.epochs.length - 1];
const hosts = [...new Set(run.ranks.map((rank) => rank.host))];
document.title = run.title;
const many = (count, name) => count + " " + name + (count === 1 ? "" : "s");
{
  const text = last ? many(run.ranks.length, "rank") + " on " + many(hosts.length, "host") + ", " + many(run.epochs.length, "epoch") +
    ", " + many(last.step, "step") + ", loss " + shown(number(last.loss)) + " in epoch " + last.epoch : "No epoch has ended yet.";
  main.append(node("header", {}, node("h1", {}, run.title), node("p", {}, text)));
}
card("Loss", false, chart([
  { name: "steps, rank 0's samples", color: "var(--c0)", thin: true, points: run.losses },
  { name: "epochs, all ranks' samples", color: "var(--c1)", points: run.epochs.map((epoch) => [epoch.step, epoch.loss]) },
], "optimizer step", "loss", false));
for (const scalar of run.scalars) {
  card(scalar.tag, false, chart([{ name: scalar.tag, color: "var(--c2)", points: scalar.points }], "step", scalar.tag, false));
}
if (last) {
  card("Samples per second of each rank", false, chart(last.ranks.map((rank, i) => ({
    name: "rank " + rank.rank, color: rankColor(i), always: true,
    points: run.epochs.filter((epoch) => epoch.ranks[i] && epoch.ranks[i].seconds > 0)
      .map((epoch) => [epoch.epoch, epoch.ranks[i].samples / epoch.ranks[i].seconds]) })), "epoch", "samples/s", true));

  { // The mean step of the last epoch.
    const means = last.ranks.map((rank) => rank.phases.map((seconds) => (rank.steps ? seconds / rank.steps : 0)));
    const longest = Math.max(1e-9, ...means.map((mean) => mean.reduce((sum, one) => sum + one, 0)));
    const rows = means.slice(0, 32), height = 24 * rows.length + 52;
    const { picture, sx, left } = frame(1060, height, [0, 1e3 * longest], [0, 1], "mean time of a step in ms", null);
    rows.forEach((mean, i) => {
      let at = 0;
      picture.append(node("text", { x: left - 8, y: 24 * i + 26, "text-anchor": "end" }, "rank " + last.ranks[i].rank));
      mean.forEach((seconds, phase) => {
        picture.append(node("rect", { x: sx(1e3 * at), y: 24 * i + 12, width: Math.max(0, sx(1e3 * seconds) - left), height: 19,
          fill: "var(--" + phases[phase] + ")" }, node("title", {}, phases[phase] + ": " + ms(seconds) + " ms")));
        at += seconds;
      });
    });
    card("Where the time of a step goes (epoch " + last.epoch + ")", true, picture, key(phases.map((name) => [name, "var(--" + name + ")"])),
      node("p", {}, "Communication: the wait for other ranks that backward does not hide. Times in ms:"),
      table(["rank", ...phases, "step"], means.map((mean, i) => [String(last.ranks[i].rank), ...mean.map(ms),
        ms(last.ranks[i].steps ? last.ranks[i].seconds / last.ranks[i].steps : 0)])));
  }

  { // The phases and buckets of the last step.
    const drawn = run.ranks.filter((rank) => rank.spans.length > 0).slice(0, 8);
    if (drawn.length > 0) {
      const lanes = drawn.map((rank) => 1 + Math.max(-1, ...rank.buckets.map((bucket) => bucket[4])));
      const longest = 1e3 * Math.max(...drawn.flatMap((rank) => rank.spans.map((span) => span[2])));
      const height = 52 + drawn.reduce((sum, rank, i) => sum + 30 + 13 * lanes[i], 0);
      const { picture, sx, left } = frame(1060, height, [0, longest], [0, 1], "time since the step began on the rank, in ms", null);
      let top = 10;
      drawn.forEach((rank, i) => {
        picture.append(node("text", { x: left - 8, y: top + 13, "text-anchor": "end" }, "rank " + rank.rank));
        for (const [phase, begin, end] of rank.spans) {
          picture.append(node("rect", { x: sx(1e3 * begin), y: top, width: Math.max(0, sx(1e3 * end) - sx(1e3 * begin)), height: 18,
            fill: "var(--" + phases[phase] + ")" }, node("title", {}, phases[phase] + ": " + ms(end - begin) + " ms")));
        }
        if (lanes[i] > 0) picture.append(node("text", { x: left - 8, y: top + 31, "text-anchor": "end" }, "buckets"));
        for (const [index, begin, end, bytes, lane] of rank.buckets) {
          picture.append(node("rect", { x: sx(1e3 * begin), y: top + 21 + 13 * lane, width: Math.max(1, sx(1e3 * end) - sx(1e3 * begin)), height: 11,
            rx: 2, fill: "var(--c6)", stroke: "var(--card)" },
            node("title", {}, "bucket " + index + ": " + (bytes / 1024).toFixed(1) + " KiB, from " + ms(begin) + " to " + ms(end) + " ms")));
        }
        top += 30 + 13 * lanes[i];
      });
      card("Step " + drawn[0].step + ": phases, and the reduction of each bucket", true, picture,
        key([...phases.map((name) => [name, "var(--" + name + ")"]), ["reduction of a bucket", "var(--c6)"]]));
    }
  }

  { // Stragglers.
    const busy = run.ranks.map((rank) => rank.busy.map((point) => number(point[1])));
    const steps = Math.min(...busy.map((one) => one.length));
    const times = run.ranks.map(() => ({ last: 0, lateness: 0, most: 0 }));
    for (let step = 0; step < steps; ++step) {
      let latest = 0;
      busy.forEach((one, i) => { if (one[step] > busy[latest][step]) latest = i; });
      let others = 0;
      busy.forEach((one, i) => { if (i !== latest) others += one[step] / (busy.length - 1); });
      const by = busy[latest][step] - others;
      times[latest].last += 1;
      times[latest].lateness += by;
      times[latest].most = Math.max(times[latest].most, by);
    }
    if (run.ranks.length > 1 && steps > 0) {
      const worst = times.reduce((best, one, i) => (one.lateness > times[best].lateness ? i : best), 0);
      card("Stragglers (epoch " + last.epoch + ")", true,
        node("p", {}, "The rank with the latest gradients delays the others. Rank " + run.ranks[worst].rank + " was last in " + times[worst].last +
          " of " + (steps < Math.max(...last.ranks.map((one) => one.steps)) ? "the " + steps + " steps that were kept" : steps + " steps") + ", by " + ms(times[worst].lateness / Math.max(1, times[worst].last)) + " ms on average."),
        table(["rank", "host", "busy per step, ms", "last in steps", "share of steps, %", "late by, mean ms", "late by, most ms"],
          run.ranks.map((rank, i) => [String(rank.rank), rank.host, ms(last.ranks[i].steps ? last.ranks[i].busy / last.ranks[i].steps : 0), String(times[i].last),
            (100 * times[i].last / steps).toFixed(0), times[i].last ? ms(times[i].lateness / times[i].last) : "", times[i].last ? ms(times[i].most) : ""])),
        node("p", {}, "Busy is the time from one reduction to a rank's next gradients, without waiting for ranks. A rank is late by its busy time minus the others' mean."));
    }
  }
  card("Environment", true, table(null, [...run.environment, ...run.ranks.map((rank) =>
    ["rank " + rank.rank, rank.host + ", process " + rank.pid + ", " + many(rank.threads, "thread") + (rank.cpu ? ", " + rank.cpu : "")])], "env"));
}
</script>
</body>
</html>
)page";

}  // namespace lockstep::detail

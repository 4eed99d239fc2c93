#pragma once

#include <string_view>

namespace lockstep::inline v0_1::detail {

/// The page of a RunReport. Its data takes the place of `/*run*/null`.
inline constexpr std::string_view run_page = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lockstep run</title>
<style>
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1b2330; --dim: #5a6575; --line: #d5dae2; --c0: #2f74c0;
  --c1: #d1601f; --c2: #17876d; --c3: #7b5ea7; --c4: #9a8400; --c5: #b83280; --c6: #0e8ba0; --c7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161d; --card: #1b212b; --text: #e6eaf0; --dim: #a3aebd; --line: #364152; --c0: #6cb0f2;
    --c1: #f2935c; --c2: #45c7a5; --c3: #b394dd; --c4: #d6c04a; --c5: #f07ab8; --c6: #52c8dd; --c7: #a3aebd;
  }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 20px; background: var(--back); color: var(--text); }
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; display: grid; gap: 14px; }
main { grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }
header, .wide { grid-column: 1 / -1; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 15px; margin: 0 0 6px; }
p { margin: 4px 0; color: var(--dim); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
/* Wide pictures scroll on a narrow screen. */
section { overflow-x: auto; } .wide svg { min-width: 760px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; }
.axis { stroke: var(--dim); } .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 8px; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.env td { text-align: left; overflow-wrap: anywhere; }
.env td:first-child { color: var(--dim); white-space: nowrap; width: 1%; }
.key { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--dim); font-size: 12px; margin-top: 4px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.key i { vertical-align: -1px; }
</style>
</head><body>
<main id="main"><noscript>This page draws its pictures by JavaScript, which is off.</noscript></main>
<script>
"use strict";
const run = /*run*/null;
const color = (i) => `var(--c${i % 8})`;
const phases = [["data", color(3)], ["forward", color(0)], ["backward", color(2)],
  ["communication", color(1)], ["optimizer", color(4)]];
const main = document.getElementById("main");
const number = (value) => (typeof value === "string" ? NaN : value);
const shown = (value, digits = 4) =>
  !Number.isFinite(value) ? String(value) : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
const ms = (seconds) => (1e3 * seconds).toFixed(2);
const many = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
const mean = (total, count) => (count ? total / count : 0);

function node(name, attributes = {}, ...children) {
  const made = ["svg", "line", "rect", "text", "polyline", "circle", "title"].includes(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const line = (x1, x2, y1, y2, kind) => node("line", { x1, x2, y1, y2, class: kind });
const label = (x, y, anchor, text) => node("text", { x, y, "text-anchor": anchor }, text);
const bar = (x, y, width, height, fill, text, more) =>
  node("rect", { x, y, width: Math.max(0, width), height, fill, ...more }, node("title", {}, text));
const paragraph = (text) => node("p", {}, text);
function card(title, wide, ...children) {
  main.append(node("section", wide ? { class: "wide" } : {}, node("h2", {}, title), ...children));
}
function key(entries) {
  const made = node("div", { class: "key" });
  for (const [name, fill] of entries.slice(0, 24)) {
    made.append(node("span", {}, node("i", { style: "background:" + fill }), name));
  }
  if (entries.length > 24) made.append(node("span", {}, `and ${entries.length - 24} more`));
  return made;
}
function table(names, rows, style) {
  const made = node("table", style ? { class: style } : {});
  if (names) made.append(node("tr", {}, ...names.map((name) => node("th", {}, name))));
  for (const row of rows) made.append(node("tr", {}, ...row.map((cell) => node("td", {}, cell))));
  return made;
}

function ticks(low, high, count, whole) {
  const raw = Math.max((high - low) / count, whole ? 1 : 0);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const made = [];
  for (let at = Math.ceil(low / unit - 1e-9) * unit; at <= high + 1e-9 * unit; at += unit) {
    made.push(Math.abs(at) < 1e-9 * unit ? 0 : at);
  }
  return made;
}

// A frame with axes. Returns the picture and the scales.
function frame(width, height, x, y, xName, yName) {
  const left = yName === null ? 110 : 62, bottom = height - 34, top = 10, right = width - 14;
  const picture = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const scale = ([low, high], from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);
  const sx = scale(x, left, right), sy = scale(y, bottom, top);
  if (yName !== null) {
    for (const tick of ticks(...y, 5)) {
      const at = sy(tick);
      picture.append(line(left, right, at, at, "grid"), label(left - 6, at + 4, "end", shown(tick)));
    }
    const turn = `translate(12 ${(top + bottom) / 2}) rotate(-90)`;
    picture.append(node("text", { transform: turn, "text-anchor": "middle" }, yName));
  }
  for (const tick of ticks(...x, width < 500 ? 6 : 10, /(epoch|step)$/.test(xName))) {
    const at = sx(tick);
    picture.append(line(at, at, bottom, bottom + 4, "axis"), label(at, bottom + 16, "middle", shown(tick)));
  }
  picture.append(line(left, right, bottom, bottom, "axis"),
    label((left + right) / 2, height - 4, "middle", xName));
  return { picture, sx, sy, left };
}

function range(values, fromZero) {
  let low = fromZero ? 0 : Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  return [low, high];
}

function chart(series, xName, yName, fromZero) {
  const finite = series.map((one) => ({ ...one, points: one.points.map((point) => point.map(number))
    .filter((point) => point.every(Number.isFinite)) }));
  const all = finite.flatMap((one) => one.points);
  const lost = series.reduce((sum, one) => sum + one.points.length, 0) - all.length;
  if (all.length === 0) return paragraph(lost ? `None of the ${lost} values is finite.` : "No values yet.");
  const yRange = range(all.map((point) => point[1]), fromZero);
  const margin = 0.05 * (yRange[1] - yRange[0]);
  yRange[1] += margin;
  if (yRange[0] !== 0) yRange[0] -= margin;
  const { picture, sx, sy } = frame(360, 240, range(all.map((point) => point[0])), yRange, xName, yName);
  for (const { name, fill, thin, points } of finite) {
    picture.append(node("polyline", {
      points: points.map(([x, y]) => sx(x).toFixed(1) + "," + sy(y).toFixed(1)).join(" "), fill: "none",
      stroke: fill, "stroke-width": thin ? 1.3 : 2.2, "stroke-opacity": thin ? 0.85 : 1,
      "stroke-linejoin": "round" }));
    if (thin || points.length > 60) continue;
    for (const [x, y] of points) {
      picture.append(node("circle", { cx: sx(x), cy: sy(y), r: 3, fill },
        node("title", {}, `${name}: ${shown(y, 6)} at ${shown(x, 8)}`)));
    }
  }
  const made = node("div", {}, picture);
  if (series.length > 1 || series[0].always) made.append(key(series.map((one) => [one.name, one.fill])));
  if (lost > 0) made.append(paragraph(`${lost} values are not finite and are left out.`));
  return made;
}

const last = run.epochs[run.epochs.length - 1];
document.title = run.title;
main.append(node("header", {}, node("h1", {}, run.title), paragraph(!last ? "No epoch has ended yet." :
  `${many(run.ranks.length, "rank")} on ${many(new Set(run.ranks.map((one) => one.host)).size, "host")}, ` +
  `${many(run.epochs.length, "epoch")}, ${many(last.step, "step")}` +
  `, loss ${shown(number(last.loss))} in epoch ${last.epoch}`)));
card("Loss", false, chart([
  { name: "steps, rank 0's samples", fill: color(0), thin: true, points: run.losses },
  { name: "epochs, all ranks' samples", fill: color(1), points: run.epochs.map((e) => [e.step, e.loss]) },
], "optimizer step", "loss"));
for (const { tag, points } of run.scalars) {
  card(tag, false, chart([{ name: tag, fill: color(2), points }], "step", tag));
}
if (last) {
  card("Samples per second of each rank", false, chart(last.ranks.map((rank, i) => ({
    name: "rank " + rank.rank, fill: color(i), always: true,
    points: run.epochs.filter(({ ranks }) => ranks[i] && ranks[i].seconds > 0)
      .map(({ epoch, ranks }) => [epoch, ranks[i].samples / ranks[i].seconds]),
  })), "epoch", "samples/s", true));

  { // The mean step of the last epoch.
    const means = last.ranks.map((rank) => rank.phases.map((seconds) => mean(seconds, rank.steps)));
    const longest = Math.max(1e-9, ...means.map((times) => times.reduce((sum, one) => sum + one, 0)));
    const rows = means.slice(0, 32);
    const { picture, sx, left } =
      frame(1060, 24 * rows.length + 52, [0, 1e3 * longest], [0, 1], "mean time of a step in ms", null);
    rows.forEach((times, i) => {
      let at = 0;
      picture.append(label(left - 8, 24 * i + 26, "end", "rank " + last.ranks[i].rank));
      times.forEach((seconds, phase) => {
        const [name, fill] = phases[phase];
        picture.append(
          bar(sx(1e3 * at), 24 * i + 12, sx(1e3 * seconds) - left, 19, fill, `${name}: ${ms(seconds)} ms`));
        at += seconds;
      });
    });
    card(`Where the time of a step goes (epoch ${last.epoch})`, true, picture, key(phases),
      paragraph("Communication: the wait for other ranks that backward does not hide. Times in ms:"),
      table(["rank", ...phases.map(([name]) => name), "step"], last.ranks.map((rank, i) =>
        [String(rank.rank), ...means[i].map(ms), ms(mean(rank.seconds, rank.steps))])));
  }

  // The phases and buckets of the last step.
  const drawn = run.ranks.filter((rank) => rank.spans.length > 0).slice(0, 8);
  if (drawn.length > 0) {
    const lanes = drawn.map((rank) => 1 + Math.max(-1, ...rank.buckets.map((bucket) => bucket[4])));
    const longest = 1e3 * Math.max(...drawn.flatMap((rank) => rank.spans.map((span) => span[2])));
    const height = 52 + lanes.reduce((sum, count) => sum + 30 + 13 * count, 0);
    const { picture, sx, left } =
      frame(1060, height, [0, longest], [0, 1], "time since the step began on the rank, in ms", null);
    const add = (begin, end, least, ...rest) => {
      const from = sx(1e3 * begin);
      picture.append(bar(from, rest[0], Math.max(least, sx(1e3 * end) - from), ...rest.slice(1)));
    };
    let top = 10;
    drawn.forEach((rank, i) => {
      picture.append(label(left - 8, top + 13, "end", "rank " + rank.rank));
      for (const [phase, begin, end] of rank.spans) {
        const [name, fill] = phases[phase];
        add(begin, end, 0, top, 18, fill, `${name}: ${ms(end - begin)} ms`);
      }
      if (lanes[i] > 0) picture.append(label(left - 8, top + 31, "end", "buckets"));
      for (const [index, begin, end, bytes, lane] of rank.buckets) {
        const text = `bucket ${index}: ${(bytes / 1024).toFixed(1)} KiB, from ${ms(begin)} to ${ms(end)} ms`;
        add(begin, end, 1, top + 21 + 13 * lane, 11, color(6), text, { rx: 2, stroke: "var(--card)" });
      }
      top += 30 + 13 * lanes[i];
    });
    card(`Step ${drawn[0].step}: phases, and the reduction of each bucket`, true, picture,
      key([...phases, ["reduction of a bucket", color(6)]]));
  }

  // Stragglers.
  const busy = run.ranks.map((rank) => rank.busy.map((point) => number(point[1])));
  const steps = Math.min(...busy.map((one) => one.length));
  const times = run.ranks.map(() => ({ last: 0, lateness: 0, most: 0 }));
  for (let step = 0; step < steps; ++step) {
    let latest = 0, others = 0;
    busy.forEach((one, i) => { if (one[step] > busy[latest][step]) latest = i; });
    busy.forEach((one, i) => { if (i !== latest) others += one[step] / (busy.length - 1); });
    const by = busy[latest][step] - others, late = times[latest];
    late.last += 1, late.lateness += by, late.most = Math.max(late.most, by);
  }
  if (run.ranks.length > 1 && steps > 0) {
    const worst = times.reduce((best, one, i) => (one.lateness > times[best].lateness ? i : best), 0);
    const all = Math.max(...last.ranks.map((one) => one.steps));
    const kept = steps < all ? `the ${steps} steps that were kept` : steps + " steps";
    const { last: count, lateness } = times[worst];
    card(`Stragglers (epoch ${last.epoch})`, true,
      paragraph("The rank with the latest gradients delays the others. " +
        `Rank ${run.ranks[worst].rank} was last in ${count} of ${kept}, ` +
        `by ${ms(lateness / Math.max(1, count))} ms on average.`),
      table(["rank", "host", "busy per step, ms", "last in steps", "share of steps, %", "late by, mean ms",
        "late by, most ms"], run.ranks.map((rank, i) => {
          const { last: count, lateness, most } = times[i];
          return [String(rank.rank), rank.host, ms(mean(last.ranks[i].busy, last.ranks[i].steps)),
            String(count), (100 * count / steps).toFixed(0), count ? ms(lateness / count) : "",
            count ? ms(most) : ""];
        })),
      paragraph("Busy is the time from one reduction to a rank's next gradients, without waiting for " +
        "ranks. A rank is late by its busy time minus the others' mean."));
  }
  card("Environment", true, table(null, [...run.environment, ...run.ranks.map((rank) => ["rank " + rank.rank,
    [rank.host, "process " + rank.pid, many(rank.threads, "thread"), rank.cpu].filter(Boolean).join(", "),
  ])], "env"));
}
</script></body></html>
)page";

}  // namespace lockstep::inline v0_1::detail

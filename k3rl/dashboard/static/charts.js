// Line charts by uPlot (global), in the colours of the page.

import { h, number } from "./dom.js";

// Okabe and Ito's colours, which differ for colour-blind readers too; darker or lighter by theme through CSS filters.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7fd1", "#999999"];

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** An exponential moving average that leaves gaps; weight 0 changes nothing. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** Numbers, with what is none or not finite as gaps. */
export function numbers(values) {
  return values.map((value) => (typeof value === "number" && Number.isFinite(value) ? value : null));
}

/**
 * @param {object} options
 * @param {{label: string, steps: number[], values: (number|null)[], colour?: string, dash?: boolean}[]} options.lines
 * @param {(step: number, line: any) => void} [options.onPick] a click, with the nearest line that has the step
 */
export function chart({ title, lines, height = 150, onPick = null, sync = "steps", stacked = false, note = "" }) {
  const box = h("figure", { class: "chart" });
  const readout = h("span", { class: "readout" });
  box.append(h("figcaption", { title }, h("b", null, title), note ? h("span", { class: "muted" }, note) : null, readout));
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    line.steps.forEach((step, index) => { column[place.get(step)] = line.values[index]; });
    return column;
  });
  const drawn = stacked ? stack(columns) : columns;
  const shown = drawn.map((column) => (stacked ? column : column));
  const make = (width) => new uPlot({
    width, height,
    cursor: { sync: { key: sync }, points: { size: 5 }, drag: { x: true, y: false } },
    legend: { show: false },
    scales: { x: { time: false } },
    padding: [8, 8, 0, 0],
    axes: [axis(22), { ...axis(54), values: (_plot, ticks) => ticks.map((tick) => number(tick, 3)) }],
    series: [{}, ...lines.map((line, index) => series(line, index, stacked, steps.length))],
    bands: stacked ? lines.slice(1).map((_line, index) => ({ series: [index + 2, index + 1], fill: lines[index + 1].colour + "99" })) : undefined,
    hooks: { setCursor: [(plot) => say(plot.cursor.idx)] },
  }, [steps.map((step) => step + 1), ...shown], box);
  function say(index) {
    if (index === null || index === undefined) { readout.textContent = last(); return; }
    const parts = lines.map((line, i) => [line.label, columns[i][index]]).filter(([, value]) => value !== null);
    readout.textContent = `step ${steps[index] + 1}: ` + parts.map(([label, value]) => (lines.length > 1 ? `${label} ` : "") + number(value)).join("  ");
  }
  function last() {
    if (lines.length > 4) return "";
    return lines.map((line, i) => {
      const value = [...columns[i]].reverse().find((own) => own !== null);
      return (lines.length > 1 ? `${line.label} ` : "") + number(value);
    }).join("  ");
  }
  readout.textContent = last();
  let plot = null;
  const observer = new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width < 40) return;
    if (plot === null) {
      plot = make(width);
      if (onPick) plot.over.addEventListener("click", () => pick());
    } else if (plot.width !== width) plot.setSize({ width, height });
  });
  function pick() {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) return;
    const y = plot.cursor.top;
    let best = null;
    lines.forEach((line, i) => {
      const value = columns[i][index];
      if (value === null) return;
      const distance = Math.abs(plot.valToPos(value, "y") - y);
      if (best === null || distance < best.distance) best = { distance, line };
    });
    if (best) onPick(steps[index], best.line);
  }
  observer.observe(box);
  box.classList.toggle("clickable", Boolean(onPick));
  return { element: box, destroy() { observer.disconnect(); plot?.destroy(); } };
}

function stack(columns) {
  const sums = new Array(columns[0]?.length || 0).fill(0);
  return columns.map((column) => column.map((value, index) => (sums[index] += value || 0)));
}

function axis(size) {
  return { stroke: style("--muted"), grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false }, size, font: "11px system-ui, sans-serif" };
}

function series(line, index, stacked, count) {
  const stroke = line.colour || PALETTE[index % PALETTE.length];
  return {
    label: line.label, stroke, width: 1.4, spanGaps: true,
    dash: line.dash ? [5, 4] : undefined,
    fill: stacked && index === 0 ? stroke + "99" : undefined,
    points: { show: count < 3, size: 4 },
  };
}

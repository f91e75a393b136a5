"use strict";
// The charts of the page: drawn by plotly, the nearest to the window first, again for every change of the controls.
// {charts, axes, starts, columns, live}: see nanotrain/report/page.py and figures.py.

const COLORS = ["#4269d0", "#e07b39", "#3ca951", "#a463f2", "#d6428c", "#6cc5b0", "#9c6b4e", "#868b94"];
const POLL_MS = 2000, SUMMARY_POLLS = 5;
const OPTIONS = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  displayModeBar: typeof matchMedia !== "undefined" && matchMedia("(hover: none)").matches ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
};

// The values of a noisy line at x, by linear regression over the neighbours within `width`, the nearest weighing most:
// centred, so nothing lags; the ends follow the slope. Near the last point, where neighbours are on one side only, the
// width grows to twice; at the beginning, where a loss is steep, it is a quarter of the way from the first point.
function smoothed(x, y, width) {
  return x.map((at, i) => {
    const half = Math.min(Math.max(width, 2 * width - (x.at(-1) - at)), (at - x[0]) / 4);
    let n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
    const add = j => {
      const d = x[j] - at, weight = half > 0 ? Math.max(1 - Math.abs(d) / half, 0) * (j ? x[j] - x[j - 1] : x[1] - x[0]) : 1;
      n += weight; sx += weight * d; sy += weight * y[j]; sxx += weight * d * d; sxy += weight * d * y[j];
    };
    add(i);
    for (let j = i - 1; j >= 0 && at - x[j] < half; j--) add(j);
    for (let j = i + 1; j < x.length && x[j] - at < half; j++) add(j);
    const spread = n * sxx - sx * sx;
    return spread > 1e-9 * n * n * half * half ? (sy * sxx - sx * sxy) / spread : sy / n;
  });
}

// The tokens or hours of a run at a step: straight between the steps that are known.
function along(axes, axis, step) {
  const steps = axes.step, values = axes[axis];
  let low = 0, high = steps.length - 1;
  if (axis === "step" || high < 0) return step;
  if (step <= steps[0]) return values[0] * step / steps[0];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const part = high > low ? (step - steps[low]) / (steps[high] - steps[low]) : 0;
  return values[low] + part * (values[high] - values[low]);
}

// Ticks of a logarithmic axis from low to high, with their labels: 1, 2 and 5 times powers of ten, over many decades
// only the powers.
function logTicks(low, high) {
  if (!(low > 0) || !Number.isFinite(high)) return null;
  const decades = Math.log10(high / low), digits = decades > 3 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 8)), values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    if (power % every === 0) values.push(...digits.map(digit => Number(`${digit}e${power}`)));
  const isPlain = value => value >= 1e-4 && value < 1e6;
  return {tickmode: "array", tickvals: values, ticktext: values.map(value => isPlain(value) ? String(value) : value.toExponential(0))};
}

// The smallest and the largest positive value of some lines.
function positiveRange(lines) {
  const values = lines.flat().filter(value => value > 0);
  return [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), 0)];
}

// Which marks have room for a label that runs along their line: those far enough from the last one with a label.
function withRoom(positions, width) {
  let last = -Infinity;
  const order = positions.map((_, i) => i).sort((a, b) => positions[a] - positions[b]), labelled = new Set();
  for (const i of order) if (positions[i] - last >= width) { labelled.add(i); last = positions[i]; }
  return labelled;
}

function start() {
  const page = JSON.parse(document.getElementById("figures").textContent);
  const control = name => document.getElementById(name);
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const waiting = new Set(Object.keys(page.charts));
  const longest = () => Math.max(1, ...page.axes.map(axes => axes.step.at(-1) ?? 1));
  const width = () => control("smooth").value / 100 * longest();
  const isOverSteps = figure => figure.layout.meta.metrics !== undefined;

  // Where a run was started again: on other ranks, with other settings.
  const marks = page.starts.flatMap((starts, run) => starts.slice(1).map(({step, world_size, changed}, i) => {
    const count = Object.keys(changed).length;
    const ranks = world_size === starts[i].world_size ? "" : ` on ${world_size} ${world_size === 1 ? "rank" : "ranks"}`;
    return {run, step, text: `resumed${ranks}${count ? `, ${count} ${count === 1 ? "setting" : "settings"} changed` : ""}`};
  }));

  function tracesOf(figure) {
    if (!isOverSteps(figure)) return figure.data;
    const axis = control("axis").value;
    const onAxis = (trace, steps) => steps.map(step => along(page.axes[trace.meta.run], axis, step));
    return figure.data.flatMap(trace => {
      const own = {...trace, x: onAxis(trace, trace.x)};
      if (!trace.meta.means || width() === 0 || trace.meta.means[0].length < 20) return [own];
      const [x, y] = trace.meta.means;
      const thin = {...own, opacity: 0.35, hoverinfo: "skip", showlegend: false, line: {...trace.line, width: 1}};
      return [thin, {...own, x: onAxis(trace, x), y: smoothed(x, y, width()), line: {...trace.line, width: 2}}];
    });
  }

  function layoutOf(figure) {
    const text = color("--text"), soft = color("--soft"), line = color("--line"), panel = color("--panel");
    const theme = {gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line};
    const layout = {
      ...figure.layout,
      showlegend: figure.data.length > 1 || Boolean(figure.data[0]?.meta?.label),
      font: {color: text, size: 12},
      hoverlabel: {bgcolor: panel, bordercolor: line, font: {color: text}},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: text},
      xaxis: {...figure.layout.xaxis, ...theme}, yaxis: {...figure.layout.yaxis, ...theme},
    };
    if (!isOverSteps(figure)) return layout;
    const axis = control("axis"), isLoss = figure.layout.meta.metrics[0] === "loss";
    layout.xaxis = {...layout.xaxis, title: {text: axis.selectedOptions[0].text}, type: control("logx").checked ? "log" : "linear"};
    if (isLoss && control("logy").checked) layout.yaxis.type = "log";
    const traces = tracesOf(figure);
    if (layout.yaxis.type === "log") Object.assign(layout.yaxis, logTicks(...positiveRange(traces.map(trace => trace.y))));
    if (layout.xaxis.type === "log") Object.assign(layout.xaxis, logTicks(...positiveRange(traces.map(trace => trace.x))));
    layout.hovermode = "x unified";
    layout.uirevision = `${axis.value} ${layout.xaxis.type}`;  // a zoom stays while the axis does
    if (isLoss) layout.height = 400;
    const positions = marks.map(mark => along(page.axes[mark.run], axis.value, mark.step));
    const onScreen = layout.xaxis.type === "log" ? positions.map(Math.log10) : positions;
    const ends = positiveRange(traces.map(trace => trace.x));
    const span = layout.xaxis.type === "log" ? Math.log10(ends[1] / ends[0]) : ends[1];
    const labelled = withRoom(onScreen, span / 40);
    layout.shapes = marks.map((mark, i) => {
      const x = positions[i];
      const label = {text: mark.text, textangle: -90, textposition: "end", xanchor: "right", font: {size: 10, color: soft}};
      return {
        type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below", label: isLoss && labelled.has(i) ? label : {},
        line: {width: 1, dash: "dot", color: page.axes.length > 1 ? COLORS[mark.run % COLORS.length] : soft},
      };
    });
    return layout;
  }

  const distance = id => {  // from what the window shows, in pixels
    const box = document.getElementById(id).getBoundingClientRect();
    return Math.max(box.top - innerHeight, -box.bottom, 0);
  };
  const drawOne = id => {
    waiting.delete(id);
    return Plotly.react(id, tracesOf(page.charts[id]), layoutOf(page.charts[id]), OPTIONS);
  };
  let isDrawing = false;
  async function draw() {
    if (isDrawing) return;
    isDrawing = true;
    while (waiting.size > 0) {  // the nearest first; scrolling and clicks come between two charts
      await drawOne([...waiting].reduce((a, b) => distance(b) < distance(a) ? b : a));
      document.body.dataset.opened ??= Math.round(performance.now());  // ms until the first chart
      await new Promise(resolve => setTimeout(resolve));
    }
    isDrawing = false;
    Object.assign(document.body.dataset, {  // what tests/report/test_browser.py reads
      drawn: Object.keys(page.charts).length, steps: page.axes.map(axes => axes.step.at(-1) ?? 0),
      overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    });
  }
  function redraw() {
    control("width").value = width() === 0 ? "off" : `\u00b1 ${Math.max(1, Math.round(width())).toLocaleString("en")} steps`;
    Object.keys(page.charts).forEach(id => waiting.add(id));
    return draw();
  }

  async function loadPlotly() {
    const text = atob(document.getElementById("plotly").textContent), packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  // Append a row of metrics.jsonl to the lines of its run; false for a metric that the page does not know.
  function append(row, run) {
    const values = {};
    const flatten = (inner, prefix) => Object.entries(inner).forEach(([name, value]) => {
      if (value && typeof value === "object" && !Array.isArray(value)) flatten(value, `${prefix}${name}.`);
      else if (typeof value === "number" || typeof value === "boolean") values[prefix + name] = Number(value);
    });
    flatten(row, "");
    const axes = page.axes[run];
    axes.step.push(row.step);
    axes.tokens.push(row.consumed_tokens);
    axes.hours.push((axes.hours.at(-1) ?? 0) + (row.step_time_s ?? 0) / 3600);
    for (const {meta, x, y} of Object.values(page.charts).filter(isOverSteps).flatMap(figure => figure.data)) {
      const value = meta.run === run ? values[meta.column] : undefined;
      if (value === undefined) continue;
      x.push(row.step);
      y.push(value * meta.scale);
      meta.means?.[0].push(row.step);
      meta.means?.[1].push(value * meta.scale);
    }
    return Object.keys(values).every(name => page.columns.includes(name));
  }
  async function follow(count) {
    try {
      let isNew = false;
      for (const run of page.axes.keys()) {
        const reply = await fetch(`rows/${run}?from=${page.live.sizes[run]}`);
        if (!reply.ok) continue;
        const bytes = new Uint8Array(await reply.arrayBuffer());
        page.live.sizes[run] += bytes.length;
        for (const line of new TextDecoder().decode(bytes).split("\n").filter(line => line)) {
          const row = JSON.parse(line);
          if (row.step <= (page.axes[run].step.at(-1) ?? 0)) continue;
          isNew = true;
          if (!append(row, run)) return location.reload();
        }
      }
      if (isNew) redraw();
      if (count % SUMMARY_POLLS === 0) {
        const summary = await (await fetch("summary")).json();
        if (String(summary.version) !== String(page.live.version)) return location.reload();
        document.getElementById("headline").innerHTML = summary.headline;
      }
    } catch (error) {
      console.warn(error);  // the server ended, and may come back
    }
    setTimeout(() => follow(count + 1), POLL_MS);
  }

  ["axis", "smooth", "logx", "logy"].forEach(name => control(name).addEventListener("input", redraw));
  control("controls").addEventListener("submit", event => event.preventDefault());
  control("filter")?.addEventListener("input", event => {
    const words = event.target.value.toLowerCase().split(" ");
    for (const row of event.target.parentElement.querySelectorAll("tr:has(td)"))
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => [...waiting].forEach(drawOne));
  requestAnimationFrame(() => { document.body.dataset.shown = Math.round(performance.now()); });  // ms until the summary
  return loadPlotly().then(redraw).then(() => { if (page.live) setTimeout(() => follow(1), POLL_MS); });
}

if (typeof document !== "undefined")
  start().catch(error => { document.body.dataset.error = error; console.error(error); });
else
  module.exports = {smoothed, along, logTicks, withRoom};

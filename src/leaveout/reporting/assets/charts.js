// Charts as plain SVG, drawn for the width there is, with colours from the style sheet.
const COLOURS = ["#4e79a7", "#e8833a", "#d1495b", "#5aa9a2", "#59a14f", "#c9a227", "#a874a8", "#e377a2", "#9c755f", "#8a8f98"];
const DASHES = ["none", "7 3", "2 3"];

const DRAWN = {};

// Draws into a figure now and whenever its width changes; drawing again replaces what is there.
function chart(id, draw, ...after) {
  const figure = $(id);
  if (!figure) return;
  const first = !DRAWN[id];
  DRAWN[id] = { draw, width: 0 };
  for (const old of figure.querySelectorAll(":scope > :not(figcaption)")) old.remove();
  figure.append(...after);
  const redraw = () => {
    const style = getComputedStyle(figure), now = DRAWN[id];
    const inner = Math.floor(figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
    if (inner === now.width || inner < 50) return;
    now.width = inner;
    figure.querySelector(":scope > svg")?.remove();
    figure.querySelector("figcaption").after(now.draw(inner));
  };
  redraw();
  if (first) new ResizeObserver(redraw).observe(figure);
}

function canvas(width, height, label) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

// Round numbers that cover [low, high] in about `count` steps; all are written with as many decimals.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
  values.step = step;
  return values;
}

function decimals(step) {
  let places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  while (Math.abs(step * 10 ** places - Math.round(step * 10 ** places)) > 1e-6 * 10 ** places) places++;
  return places;
}

// Ticks as text: 18.50, 18.25, 18.00, and never 18.3 beside 18.
const tickText = (step, largest) => (value) =>
  largest < 1e-3 || largest >= 1e6 ? minus(short(value)) : minus((Math.abs(value) < step * 1e-6 ? 0 : value).toFixed(decimals(step)));
const tickPercent = (step) => (value) => tickText(step * 100, 100)(value * 100) + "%";
const largestOf = (values) => Math.max(...values.map(Math.abs), 0);

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);
const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);
const segment = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

// A frame with a grid and numbers along both axes.
function frame(width, height, xs, ys, names) {
  const left = 62, right = width - 10, top = 12, bottom = height - 40;
  const x = scale(xs[0], xs[1], left, right), y = scale(ys[0], ys[1], bottom, top);
  const root = canvas(width, height, names.label);
  const heights = ticks(ys[0], ys[1], 5);
  const high = names.percent ? tickPercent(heights.step) : tickText(heights.step, largestOf(heights));
  for (const tick of heights) {
    root.append(segment(left, y(tick), right, y(tick), "grid"));
    root.append(text(left - 8, y(tick) + 4, high(tick), { "text-anchor": "end" }));
  }
  const widths = names.x_ticks ?? ticks(xs[0], xs[1], Math.max(3, Math.floor(width / 110)));
  const wide = names.x_tick ?? tickText(widths.step, largestOf(widths));
  for (const tick of widths) {
    root.append(segment(x(tick), bottom, x(tick), bottom + 4, "axis"));
    root.append(text(x(tick), bottom + 18, wide(tick), { "text-anchor": "middle" }));
  }
  root.append(segment(left, bottom, right, bottom, "axis"));
  root.append(text(right, height - 4, names.x, { "text-anchor": "end" }));
  if (names.y) root.append(text(left, 6, names.y, { "text-anchor": "start", dy: "-1" }));
  return { root, x, y, left, right, top, bottom };
}

function padded(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function legend(items) {
  return el("ul", { class: "legend" }, ...items.map(({ name, mark }) =>
    el("li", {}, svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, mark), name)));
}

function lineStyle(i) {
  return { stroke: COLOURS[i % COLOURS.length], "stroke-dasharray": DASHES[Math.floor(i / 4) % DASHES.length] };
}

// Curves over a shared axis; `lines` have name, x, y, and low and high where there is an interval.
function curves(id, lines, names, rows) {
  const draw = (width) => {
    const height = Math.min(340, Math.max(230, width * 0.55));
    const all = [...lines.flatMap((line) => [...line.y, ...line.low, ...line.high]), ...(names.base === undefined ? [] : [names.base])];
    const xs = lines.flatMap((line) => line.x);
    const single = Math.min(...xs) === Math.max(...xs);
    const span = single ? [xs[0] - 1, xs[0] + 1] : [Math.min(...xs), Math.max(...xs)];
    const own = single && !names.x_ticks ? { x_ticks: [xs[0]], x_tick: (tick) => String(tick) } : {};
    const axes = frame(width, height, span, padded(names.zero ? [0, ...all] : all), { ...names, ...own });
    const { root, x, y } = axes;
    if (names.zero) root.append(segment(axes.left, y(0), axes.right, y(0), "axis"));
    if (names.base !== undefined) root.append(segment(axes.left, y(names.base), axes.right, y(names.base), "ideal"));
    lines.forEach((line, i) => {
      const beside = (i - (lines.length - 1) / 2) * 16;  // a single number: the lines are points side by side, with bars
      if (line.low.length && single) {
        const at = x(line.x[0]) + beside;
        root.append(svg("line", { x1: at, x2: at, y1: y(line.low[0]), y2: y(line.high[0]), class: "line", stroke: lineStyle(i).stroke }));
      } else if (line.low.length) {
        const band = [...line.x.map((v, k) => [x(v), y(line.high[k])]), ...line.x.map((v, k) => [x(v), y(line.low[k])]).reverse()];
        root.append(svg("path", { d: path(band) + "Z", class: "band", fill: lineStyle(i).stroke }));
      }
    });
    lines.forEach((line, i) => {
      root.append(svg("path", { d: path(line.x.map((v, k) => [x(v), y(line.y[k])])), class: "line", ...lineStyle(i) }));
      line.x.forEach((v, k) => {
        const at = x(v) + (single ? (i - (lines.length - 1) / 2) * 16 : 0);
        root.append(svg("circle", { cx: at, cy: y(line.y[k]), r: single ? 5 : names.dots ? 3 : 1.5, fill: lineStyle(i).stroke }));
        root.append(svg("circle", { cx: at, cy: y(line.y[k]), r: 9, fill: "transparent", "data-tip": `${line.name}\n${names.tip(v, line, k)}: ${(names.percent ? (w) => Number((w * 100).toPrecision(3)) + "%" : (w) => minus(short(w)))(line.y[k])}` }));
      });
    });
    return root;
  };
  const marks = lines.map((line, i) => ({ name: line.name, mark: svg("path", { d: "M0,6L18,6", class: "line", ...lineStyle(i) }) }));
  if (names.base !== undefined) marks.push({ name: "nothing removed", mark: segment(0, 6, 18, 6, "ideal") });
  const key = legend(marks);
  chart(id, draw, key, asTable(names.label, rows.heads, rows.rows));
}

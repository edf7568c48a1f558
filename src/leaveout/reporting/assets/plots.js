// The plots of this page: scores, sums, growth, cleansing, estimates against the truth.
function histogram() {
  const { edges, counts } = METHOD().histogram;
  const label = `Histogram of ${DATA.total} scores from ${short(edges[0])} to ${short(edges[edges.length - 1])}`;
  const draw = (width) => {
    const height = 190;
    const top = Math.sqrt(Math.max(...counts));
    const { root, x, y, bottom } = plain(width, height, [edges[0], edges[edges.length - 1]], [0, top], label);
    counts.forEach((count, i) => {
      if (!count) return;
      const name = edges[i + 1] <= 0 || (edges[i] < 0 && -edges[i] > edges[i + 1]) ? "fill-harm" : "fill-help";
      const bar = { x: x(edges[i]) + 0.5, width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), y: y(Math.sqrt(count)), height: bottom - y(Math.sqrt(count)), rx: 1.5 };
      root.append(svg("rect", { ...bar, class: name, "data-tip": `${count} ${noun(count)} from ${minus(short(edges[i]))} to ${minus(short(edges[i + 1]))}` }));
    });
    return root;
  };
  const rows = counts.map((count, i) => [`${short(edges[i])} to ${short(edges[i + 1])}`, count]);
  chart("histogram", draw, asTable("Number of scores per bin", ["Score", "Count"], rows));
}

// Only the horizontal axis, with its zero marked.
function plain(width, height, xs, ys, label) {
  const bottom = height - 26;
  const x = scale(xs[0], xs[1], 4, width - 4), y = scale(ys[0], ys[1], bottom, 8);
  const root = canvas(width, height, label);
  root.append(segment(4, bottom, width - 4, bottom, "axis"));
  const marks = ticks(xs[0], xs[1], Math.max(4, Math.floor(width / 110)));
  const words = tickText(marks.step, largestOf(marks));
  for (const tick of marks) {
    root.append(segment(x(tick), bottom, x(tick), bottom + 4, "axis"));
    const anchor = x(tick) < 30 ? "start" : x(tick) > width - 30 ? "end" : "middle";
    root.append(text(x(tick), bottom + 18, (tick > 0 ? "+" : "") + words(tick), { "text-anchor": anchor }));
  }
  return { root, x, y, bottom };
}

function sums() {
  const parts = METHOD().parts;
  const draw = (width) => {
    const row = 30, height = parts.length * row + 30;
    const longest = Math.max(...parts.map((part) => part.name.length));
    const left = Math.min(Math.max(40, longest * 7.2 + 14), width * 0.34);
    const low = Math.min(0, ...parts.map((part) => part.harmful)), high = Math.max(0, ...parts.map((part) => part.helpful));
    const x = scale(low, high, left + 4, width - 8);
    const root = canvas(width, height, `Sums of the scores by ${DATA.parts_of}`);
    const marks = ticks(low, high, Math.max(2, Math.floor((width - left) / 90)));
    const words = tickText(marks.step, largestOf(marks));
    for (const tick of marks) {
      root.append(segment(x(tick), 0, x(tick), height - 26, tick === 0 ? "axis" : "grid"));
      root.append(text(x(tick), height - 8, (tick > 0 ? "+" : "") + words(tick), { "text-anchor": "middle" }));
    }
    const fits = Math.max(3, Math.floor((left - 14) / 7.2));
    parts.forEach((part, i) => {
      const y = i * row + 5, net = part.helpful + part.harmful;
      const name = part.name.length > fits ? part.name.slice(0, fits - 1) + "…" : part.name;
      const tip = `${part.name}: ${part.count} ${noun(part.count)}\nhelped ${signed(part.helpful)}, harmed ${signed(part.harmful)}\nnet ${signed(net)}`;
      root.append(text(left - 8, y + 14, name, { "text-anchor": "end", class: "strong" }));
      root.append(svg("rect", { x: x(part.harmful), y, width: Math.max(0, x(0) - x(part.harmful)), height: row - 12, class: "fill-harm", rx: 2 }));
      root.append(svg("rect", { x: x(0), y, width: Math.max(0, x(part.helpful) - x(0)), height: row - 12, class: "fill-help", rx: 2 }));
      root.append(svg("rect", { x: x(net) - 1.5, y: y - 2, width: 3, height: row - 8, class: "fill-net", rx: 1.5 }));
      const area = svg("rect", { x: 0, y: y - 4, width, height: row, fill: "transparent", "data-tip": tip });
      if (DATA.parts_of === "class" && $("label")) {
        area.classList.add("clickable");
        area.addEventListener("click", () => showClass(part.name));
      }
      root.append(area);
    });
    return root;
  };
  const key = legend([["did harm", "fill-harm"], ["helped", "fill-help"], ["net", "fill-net"]].map(([name, kind]) => ({
    name, mark: svg("rect", { x: kind === "fill-net" ? 8 : 1, y: 1, width: kind === "fill-net" ? 3 : 16, height: 10, rx: 2, class: kind }),
  })));
  const rows = parts.map((part) => [part.name, part.count, signed(part.helpful), signed(part.harmful), signed(part.helpful + part.harmful)]);
  chart("sums", draw, key, asTable(`Sums of the scores by ${DATA.parts_of}`, [DATA.parts_of, "Examples", "Helped", "Did harm", "Net"], rows));
}

function growth() {
  const most = [...METHOD().parts].sort((a, b) => Math.abs(b.growth.at(-1)) - Math.abs(a.growth.at(-1))).slice(0, 10);
  const kept = METHOD().parts.filter((part) => most.includes(part));
  const lines = kept.map((part) => ({ name: part.name, x: part.growth.map((_, i) => i), y: part.growth, low: [], high: [] }));
  const names = {
    label: `Cumulative influence by ${DATA.parts_of} over training`, zero: true, x: "part of training",
    x_tick: (tick) => (Number.isInteger(tick) && DATA.spans[tick] ? DATA.spans[tick].replace(/^(epoch|step)s? /, "") : ""),
    tip: (v) => "up to " + DATA.spans[v],
  };
  names.x = DATA.spans[0].startsWith("epoch") ? "epoch" : "step";
  const rows = DATA.spans.map((span, i) => [span, ...kept.map((part) => signed(part.growth[i]))]);
  curves("growth", lines, names, { heads: ["Up to", ...kept.map((part) => part.name)], rows });
}

function cleansing() {
  const { measure } = DATA.cleansing;
  const counts = DATA.cleansing.lines.flatMap((line) => line.x);
  // Numbers that reach over more than a factor of 30 are drawn on a logarithmic scale.
  const wide = Math.max(...counts) > 30 * Math.min(...counts);
  const place = (count) => (wide ? Math.log10(count) : count);
  const lines = DATA.cleansing.lines.map((line) => ({ ...line, x: line.x.map(place), counts: line.x }));
  const names = { label: `${measure} against examples removed`, x: "examples removed", dots: true, base: DATA.cleansing.base, tip: (_, line, k) => `${line.counts[k].toLocaleString("en")} removed` };
  names.percent = measure === "Test error";
  const words = names.percent ? (value) => Number((value * 100).toPrecision(3)) + "%" : short;
  if (wide) {
    const powers = [1, 10, 100, 1000, 10000, 100000, 1e6].filter((count) => count <= Math.max(...counts));
    names.x_ticks = powers.map(place);
    names.x_tick = (tick) => powers[names.x_ticks.indexOf(tick)].toLocaleString("en");
  }
  const rows = lines.flatMap((line) => line.counts.map((count, k) => [line.name, count, words(line.y[k]), line.low.length ? `${words(line.low[k])} to ${words(line.high[k])}` : "unknown"]));
  curves("curve", lines, names, { heads: ["Removed by", "Examples", measure, "Interval"], rows });
}

function scatter() {
  const points = METHOD().check.points;
  const both = padded(points.flatMap((point) => [point.score, point.truth]));
  const across = METHOD().unit ? padded(points.map((point) => point.score)) : both;
  const range = METHOD().unit ? padded(points.map((point) => point.truth)) : both;
  const draw = (width) => {
    const height = Math.min(420, Math.max(260, width * 0.75));
    const { root, x, y, left, right } = frame(width, height, across, range, {
      label: `Estimated against true change of the loss for ${points.length} ${noun(2)}`, x: METHOD().unit ? "score" : "estimated change of the loss", y: "true change",
    });
    if (!METHOD().unit) root.append(svg("line", { x1: left, y1: y(range[0]), x2: right, y2: y(range[1]), class: "ideal" }));
    for (const point of points) {
      const at = { "data-tip": `${noun(1)} ${point.id}\nestimate ${signed(point.score)}\ntruth ${signed(point.truth)}` };
      const cx = x(point.score), cy = y(point.truth);
      const mark = point.sample === "extreme"
        ? svg("circle", { cx, cy, r: 4.5, class: "mark-extreme", ...at })
        : svg("rect", { x: cx - 3.8, y: cy - 3.8, width: 7.6, height: 7.6, class: "mark-random", ...at });
      if (PLACE.has(String(point.id))) {
        mark.classList.add("clickable");
        mark.addEventListener("click", () => detail(PLACE.get(String(point.id))));
      }
      root.append(mark);
    }
    return root;
  };
  const key = legend([
    { name: "most extreme scores", mark: svg("circle", { cx: 9, cy: 6, r: 5, class: "mark-extreme" }) },
    { name: "drawn at random", mark: svg("rect", { x: 4.5, y: 1.5, width: 9, height: 9, class: "mark-random" }) },
    ...(METHOD().unit ? [] : [{ name: "estimate = truth", mark: svg("line", { x1: 0, y1: 6, x2: 18, y2: 6, class: "ideal" }) }]),
  ]);
  const rows = points.map((point) => [point.id, signed(point.score), signed(point.truth), point.sample]);
  chart("scatter", draw, key, asTable("Estimate against truth", [DATA.groups ? "Group" : "Example", "Estimate", "Truth", "Sample"], rows, true));
}

// A bar for each part of training: when an example's influence arose.
function spark(values) {
  const largest = values.reduce((best, value, i) => (Math.abs(value) > Math.abs(values[best]) ? i : best), 0);
  const words = `Most influence, by SGD-IE, from ${DATA.spans[largest]}`;
  const width = 160, height = 34;
  const low = Math.min(0, ...values), high = Math.max(0, ...values);
  const y = scale(low, high, height - 1, 1), step = width / values.length;
  const size = `width: min(100%, ${values.length * 1.4}rem)`;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", style: size, role: "img", "aria-label": words });
  root.append(segment(0, y(0), width, y(0), "grid"));
  values.forEach((value, i) => {
    const bar = { x: i * step + step * 0.1, width: step * 0.8, y: Math.min(y(0), y(value)), height: Math.abs(y(value) - y(0)), class: value < 0 ? "fill-harm" : "fill-help" };
    root.append(svg("rect", bar));
    root.append(svg("rect", { x: i * step, y: 0, width: step, height, fill: "transparent", "data-tip": `${DATA.spans[i]}: ${signed(value)}` }));
  });
  return el("div", { class: "spark" }, root, el("p", { "aria-hidden": "true" }, `when, by SGD-IE: mostly ${DATA.spans[largest]}`));
}

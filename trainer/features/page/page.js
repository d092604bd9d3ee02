"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const all = (query) => [...document.querySelectorAll(query)];
  const state = { x: "step", log: false, smooth: 0, off: new Set(), at: null };

  // The address keeps the view: report.html#dark&x=tokens&log&smooth=0.6
  const readHash = () => {
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value] = part.split("=");
      if (name === "dark" || name === "light") root.dataset.theme = name;
      if (name === "x" && data.runs[0].x[value]) state.x = value;
      if (name === "log") state.log = true;
      if (name === "smooth") state.smooth = Math.min(0.98, Math.max(0, Number(value) || 0));
    }
  };
  const keepHash = () => {
    const parts = [root.dataset.theme, state.x !== "step" && `x=${state.x}`, state.log && "log", state.smooth && `smooth=${state.smooth}`];
    if (location.protocol !== "about:") history.replaceState(null, "", `#${parts.filter(Boolean).join("&")}`);  // a notebook's frame
  };

  const BYTES = [" B", " KiB", " MiB", " GiB", " TiB"];
  const scaled = (value, base, units, digits) => {
    let n = 0;
    for (; Math.abs(value) >= 999.5 && n < units.length - 1; n++) value /= base;
    return `${+value.toPrecision(digits)}${units[n]}`;
  };
  const shown = (value, kind, digits = 0) => {
    const few = Math.max(3, digits);
    if (value === null || value === undefined) return "–";
    if (kind === "bytes") return scaled(value, 1024, BYTES, few);
    if (kind === "share") return `${+(100 * value).toPrecision(few)}%`;
    if (kind === "seconds") return value >= 3600 ? `${+(value / 3600).toPrecision(3)} h` : value >= 60 ? `${+(value / 60).toPrecision(3)} min` : `${+value.toPrecision(3)} s`;
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 10000) return scaled(value, 1000, ["", "k", "M", "B", "T"], few);
    return size < 0.001 ? (+value.toPrecision(few)).toExponential() : `${+value.toPrecision(Math.max(4, digits))}`;
  };

  const ticks = (low, high, count, log, least = 0) => {
    if (log) {
      const found = [];
      const from = Math.log10(low), to = Math.log10(high);
      if (to - from < 0.9) return ticks(low, high, count, false);
      const near = to - from < 2.2 ? [1, 2, 5] : [1];
      const each = Math.max(1, Math.ceil((to - from) / 5));
      for (let power = Math.floor(from); power <= to; power += each)
        for (const n of near) if (n * 10 ** power >= low && n * 10 ** power <= high) found.push(n * 10 ** power);
      return found;
    }
    const rough = Math.max(least, (high - low) / count || 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((n) => n * power >= rough * 0.8) * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
    return found;
  };

  // At least three, where there is room.
  const ticksAcross = (low, high, width, least) => {
    let count = Math.max(3, width / 110), found = ticks(low, high, count, false, least);
    while (found.length < 3 && count < 9) found = ticks(low, high, ++count, false, least);
    return found;
  };

  // The digits that tell a tick from the next one.
  const digitsOf = (found) => {
    const power = (n) => Math.floor(Math.log10(n * 1.0001));
    return found.length > 1 ? Math.min(15, power(Math.max(...found.map(Math.abs))) - power(found[1] - found[0]) + 1) : 0;
  };

  // A mean that forgets, corrected for where it begins; a gap stays a gap.
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = state.smooth * sum + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return sum / weight;
    });
  };

  // Where a step stands along the axis, between the steps whose places are known.
  const along = (run, step) => {
    const steps = run.x.step, places = run.x[state.x], found = steps.findIndex((each) => each >= step);
    if (found < 1) return places[found < 0 ? places.length - 1 : 0];
    const part = (step - steps[found - 1]) / (steps[found] - steps[found - 1]);
    return places[found - 1] + part * (places[found] - places[found - 1]);
  };

  const linesOf = (chart) => {
    const lines = [];
    data.runs.forEach((run, n) => {
      if (state.off.has(n)) return;
      for (const name of [chart.key, chart.held_out]) {
        if (!name || !run.curves[name]) continue;
        const [at, values, middles, means] = run.curves[name];
        const isHeldOut = /^(ema_)?eval_/.test(name), isOne = data.runs.length === 1;
        const line = { run: n, isHeldOut, label: isOne ? (isHeldOut ? "held out" : "training") : run.name };
        line.color = isOne && isHeldOut && chart.held_out ? 1 : n % 8;
        line.x = at.map((step) => along(run, step));
        line.y = values;
        if (state.smooth && !isHeldOut) {
          line.smoothX = middles.length ? middles.map((step) => along(run, step)) : line.x;
          line.smoothY = smoothed(middles.length ? means : values);
        }
        lines.push(line);
      }
    });
    return lines;
  };

  const make = (parent, tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  };

  const widened = (low, high, log) => {
    if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    return log ? [low, high] : [low - 0.04 * (high - low), high + 0.04 * (high - low)];
  };

  // Draws the grid, and gives where a value stands.
  const drawLevels = (svg, box, low, high, kind, log) => {
    const grow = log ? Math.log : (y) => y, place = (y) => box.bottom - ((grow(y) - grow(low)) / (grow(high) - grow(low))) * (box.bottom - box.top);
    const power = kind === "bytes" ? Math.min(4, Math.max(0, Math.floor(Math.log(high) / Math.log(1024)))) : 0, unit = 1024 ** power;
    const levels = ticks(low / unit, high / unit, box.bottom > 198 ? 5 : 4, log), digits = digitsOf(levels);
    for (const n of levels) {
      const y = place(n * unit), text = kind === "bytes" ? `${+n.toPrecision(Math.max(3, digits))}${BYTES[power]}` : shown(n, kind, digits);
      make(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
      make(svg, "text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, text);
    }
    return place;
  };

  const draw = (figure) => {
    const chart = data.charts[figure.dataset.chart], svg = figure.querySelector("svg");
    const width = svg.clientWidth, height = svg.clientHeight, lines = linesOf(chart);
    if (!width) return;
    svg.textContent = "";
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const numbers = lines.flatMap((line) => line.y).filter((y) => y !== null && (!state.log || y > 0));
    const ends = (run) => Object.values(run.curves).flatMap(([at]) => [along(run, at[0]), along(run, at[at.length - 1])]);
    const across = data.runs.filter((_, n) => !state.off.has(n)).flatMap(ends);
    if (!numbers.length) return void (figure.plot = null);
    let low = numbers.reduce((a, b) => Math.min(a, b)), high = numbers.reduce((a, b) => Math.max(a, b));
    [low, high] = widened(low, high, state.log);
    const left = across.reduce((a, b) => Math.min(a, b)), right = Math.max(across.reduce((a, b) => Math.max(a, b)), left + 1e-9);
    const box = { left: 52, right: width - 6, top: 6, bottom: height - 22 };
    const px = (x) => box.left + ((x - left) / (right - left)) * (box.right - box.left);
    const py = drawLevels(svg, box, low, high, chart.kind, state.log);
    const own = ticksAcross(left, right, width, state.x === "seconds" ? 0 : 1);
    for (const x of own) {
      const anchor = px(x) < box.left + 14 ? "start" : px(x) > box.right - 18 ? "end" : "middle";
      make(svg, "text", { x: px(x), y: height - 4, "text-anchor": anchor }, shown(x, state.x === "seconds" ? "seconds" : "", digitsOf(own)));
    }
    const path = (xs, ys, classes) => {
      let way = "", open = false;
      xs.forEach((x, i) => {
        const there = ys[i] !== null && (!state.log || ys[i] > 0);
        if (there) way += `${open ? "L" : "M"}${px(x).toFixed(1)},${py(ys[i]).toFixed(1)}`;
        open = there;
      });
      make(svg, "path", { d: way, class: classes });
    };
    for (const line of lines) {
      const style = `line s${line.color}${line.isHeldOut && data.runs.length > 1 ? " dashed" : ""}`;
      path(line.x, line.y, line.smoothX ? `${style} faint` : style);
      if (line.smoothX) path(line.smoothX, line.smoothY, style);
      const few = line.x.length === 1 || (line.isHeldOut && line.x.length < 40);
      if (few) line.x.forEach((x, i) => line.y[i] !== null && (!state.log || line.y[i] > 0) && make(svg, "circle", { class: `s${line.color}`, cx: px(x), cy: py(line.y[i]), r: 2.6 }));
    }
    if (chart.key === "loss") data.runs.forEach((run, n) => {
      if (!state.off.has(n)) for (const [step, kind] of run.marks) {
        const x = px(along(run, step)), mark = make(svg, "line", { class: `mark ${kind}`, x1: x, x2: x, y1: box.bottom - 7, y2: box.bottom });
        make(mark, "title", {}, `${kind} ${step}`);
      }
    });
    const cursor = make(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    figure.plot = { lines, px, box, left, right, cursor, chart };
  };

  // The metric of each run by its value of a setting, with a line through the means.
  const drawSwept = (figure) => {
    const { key, words, points } = data.swept[figure.dataset.swept], svg = figure.querySelector("svg");
    const width = svg.clientWidth, height = svg.clientHeight, there = points.filter(([run]) => !state.off.has(run));
    if (!width) return;
    svg.textContent = "";
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!there.length) return;
    const xs = [...new Set(there.map(([, x]) => x))].sort((a, b) => a - b), ys = there.map(([, , y]) => y);
    const first = words.length ? 0 : xs[0], last = words.length ? words.length - 1 : xs[xs.length - 1];
    const isLog = !words.length && first > 0 && last / first >= 10, grow = isLog ? Math.log : (x) => x;
    const box = { left: 52, right: width - 6, top: 6, bottom: height - 22 }, room = words.length ? (box.right - box.left) / words.length / 2 : 24;
    const px = (x) => box.left + room + ((grow(x) - grow(first)) / (grow(last) - grow(first) || 1)) * (box.right - box.left - 2 * room);
    const py = drawLevels(svg, box, ...widened(Math.min(...ys), Math.max(...ys), false), "", false);
    const own = words.length || xs.length <= 6 ? xs : isLog ? ticks(first, last, 4, true) : ticksAcross(first, last, width, 0);
    let end = -1e9;
    for (const x of own) {
      const letters = Math.max(3, Math.floor((2 * room) / 7)), word = words.length ? words[x] : shown(x);
      const text = words.length && word.length > letters ? `${word.slice(0, letters - 1)}…` : word, half = 3.4 * text.length;
      if (px(x) - half < end + 4) continue;
      end = px(x) + half;
      make(svg, "text", { x: px(x), y: height - 4, "text-anchor": "middle" }, text);
    }
    const means = xs.map((x) => {
      const same = there.filter((each) => each[1] === x).map(([, , y]) => y);
      return `${px(x).toFixed(1)},${py(same.reduce((a, b) => a + b) / same.length).toFixed(1)}`;
    });
    if (!words.length && xs.length <= 12) make(svg, "path", { d: `M${means.join("L")}`, class: "line mean" });
    for (const [run, x, y] of there) {
      const point = make(svg, "circle", { class: `s${run % 8}`, cx: px(x), cy: py(y), r: 4.5 });
      make(point, "title", {}, `${data.runs[run].name}: ${key} ${words.length ? words[x] : x}, ${shown(y)}`);
    }
  };

  const nearest = (xs, x) => xs.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? i : best), 0);

  const read = (figure) => {
    const plot = figure.plot, out = figure.querySelector("figcaption span");
    out.textContent = "";
    if (!plot) return;
    const at = state.at === null ? plot.right : Math.min(plot.right, Math.max(plot.left, state.at));
    plot.cursor.setAttribute("visibility", state.at === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) plot.cursor.setAttribute(end, plot.px(at));
    const say = (text, color) => {
      const span = out.appendChild(document.createElement("span"));
      if (color !== undefined) span.appendChild(document.createElement("i")).className = `key s${color}`;
      span.append(text);
    };
    if (state.at !== null) say(`${state.x} ${state.x === "seconds" ? shown(at, "seconds") : shown(Math.round(at))}`.replace("seconds ", ""));
    const isOne = data.runs.length === 1, paired = isOne && plot.chart.held_out;
    const texts = new Map();  // one for each line of a run alone, and for each of several runs
    for (const line of plot.lines) {
      const value = shown(line.y[nearest(line.x, at)], plot.chart.kind), key = isOne ? line.label : line.run;
      const before = texts.get(key);
      texts.set(key, { color: line.color, text: before ? `${before.text} / ${value}` : paired ? `${line.label} ${value}` : value });
    }
    const each = [...texts.values()];
    for (const { text, color } of each.slice(0, 6)) say(text, !isOne || paired ? color : undefined);
    if (each.length > 6) say("…");
  };

  const drawAll = () => {
    for (const figure of all("figure[data-chart]")) {
      draw(figure);
      read(figure);
    }
    all("figure[data-swept]").forEach(drawSwept);
  };

  const refresh = () => {
    for (const button of all("[data-x]")) button.setAttribute("aria-pressed", String(button.dataset.x === state.x));
    for (const button of all("[data-run]")) button.setAttribute("aria-pressed", String(!state.off.has(+button.dataset.run)));
    const log = document.getElementById("log"), smooth = document.getElementById("smooth");
    if (log) log.checked = state.log;
    if (smooth) smooth.value = state.smooth;
    drawAll();
  };

  const change = () => {
    state.at = null;
    keepHash();
    refresh();
  };
  for (const button of all("[data-x]")) button.addEventListener("click", () => { state.x = button.dataset.x; change(); });
  for (const button of all("[data-run]")) button.addEventListener("click", (event) => {
    const run = +button.dataset.run, others = data.runs.map((_, n) => n).filter((n) => n !== run);
    // With Shift a run is shown alone.
    if (event.shiftKey) state.off = new Set(others);
    else if (!state.off.delete(run)) state.off.add(run);
    change();
  });
  document.getElementById("log")?.addEventListener("change", (event) => { state.log = event.target.checked; change(); });
  document.getElementById("smooth")?.addEventListener("input", (event) => { state.smooth = +event.target.value; change(); });
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = theme === "dark" ? "light" : "dark";
    keepHash();
  });
  for (const figure of all("figure[data-chart]")) {
    const svg = figure.querySelector("svg");
    const move = (event) => {
      if (!figure.plot) return;
      const { box, left, right } = figure.plot, x = event.clientX - svg.getBoundingClientRect().left;
      state.at = left + Math.min(1, Math.max(0, (x - box.left) / (box.right - box.left))) * (right - left);
      all("figure[data-chart]").forEach(read);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { state.at = null; all("figure[data-chart]").forEach(read); });
  }
  for (const details of all("details")) details.addEventListener("toggle", drawAll);
  addEventListener("resize", drawAll);
  addEventListener("beforeprint", drawAll);
  addEventListener("hashchange", () => { readHash(); refresh(); });
  readHash();
  refresh();
})();

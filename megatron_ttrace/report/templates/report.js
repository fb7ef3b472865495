"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const total = data.number.length;
  const byId = (id) => document.getElementById(id);
  const num = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);
  const text = (column, row) => data.strings[data[column][row]];
  const rowOf = new Map(data.number.map((number, row) => [number, row]));

  // Names are data: elements are made with textContent only, never from markup.
  const make = (tag, className, content) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (content !== undefined) element.textContent = content;
    return element;
  };

  const sci = (value) => {
    if (value === null) return "-";
    value = num(value);
    if (!Number.isFinite(value)) return String(value);
    return value === 0 ? "0" : value.toExponential(2).replace("e+", "e");
  };
  const factor = (value) => {
    if (value === null) return "-";
    value = num(value);
    if (!Number.isFinite(value)) return String(value);
    if (Math.abs(value) >= 9999.5) return value.toExponential(1).replace("e+", "e");
    return Math.abs(value) >= 99.95 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  };
  const share = (value) => {
    const percent = 100 * num(value);
    if (!(percent >= 0.01 && percent < 10000)) return sci(value);
    return `${percent >= 99.95 ? percent.toFixed(0) : Number(percent.toPrecision(3))} %`;
  };
  const error = (row) => {
    if (data.rel_err_eps[row] === null || num(data.rel_err[row]) === 0) return sci(data.rel_err[row]);
    return `${share(data.rel_err[row])} (${factor(data.rel_err_eps[row])} ε)`;
  };
  const margin = (row) => (data.margin[row] === null ? "-" : `${factor(data.margin[row])}×`);
  const kind = (row) => data.kinds[data.kind[row]];
  const outcome = (row) => data.outcomes[data.outcome[row]];
  const fails = (row) => data.failures[data.outcome[row]];
  const tensor = (row) => `${text("name", row)} ${kind(row)}.${data.index[row]}`;
  const when = (row) =>
    `it ${data.iteration[row]}` + (data.microbatch[row] < 0 ? "" : ` mb ${data.microbatch[row]}`);

  // The same order as table.severity in Python: failures, passes, unchecked; then the margin.
  const level = (row) => (fails(row) ? 2 : outcome(row) === "pass" ? 1 : 0);
  const size = (row) => {
    if (data.margin[row] === null || data.luck[row]) return fails(row) ? Infinity : -1;
    const value = num(data.margin[row]);
    return Number.isNaN(value) ? Infinity : value;
  };
  const worse = (a, b) => {
    if (level(a) !== level(b)) return level(b) - level(a);
    const [one, two] = [size(a), size(b)];
    return one === two ? a - b : two - one;
  };

  const swatch = (row) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("aria-hidden", "true");
    const rect = document.createElementNS(space, "rect");
    rect.setAttribute("width", "10");
    rect.setAttribute("height", "10");
    rect.setAttribute("class", `k${data.colour[row]}`);
    svg.append(rect);
    return svg;
  };

  // --- details -----------------------------------------------------------------------------
  const detail = byId("detail");
  const body = byId("detail-body");
  let selectedRow = -1;
  let returnFocus = null;

  const cellMembers = (cell) => {
    const rows = [];
    for (let row = 0; row < total; row++) if (data.cell[row] === cell) rows.push(row);
    return rows.sort(worse);
  };

  const neighbours = (row) => {
    const same = (other) =>
      data.iteration[other] === data.iteration[row] && data.microbatch[other] === data.microbatch[row];
    const before = [];
    const after = [];
    for (let at = row - 1; at >= 0 && before.length < 4; at--) if (same(at)) before.unshift(at);
    for (let at = row + 1; at < total && after.length < 4; at++) if (same(at)) after.push(at);
    return [...before, row, ...after];
  };

  const mini = (rows, here, label) => {
    const list = make("ul", "mini");
    for (const row of rows) {
      const item = make("li", row === here ? "here" : "");
      const button = make("button");
      button.type = "button";
      button.append(swatch(row), make("span", "what", label(row)), make("span", fails(row) ? "bad-text" : "", `${outcome(row)} ${margin(row)}`));
      button.addEventListener("click", () => show(row));
      item.append(button);
      list.append(item);
    }
    return list;
  };

  const svgElement = (tag, attributes, content) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (content !== undefined) element.textContent = content;
    return element;
  };

  // Elements by the decade of their error, with the tolerance of the whole tensor as a line.
  const histogram = (found, tolerance) => {
    const counts = [found.exact, ...found.counts];
    const most = Math.max(1, ...counts);
    const [bar, top, bottom] = [26, 14, 78];
    const svg = svgElement("svg", { class: "histogram", viewBox: `0 0 ${counts.length * bar + 8} 98`, role: "img", "aria-label": "Histogram of the error of single elements" });
    counts.forEach((count, at) => {
      const tall = count ? Math.max(2, (count / most) * (bottom - top)) : 0;
      const decade = found.lowest + at - 1;
      const beyond = at > 0 && tolerance !== null && 10 ** (decade + 0.5) > num(tolerance);
      const rect = svgElement("rect", { class: at === 0 ? "k0" : beyond ? "k5" : "k2", x: 4 + at * bar, y: bottom - tall, width: bar - 3, height: tall });
      rect.append(svgElement("title", {}, `${count.toLocaleString("en")} elements`));
      svg.append(rect, svgElement("text", { class: "axis mid", x: 4 + at * bar + (bar - 3) / 2, y: 91 }, at === 0 ? "0" : `1e${decade}`));
      if (count) svg.append(svgElement("text", { class: "axis mid", x: 4 + at * bar + (bar - 3) / 2, y: bottom - tall - 3 }, count >= 10000 ? count.toExponential(0).replace("e+", "e") : count));
    });
    const at = tolerance === null || num(tolerance) <= 0 ? -1 : Math.log10(num(tolerance)) - found.lowest + 1;
    if (at > 0 && at < counts.length) {
      svg.append(svgElement("line", { class: "limit", x1: 4 + at * bar - 1.5, x2: 4 + at * bar - 1.5, y1: 4, y2: bottom }));
    }
    return svg;
  };

  const elements = (row) => {
    const found = data.residuals[data.number[row]];
    if (!found) {
      return fails(row) ? [make("p", "more", "Single elements are shown for the worst failures of each tensor only.")] : [];
    }
    const table = make("table", "elements");
    const line = (cells, tag) => {
      const made = make("tr");
      cells.forEach((cell, at) => made.append(make(tag, at ? "num" : "mono", cell)));
      return made;
    };
    // One row per element, with the values of all ranks side by side.
    const byIndex = new Map();
    for (const [index, reference, candidate, rank] of found.worst) {
      const place = `[${index.join(", ")}]`;
      if (!byIndex.has(place)) byIndex.set(place, [reference, new Map()]);
      byIndex.get(place)[1].set(rank, candidate);
    }
    const ranks = [...new Set(found.worst.map(([, , , rank]) => rank))].sort((a, b) => a - b);
    table.append(line(["logical index", "reference", ...ranks.map((rank) => `rank ${rank}`)], "th"));
    for (const [index, [reference, values]] of byIndex) {
      table.append(line([index, sci(reference), ...ranks.map((rank) => (values.has(rank) ? sci(values.get(rank)) : ""))], "td"));
    }
    const slices = make("dl");
    for (const [rank, boxes] of found.boxes) slices.append(make("dt", "", `rank ${rank}`), make("dd", "mono", boxes));
    return [
      make("h4", "", `Error of ${found.total.toLocaleString("en")} elements on failing ranks`),
      histogram(found, data.tolerance[row]),
      make("p", "more", "in units of the reference's root mean square; the line is the tolerance of the whole tensor"),
      make("h4", "", "Worst elements"), table,
      make("h4", "", "Slices held by failing ranks"), slices,
    ];
  };

  // The part of the address that leads to a tensor, for links to it.
  const link = (row) =>
    "#" + [data.iteration[row], data.microbatch[row], kind(row), data.index[row], text("name", row)].map(encodeURIComponent).join("/");
  const follow = () => {
    if (location.hash.length < 2) return;
    for (let row = 0; row < total; row++) if (link(row) === location.hash) { show(row); return; }
  };

  const show = (row) => {
    const takesFocus = detail.hidden || detail.contains(document.activeElement);
    if (detail.hidden) returnFocus = document.activeElement;
    selectedRow = row;
    const cell = data.cell[row];
    const [, , count, failures, unchecked] = data.cells[cell];
    const facts = [
      ["verdict", outcome(row)],
      ["direction", data.directions[data.direction[row]]],
      ["when", data.microbatch[row] < 0 ? `iteration ${data.iteration[row]}` : `iteration ${data.iteration[row]}, microbatch ${data.microbatch[row]}`],
      ["ranks", text("ranks", row)],
      ["placement", text("placement", row) || "-"],
      ["shape", text("shape", row)],
      ["error", error(row)],
      ["tolerance", sci(data.tolerance[row])],
      ["margin", margin(row)],
      ["note", text("note", row) || "-"],
      ["number", `${data.number[row]} in execution order`],
    ];
    const list = make("dl");
    for (const [key, value] of facts) {
      list.append(make("dt", "", key), make("dd", key === "verdict" && fails(row) ? "bad-text" : "", value));
    }
    const members = cellMembers(cell);
    const shown = members.slice(0, 40);
    body.replaceChildren(
      make("h3", "", tensor(row)),
      list,
      ...elements(row),
      make("h4", "", "Neighbours in execution order"),
      mini(neighbours(row), row, tensor),
      make("h4", "", `This cell: ${count} verdicts, ${failures} fail, ${unchecked} unchecked`),
      mini(shown, row, (other) => `${when(other)} ${text("name", other).slice(-48)}.${data.index[other]}`),
    );
    if (members.length > shown.length) body.append(make("p", "more", `and ${members.length - shown.length} more in the list`));
    detail.hidden = false;
    detail.scrollTop = 0;
    if (takesFocus) detail.focus();
    history.replaceState(null, "", link(row));
    markCell(cell);
    draw();
  };

  const close = () => {
    if (detail.hidden) return;
    detail.hidden = true;
    selectedRow = -1;
    history.replaceState(null, "", location.pathname);
    draw();
    if (returnFocus) returnFocus.focus();
  };
  byId("detail-close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });

  // --- heat map ----------------------------------------------------------------------------
  const map = byId("map");
  const rects = new Map();
  const worst = new Array(data.cells.length).fill(-1);
  for (let row = 0; row < total; row++) {
    const cell = data.cell[row];
    if (worst[cell] < 0 || worse(row, worst[cell]) < 0) worst[cell] = row;
  }
  let selectedCell = -1;
  const collect = () => {
    rects.clear();
    for (const rect of map.querySelectorAll("div:not([hidden]) > svg rect[data-c]")) rects.set(Number(rect.dataset.c), rect);
  };
  if (map) collect();
  const rowAt = (cell) =>
    Math.floor((Number(rects.get(cell).getAttribute("y")) - Number(map.dataset.header)) / Number(map.dataset.pitch));

  const unfold = byId("unfold");
  const toggle = () => {
    const folded = unfold.getAttribute("aria-expanded") === "true";
    unfold.setAttribute("aria-expanded", String(!folded));
    unfold.textContent = unfold.textContent.replace(/^\w+/, folded ? "Unfold" : "Fold");
    markCell(-1);
    [...map.children].forEach((one, at) => { one.hidden = (at === 0) !== folded; });
    collect();
  };
  if (unfold) {
    unfold.hidden = false;
    unfold.addEventListener("click", toggle);
  }

  const markCell = (cell) => {
    rects.get(selectedCell)?.classList.remove("selected");
    selectedCell = cell;
    rects.get(cell)?.classList.add("selected");
  };
  const openCell = (cell) => { if (worst[cell] >= 0) show(worst[cell]); };

  const tip = byId("tip");
  const tipFor = (cell, x, y) => {
    const row = worst[cell];
    if (row < 0) return;
    const [, , count, failures] = data.cells[cell];
    tip.textContent = `${tensor(row)}\n${outcome(row)}, margin ${margin(row)}, error ${error(row)}\n${failures} of ${count} fail`;
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(0, Math.min(y + 16, innerHeight - tip.offsetHeight - 8))}px`;
  };

  const step = (rowStep, columnStep) => {
    if (!rects.has(selectedCell)) {
      return [...rects.keys()].reduce((first, cell) => (worse(worst[cell], worst[first]) < 0 ? cell : first));
    }
    const [row, column] = [rowAt(selectedCell), data.cells[selectedCell][1]];
    let best = selectedCell;
    let distance = Infinity;
    rects.forEach((_, cell) => {
      const [r, c] = [rowAt(cell), data.cells[cell][1]];
      const along = rowStep ? (r - row) * rowStep : (c - column) * columnStep;
      const across = rowStep ? c - column : r - row;
      if (along > 0 && across === 0 && along < distance) { best = cell; distance = along; }
    });
    return best;
  };

  if (map) {
    map.addEventListener("click", (event) => {
      const cell = event.target.dataset?.c;
      if (cell !== undefined) openCell(Number(cell));
      else if (event.target.classList.contains("fold")) toggle();
    });
    map.addEventListener("mousemove", (event) => {
      const cell = event.target.dataset?.c;
      if (cell === undefined) tip.hidden = true;
      else tipFor(Number(cell), event.clientX, event.clientY);
    });
    map.addEventListener("mouseleave", () => { tip.hidden = true; });
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    map.addEventListener("keydown", (event) => {
      if (moves[event.key] && data.cells.length) {
        event.preventDefault();
        markCell(step(...moves[event.key]));
        const rect = rects.get(selectedCell);
        rect?.scrollIntoView({ block: "nearest", inline: "nearest" });
        if (!detail.hidden) openCell(selectedCell);
        else if (rect) tipFor(selectedCell, rect.getBoundingClientRect().left, rect.getBoundingClientRect().top);
      } else if (event.key === "Enter" && selectedCell >= 0) openCell(selectedCell);
    });
    map.addEventListener("blur", () => { tip.hidden = true; });
  }

  document.addEventListener("click", (event) => {
    const number = event.target.dataset?.row;
    if (number === undefined) return;
    const row = rowOf.get(Number(number));
    if (row !== undefined) show(row);
  });

  // --- list --------------------------------------------------------------------------------
  const list = byId("list");
  const space = byId("list-space");
  const height = 26;
  let matching = [];

  const filter = () => {
    const words = byId("f-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wantOutcome = byId("f-outcome").value;
    const wantDirection = byId("f-direction").value;
    const wantKind = byId("f-kind").value;
    const lower = data.strings.map((value) => value.toLowerCase());
    matching = [];
    for (let row = 0; row < total; row++) {
      if (wantOutcome === "!" ? !fails(row) : wantOutcome && outcome(row) !== wantOutcome) continue;
      if (wantKind && kind(row) !== wantKind) continue;
      if (wantDirection && data.directions[data.direction[row]] !== wantDirection) continue;
      const name = lower[data.name[row]];
      const note = lower[data.note[row]];
      if (!words.every((word) => name.includes(word) || note.includes(word))) continue;
      matching.push(row);
    }
    if (byId("f-order").value === "margin") matching.sort(worse);
    byId("f-count").textContent = `${matching.length.toLocaleString("en")} of ${total.toLocaleString("en")}`;
    space.style.height = `${matching.length * height}px`;
    list.scrollTop = 0;
    draw();
  };

  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / height) - 6);
    const last = Math.min(matching.length, first + Math.ceil(list.clientHeight / height) + 12);
    const rows = [];
    for (let at = first; at < last; at++) {
      const row = matching[at];
      const line = make("div", `lrow${fails(row) ? " bad" : ""}${outcome(row) === "unchecked" ? " unchecked" : ""}${row === selectedRow ? " selected" : ""}`);
      line.setAttribute("role", "row");
      line.style.top = `${at * height}px`;
      const name = make("span", "mono", text("name", row));
      name.title = text("name", row);
      line.append(
        make("span", "", data.number[row]), make("span", "", when(row)), name,
        make("span", "", `${kind(row)}.${data.index[row]}`), make("span", "outcome", outcome(row)),
        make("span", "num", error(row)), make("span", "num", sci(data.tolerance[row])),
        make("span", "num", margin(row)), make("span", "", text("ranks", row)),
      );
      for (const part of line.children) part.setAttribute("role", "cell");
      line.addEventListener("click", () => show(row));
      rows.push(line);
    }
    space.replaceChildren(...rows);
  };

  let waiting = false;
  list.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  });
  addEventListener("resize", draw);
  addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("details")) fold.open = true; });
  const filters = byId("filters");
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  if (data.outcome.some((value) => data.failures[value])) byId("f-outcome").value = "!";
  filter();
  addEventListener("hashchange", follow);
  follow();
  document.documentElement.dataset.ready = "yes";
})();

"use strict";
// A grid of simulated clusters under sliders: the answer, bars and plots at one place of the grid, and
// pictures of one step. Only what was simulated is shown.
(() => {
  const root = document.querySelector("[data-explorer]");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const dimensions = ["workers", "ranks_per_node", "rate_bps", "compression"];
  const titles = { workers: "workers", ranks_per_node: "workers on a node", rate_bps: "rate of every port, bit/s", compression: "times fewer bytes" };
  const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;
  const milliseconds = (seconds) => `${(1e3 * seconds).toPrecision(seconds < 0.1 ? 3 : 4)} ms`;
  const state = { ...data.start };
  const chosen = [];

  const rows = data.rows.map((cells, number) => {
    const row = { number };
    data.columns.forEach((name, index) => { row[name] = cells[index]; });
    return row;
  });
  const keyOf = (series, place) => [series, ...place].join("|");
  const byPlace = new Map(rows.map((row) => [keyOf(row.series, dimensions.map((d) => row[d])), row]));
  const place = (changes = {}) =>
    dimensions.map((d) => data.values[d][changes[d] === undefined ? state[d] : changes[d]]);
  const rowAt = (series, changes) => byPlace.get(keyOf(series, place(changes)));
  const text = (dimension, index = state[dimension]) => data.texts[dimension][index];
  const described = () => {
    const few = data.values.compression[state.compression];
    const fewer = few > 1 ? `, ${few} times fewer bytes` : "";
    const workers = data.values.workers[state.workers];
    const each = data.values.ranks_per_node[state.ranks_per_node];
    const nodes = each > 1 ? ` on nodes of ${each}` : "";
    return `${workers} worker${workers === 1 ? "" : "s"}${nodes} at ${text("rate_bps")}${fewer}`;
  };
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  const showControls = () => {
    for (const input of root.querySelectorAll("[data-control]")) {
      const dimension = input.dataset.control;
      input.value = state[dimension];
      input.setAttribute("aria-valuetext", text(dimension));
      document.getElementById(`shown-${dimension}`).textContent = text(dimension);
    }
  };

  const showAnswer = () => {
    const [workers, each, rate] = place();
    const answer = data.answers.find((it) => it[0] === workers && it[1] === each && it[2] === rate);
    const verdict = root.querySelector(".verdict");
    verdict.hidden = !answer;
    if (!answer) return;
    const [, , , bottleneck, words, share] = answer;
    const lost = `${Math.round(100 * (1 - share))} % of the speed`;
    const states = {
      none: "The network is not the bottleneck here.",
      network: `The network costs ${lost} here.`,
      host: `The hosts, not the network, cost ${lost} here.`,
    };
    verdict.dataset.state = bottleneck;
    document.getElementById("state").textContent = states[bottleneck] || bottleneck;
    document.getElementById("answer").replaceChildren(
      ...words.split(/(?<=\.) (?=[A-Z])/).map((sentence) => element("li", { textContent: sentence })));
  };

  const showBars = () => {
    document.getElementById("here").textContent = described();
    const colors = gradlanePage.palette();
    const lines = data.series.map((series, index) => {
      const row = rowAt(series);
      if (!row) return null;
      const at = (share) => `${Math.min(100, 100 * share)}%`;
      const fill = element("div", { className: "fill" });
      fill.style.cssText = `width:${at(row.scaling_factor)};background:${colors[index % colors.length]}66`;
      const marks = [["goal", data.goal], ["bound", row.bound_scaling_factor]].map(([name, share]) => {
        const mark = element("div", { className: `mark ${name}` });
        mark.style.left = at(share);
        return mark;
      });
      const share = element("span", { className: "share", textContent: percent(row.scaling_factor) });
      const track = element("div", { className: "track" }, fill, ...marks, share);
      const number = (content) => element("td", { className: "number", textContent: content });
      return element(
        "tr", {},
        element("td", { textContent: series }), element("td", {}, track),
        number(milliseconds(row.step_s)), number(Math.round(row.samples_per_s).toLocaleString("en")),
      );
    });
    document.getElementById("bars").replaceChildren(...lines.filter(Boolean));
  };

  const showPlot = (target) => {
    const dimension = target.dataset.against;
    const values = data.values[dimension];
    const line = (name, pick, extra) => {
      const found = values.map((_, index) => pick(index));
      return {
        type: "scatter", mode: "lines+markers", name, x: values,
        y: found.map((share) => (share === undefined ? null : 100 * share)),
        line: { width: 2 }, marker: { size: 7 }, hovertemplate: "%{y:.1f} %", ...extra,
      };
    };
    const of = (series, key) => (index) => {
      const row = rowAt(series, { [dimension]: index });
      return row && row[key];
    };
    const traces = data.series.map((series, index) =>
      line(series, of(series, "scaling_factor"), { meta: { color: index } }));
    // The bound is the same for all orders of sending of one scheme.
    const bounded = [["the bound", data.series.find((it) => !data.rings.includes(it))]];
    if (bounded[0][1] === undefined) bounded[0][1] = data.rings[0];
    for (const [name, series] of bounded) {
      traces.push(line(name, of(series, "bound_scaling_factor"), {
        mode: "lines", line: { width: 1.5, dash: "dot" }, meta: { color: "text" },
      }));
    }
    const logarithmic = values[values.length - 1] / values[0] > 5;
    const here = values[state[dimension]];
    const across = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 100 * data.goal, y1: 100 * data.goal };
    const upright = { type: "line", yref: "paper", x0: here, x1: here, y0: 0, y1: 1 };
    const thin = values.length > (target.clientWidth < 520 ? 7 : 14) ? 2 : 1;
    gradlanePage.show(target, {
      traces,
      layout: {
        xaxis: {
          title: { text: titles[dimension] }, type: logarithmic ? "log" : "linear", automargin: true,
          tickvals: values.filter((_, index) => index % thin === 0),
          ticktext: data.texts[dimension].filter((_, index) => index % thin === 0)
            .map((it) => it.replace("bit/s", "")),
        },
        yaxis: { title: { text: "share of ideal speed, %" }, range: [0, 104], automargin: true,
          tickvals: [0, 25, 50, 75, 100 * data.goal] },
        shapes: [
          { ...across, line: { color: gradlanePage.style("--faint"), width: 1, dash: "dash" } },
          { ...upright, line: { color: gradlanePage.style("--accent"), width: 2 } },
        ],
      },
    });
    const shares = data.series.map((series) => [series, rowAt(series)]).filter(([, row]) => row)
      .map(([series, row]) => `${series} ${percent(row.scaling_factor)}`);
    target.setAttribute("aria-label",
      `Share of ideal speed against ${titles[dimension]}; at ${described()}: ${shares.join(", ")}`);
    if (!target.dataset.listens) {
      target.dataset.listens = "yes";
      target.on("plotly_click", (event) => {
        const index = values.indexOf(event.points[0].x);
        if (index >= 0) { state[dimension] = index; showAll(); }
      });
    }
  };

  // ---- pictures of one step

  const pictured = new Map(data.pictures.map((picture) => [picture.row, picture]));
  const drawn = data.series.filter((series) => rows.some((row) => row.series === series && pictured.has(row.number)));
  const lanes = ["backward", "forward", "wait", "encode", "push", "broadcast", "control", "reduce", "decode", "rebuild"];
  const laneNames = {
    wait: "waiting", encode: "encoding", control: "pulls", reduce: "summing", decode: "decoding", rebuild: "rebuilding",
  };

  // The nearest cluster that has a picture: fewest steps of the sliders away.
  const nearest = (series) => {
    let best = null;
    for (const row of rows) {
      if (row.series !== series || !pictured.has(row.number)) continue;
      const away = dimensions.map((d) => Math.abs(data.values[d].indexOf(row[d]) - state[d]));
      const distance = away.reduce((sum, steps) => 10 * sum + steps, 0);
      if (!best || distance < best.distance) best = { row, distance };
    }
    return best;
  };

  // A colour for each tensor, along the ramp of the theme.
  const layerColors = () => {
    const ramp = ["--ramp-first", "--ramp-middle", "--ramp-last"].map((name) =>
      gradlanePage.style(name).match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16)));
    const count = Math.max(1, data.tensors.length);
    return Array.from({ length: count }, (_, index) => {
      const at = 2 * index / Math.max(1, count - 1);
      const [from, to, share] = at < 1 ? [ramp[0], ramp[1], at] : [ramp[1], ramp[2], at - 1];
      return from.map((value, part) => Math.round(value + share * (to[part] - value))).join();
    });
  };

  const spanText = (lane, bar) => {
    const [begin, length, tensor, bytes, spans, covered] = bar;
    const parts = [`<b>${laneNames[lane] || lane}</b>`];
    if (tensor >= 0) parts.push(data.tensors[tensor].replace(/&/g, "&amp;").replace(/</g, "&lt;"));
    if (bytes) parts.push(`${(bytes / 1e6).toPrecision(3)} MB${spans > 1 ? ` in ${spans} parts` : ""}`);
    parts.push(`${(begin / 1e3).toFixed(1)} ms, for ${(length / 1e3).toPrecision(3)} ms` +
      (covered < 95 ? `, ${covered} % of them busy` : ""));
    return parts.join("<br>");
  };

  const showPicture = (figure, series, longest) => {
    const found = nearest(series);
    const plot = figure.querySelector(".plot");
    const note = figure.querySelector("figcaption");
    const picture = pictured.get(found.row.number);
    const present = lanes.filter((lane) => picture.lanes[lane]);
    const colors = layerColors();
    const traces = present.map((lane) => {
      const bars = picture.lanes[lane];
      const plain = { forward: "--compute", backward: "--compute", wait: "--waits" }[lane];
      return {
        type: "bar", orientation: "h", name: laneNames[lane] || lane, showlegend: false,
        y: bars.map(() => laneNames[lane] || lane),
        base: bars.map((bar) => bar[0] / 1e3), x: bars.map((bar) => bar[1] / 1e3),
        text: bars.map((bar) => spanText(lane, bar)), textposition: "none",
        hovertemplate: "%{text}<extra></extra>",
        marker: {
          color: plain ? gradlanePage.style(plain) : bars.map((bar) =>
            // Paler where something happens in a part of the time only.
            `rgba(${colors[Math.max(0, bar[2])]},${0.25 + 0.75 * bar[5] / 100})`),
          line: { width: 0 },
        },
      };
    });
    gradlanePage.show(plot, {
      traces,
      layout: {
        barmode: "overlay", bargap: 0.22, hovermode: "closest", margin: { l: 74, r: 12, b: 40 },
        xaxis: { title: { text: "ms since backward began" }, range: [0, longest / 1e3], automargin: true },
        yaxis: { autorange: "reversed", type: "category", categoryarray: present.map((it) => laneNames[it] || it), fixedrange: true },
      },
    });
    const share = (lane) => picture.shares[lane] || 0;
    const seconds = picture.length_us / 1e6;
    const words = `Step ${milliseconds(seconds)}: ${milliseconds(seconds * share("wait"))} of it forward waits; ` +
      `the port sends ${Math.round(100 * share("port"))} % of the time.`;
    const elsewhere = found.distance === 0 ? "" :
      ` Pictures were kept for some clusters only; this is the nearest: ${found.row.workers} workers at ` +
      `${text("rate_bps", data.values.rate_bps.indexOf(found.row.rate_bps))}.`;
    note.textContent = `${words} Parts nearer than ${(picture.resolution_us / 1e3).toPrecision(2)} ms are drawn as one, paler where there are gaps.${elsewhere}`;
    plot.setAttribute("aria-label", `One step with ${series}. ${words}`);
  };

  const showPictures = () => {
    const figures = [...root.querySelectorAll(".picture")];
    const lengths = figures.map((_, index) => pictured.get(nearest(chosen[index]).row.number).length_us);
    // One scale for all, so that a shorter step looks shorter.
    figures.forEach((figure, index) => showPicture(figure, chosen[index], Math.max(...lengths)));
  };

  const makePictures = () => {
    const area = document.getElementById("pictures");
    if (!drawn.length) { document.getElementById("steps").hidden = true; return; }
    const first = drawn.includes(data.baseline) ? data.baseline : drawn[0];
    const best = drawn.filter((it) => it !== first).sort((a, b) =>
      ((rowAt(b) || {}).scaling_factor || 0) - ((rowAt(a) || {}).scaling_factor || 0))[0];
    chosen.push(first, ...(best ? [best] : []));
    chosen.forEach((series, index) => {
      const select = element("select", { id: `picture-${index}` });
      for (const name of drawn) select.append(element("option", { value: name, textContent: name, selected: name === series }));
      select.addEventListener("change", () => { chosen[index] = select.value; showPictures(); });
      const label = element("label", { htmlFor: select.id, textContent: index ? "beside" : "One step with" });
      const plot = element("div", { className: "plot" });
      plot.setAttribute("role", "img");
      area.append(element("figure", { className: "picture" },
        element("div", { className: "head" }, label, select), plot, element("figcaption")));
    });
  };

  const showAll = () => {
    showControls();
    showAnswer();
    showBars();
    for (const target of root.querySelectorAll("[data-against]")) showPlot(target);
    if (chosen.length) showPictures();
  };

  for (const input of root.querySelectorAll("[data-control]")) {
    input.addEventListener("input", () => { state[input.dataset.control] = Number(input.value); showAll(); });
  }
  root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  makePictures();
  showAll();
  gradlanePage.onTheme(showAll);
})();

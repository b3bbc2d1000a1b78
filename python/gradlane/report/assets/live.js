// The live page: asks for the state, once a second while it is in view, and shows it. Everything
// that comes in is text: it is set as text, never as markup.
(() => {
  const FORMAT = "gradlane-live";
  const VERSION = 1;
  const RATES_KEPT = 300;
  const byId = (id) => document.getElementById(id);
  const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  const seconds = (value) => {
    if (value <= 0) return "0 s";
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} \u00b5s`;
    if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
    if (value < 60) return `${value.toPrecision(3)} s`;
    return span(value);
  };
  const span = (value) => {
    const whole = Math.floor(value);
    const [days, hours] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600)];
    const minutes = Math.floor((whole % 3600) / 60);
    if (days) return `${days} d ${hours} h`;
    if (hours) return `${hours} h ${minutes} min`;
    return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
  };
  const scaled = (value, units, step) => {
    let index = 0;
    while (value >= step && index < units.length - 1) [value, index] = [value / step, index + 1];
    return `${value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))} ${units[index]}`;
  };
  const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
  const rate = (bytesPerS) =>
    scaled(8 * bytesPerS, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"], 1000);
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
  const count = (value, word) => `${value.toLocaleString("en")} ${word}${value === 1 ? "" : "s"}`;

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  // A cell: a text, or [text, share, class] of a meter.
  const cell = (content, className) => {
    if (!Array.isArray(content)) return element("td", className, content);
    const [text, share, kind] = content;
    const made = element("td", `${className} meter ${kind || ""}`, text);
    const bar = element("span");
    bar.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
    made.append(bar);
    return made;
  };
  const fill = (id, rows, empty) => {
    const table = byId(id);
    const columns = table.tHead.rows[0].cells.length;
    const made = rows.map((row) => {
      const line = element("tr");
      line.append(...row.map((content, index) => cell(content, index ? "number" : "name")));
      line.cells[0].title = line.cells[0].textContent;
      return line;
    });
    if (!made.length) {
      const none = element("td", "empty", empty);
      none.colSpan = columns;
      const line = element("tr");
      line.append(none);
      made.push(line);
    }
    table.tBodies[0].replaceChildren(...made);
  };

  const drawn = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  // About four round numbers from 0 to a largest value.
  const ticks = (most) => {
    const power = 10 ** Math.floor(Math.log10(most / 4));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => most / one <= 5);
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, index) => index * step);
  };
  // Draws lines over time into an <svg>. Values above five medians
  // of the last line are cut off at the top.
  const chart = (svg, times, lines, format, cursor) => {
    const [width, height] = [svg.clientWidth, svg.clientHeight];
    if (!width || times.length < 2) return svg.replaceChildren();
    const [left, right, top, bottom] = [82, 8, 8, 22];
    const values = lines.flatMap((line) => line.values);
    const most = Math.min(Math.max(...values), 5 * (median(lines.at(-1).values) || Infinity)) || 1;
    const [first, last] = [times[0], times[times.length - 1]];
    const x = (time) => left + ((time - first) / (last - first || 1)) * (width - left - right);
    const y = (value) => top + (1 - Math.min(1, value / (1.05 * most))) * (height - top - bottom);
    const parts = [];
    for (const tick of ticks(most)) {
      parts.push(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      parts.push(drawn("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    parts.push(drawn("text", { x: left, y: height - 4 }, span(first)));
    parts.push(drawn("text", { x: width - right, y: height - 4, "text-anchor": "end" }, span(last)));
    for (const line of lines) {
      let path = line.values.map((value, index) => `${index ? "L" : "M"}${x(times[index])} ${y(value)}`).join("");
      if (line.isArea) path += `L${x(last)} ${y(0)}L${x(first)} ${y(0)}Z`;
      parts.push(drawn("path", { class: line.name, d: path }));
    }
    if (cursor !== undefined) {
      parts.push(drawn("line", { class: "cursor", x1: x(times[cursor]), x2: x(times[cursor]), y1: top, y2: height - bottom }));
    }
    svg.replaceChildren(...parts);
    return (pixels) => {
      const time = first + ((pixels - left) / (width - left - right)) * (last - first);
      let best = 0;
      times.forEach((one, index) => {
        if (Math.abs(one - time) < Math.abs(times[best] - time)) best = index;
      });
      return best;
    };
  };

  let state = null;
  let heardAt = performance.now();
  let isLost = false;
  let mismatch = "";
  let rowsName = "history";
  let nearest = null;
  let cursor;
  let rates = [];

  const showStatus = () => {
    const silentS = (performance.now() - heardAt) / 1000;
    let [text, tone] = ["waiting for the first state", ""];
    if (mismatch) [text, tone] = [mismatch, "bad"];
    else if (state && state.ending) {
      text = state.ending === "closed" ? "the session closed in order" : `the session has ended: ${state.ending}`;
      tone = state.ending === "closed" ? "" : "bad";
    } else if (isLost) [text, tone] = [`no news since ${span(silentS)}: the session does not answer`, "bad"];
    else if (state) {
      const quietS = state.quiet_s + silentS;
      if (state.is_stalled) {
        text = `no news since ${span(quietS)}: no step has begun` + waiting(state.wait);
        tone = "bad";
      } else if (!state.step) text = `no step yet, since ${span(quietS)}`;
      else [text, tone] = ["training", "good"];
    }
    const status = byId("status");
    if (status.textContent !== text) status.textContent = text;
    status.className = `status ${tone}`;
  };
  const waiting = (wait) => {
    if (!wait) return "; the program is not waiting for gradients";
    if (!wait.tensors.length) return `; the program waits for all of step ${wait.step}`;
    const more = wait.tensor_count - 1;
    return `; the program waits for ${wait.tensors[0]}${more > 0 ? ` and ${more} more` : ""} of step ${wait.step}`;
  };

  const showFigures = () => {
    const [steps, recent] = [state.steps, state.window];
    const sum = (name) => state.ranks.reduce((total, row) => total + row[name], 0);
    const share = recent.steps ? recent.wait_share : steps.wait_share;
    const figures = [
      [state.step.toLocaleString("en"), "step"],
      [steps.count ? seconds(steps.median_s) : "\u2013", "a step, median of the last 128"],
      [steps.count ? percent(share) : "\u2013", "of recent steps waiting for other ranks", share > 0.25 ? "bad" : ""],
      [rate(sum("tx_bytes_per_s")), "sent"],
      [rate(sum("rx_bytes_per_s")), "received"],
      ...(state.clip_steps ? [[state.clip_factor.toPrecision(3), "factor of the last step\u2019s gradients, clipped in " +
        `${percent(state.clipped_steps / state.clip_steps)} of the steps`]] : []),
      [span(state.uptime_s), "since the session began"],
    ];
    byId("figures").replaceChildren(...figures.map(([value, label, tone]) => {
      const made = element("div", tone);
      made.append(element("dt", "", label), element("dd", "", value));
      return made;
    }));
  };

  const showSteps = () => {
    const rows = state[rowsName];
    if (cursor !== undefined && cursor >= rows.length) cursor = undefined;
    const lines = [];
    if (rows.some((row) => row.steps > 1)) {
      lines.push({ name: "max", values: rows.map((row) => row.max_s) });
    }
    lines.push(
      { name: "wait", values: rows.map((row) => Math.min(row.wait_mean_s, row.mean_s)), isArea: true },
      { name: "step", values: rows.map((row) => row.mean_s) },
    );
    nearest = chart(byId("steps-chart"), rows.map((row) => row.end_s), lines,
      (value) => seconds(value).replace(/\.0+ /, " "), cursor);
    let text = rows.length < 2 ? "There is a chart from the third step on." : "Point at the chart, or touch it, for one step.";
    if (cursor !== undefined) {
      const row = rows[cursor];
      const name = row.steps > 1 ? `steps ${row.last - row.steps + 1} to ${row.last}` : `step ${row.last}`;
      text = `${name}, ${span(row.end_s)} after the start: ${seconds(row.mean_s)}, ${seconds(row.wait_mean_s)} of it waiting`;
      if (row.steps > 1) text += ` (means); the slowest ${seconds(row.max_s)}`;
    }
    byId("steps-readout").textContent = text;
  };

  const showTables = () => {
    const length = `the last ${span(state.window.length_s)}`;
    const several = new Set(state.layers.map((row) => row.model)).size > 1;
    fill("layers", state.layers.map((row) => [
      several ? `${row.name} (model ${row.model})` : row.name,
      [percent(row.recent_share), row.recent_share, "late"],
      seconds(row.recent_wait_s),
      `${seconds(row.wait_s)} (${percent(row.wait_share)})`,
      row.max_step ? seconds(row.wait_s_max) : "\u2013",
      row.max_step ? row.max_step.toLocaleString("en") : "\u2013",
    ]), "No layer was waited for.");
    const unseen = state.layer_count - state.layers.length;
    byId("layers-note").textContent = `Shares and waits a step: ${length}, in this rank's program.` +
      (unseen > 0 ? ` ${count(unseen, "more layer")} had shorter ones.` : "");
    const most = Math.max(1, ...state.ranks.flatMap((row) => [row.tx_bytes_per_s, row.rx_bytes_per_s]));
    const roles = { self: " (this one)", trains: "", serves: " (serves)" };
    fill("ranks", state.ranks.map((row) => [
      `${row.rank}${roles[row.role] ?? ""}`,
      [percent(row.recent_last_share), row.recent_last_share, "late"],
      row.recent_last_share > 0 ? seconds(row.recent_late_s_mean) : "\u2013",
      [rate(row.tx_bytes_per_s), row.tx_bytes_per_s / most],
      [rate(row.rx_bytes_per_s), row.rx_bytes_per_s / most],
      bytes(row.queued_bytes + row.in_flight_bytes),
      bytes(row.owned_bytes),
      row.left_out_steps.toLocaleString("en"),
    ]), "There is no other rank.");
    byId("ranks-note").textContent = `Rates and late contributions: ${length}. Late: last at the slices ` +
      "that this rank owns, by the time after the rank before it; the others come through the network, this one does not.";
    fill("codecs", state.codecs.map((row) => [
      row.codec,
      row.tensors.toLocaleString("en"),
      row.residual_norm === null ? "\u2013" : row.residual_norm.toPrecision(4),
    ]), "No model is connected.");
    byId("codecs-note").textContent = state.encoded_bytes && state.encoded_bytes === state.raw_bytes
      ? `Gradients and results took ${bytes(state.raw_bytes)}, none of them compressed.`
      : state.encoded_bytes
      ? `Gradients and results took 1/${state.codec_ratio.toPrecision(3)} of their bytes (${bytes(state.encoded_bytes)} for ${bytes(state.raw_bytes)}).`
      : "Nothing was sent yet.";
    byId("residuals").hidden = !state.residuals.length;
    fill("residuals", state.residuals.map((row) => [row.name, row.norm.toPrecision(4)]), "");
  };

  const showEvents = () => {
    byId("events").replaceChildren(...[...state.events].reverse().map((event) => {
      const line = element("li", ["warning", "error"].includes(event.level) ? event.level : "");
      line.append(element("time", "", span(event.at_s)), element("span", "", event.text));
      return line;
    }));
  };

  const showRates = () => {
    const sum = (name) => state.ranks.reduce((total, row) => total + row[name], 0);
    if (!rates.length || state.uptime_s > rates[rates.length - 1].at) {
      rates.push({ at: state.uptime_s, tx: sum("tx_bytes_per_s"), rx: sum("rx_bytes_per_s") });
      rates = rates.slice(-RATES_KEPT);
    } else if (state.uptime_s < rates[rates.length - 1].at) rates = [];
    chart(byId("links-chart"), rates.map((row) => row.at), [
      { name: "tx", values: rates.map((row) => row.tx) },
      { name: "rx", values: rates.map((row) => row.rx) },
    ], rate);
  };

  const show = () => {
    byId("live").classList.remove("empty");
    const others = state.serving ? `, ${count(state.serving, "rank")} that only serve` : "";
    byId("title").textContent = `Rank ${state.rank} of ${state.world_size}${others}`;
    document.title = `step ${state.step} - gradlane`;
    // torchrun calls a job "none" that nobody has named.
    const job = state.job === "none" ? "" : `job ${state.job}, `;
    const restart = state.restart ? `restart ${state.restart}, ` : "";
    byId("session").textContent = `${job}${restart}strategy ${state.strategy}, update on ${state.update}s, ` +
      (state.stragglers === "wait" ? "each step waits for all ranks" : `stragglers ${state.stragglers}`);
    showFigures();
    showSteps();
    showTables();
    showRates();
    showEvents();
    byId("footer").textContent = `gradlane ${state.gradlane}; plan ${state.plan_version}; ` +
      `${count(state.refused_connections, "refused connection")}; engine: ${bytes(state.scratch_bytes)} of memory, ` +
      `${seconds(state.io_cpu_s)} of CPU for sockets, ${seconds(state.work_cpu_s)} for sums. The same as JSON: state.json.`;
    showStatus();
  };

  const follow = async () => {
    let target = "state.json";
    for (;;) {
      if (document.hidden) {
        await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
        continue;
      }
      try {
        const answer = await fetch(target, { cache: "no-store" });
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        const next = await answer.json();
        if (next.format !== FORMAT || next.version !== VERSION) {
          mismatch = "the session has another version now: load this page again";
          return showStatus();
        }
        [state, heardAt, isLost] = [next, performance.now(), false];
        show();
        target = "state.json?next";
      } catch {
        isLost = true;
        target = "state.json";
      }
      // After the end another session may begin here.
      if (isLost || state.ending) await sleep(2000);
      showStatus();
    }
  };

  for (const button of document.querySelectorAll("[data-rows]")) {
    button.addEventListener("click", () => {
      [rowsName, cursor] = [button.dataset.rows, undefined];
      for (const other of document.querySelectorAll("[data-rows]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      if (state) showSteps();
    });
  }
  const svg = byId("steps-chart");
  svg.addEventListener("pointermove", (event) => {
    if (!state || !nearest) return;
    cursor = nearest(event.clientX - svg.getBoundingClientRect().left);
    showSteps();
  });
  svg.addEventListener("pointerleave", () => {
    cursor = undefined;
    if (state) showSteps();
  });
  addEventListener("resize", () => {
    if (state) show();
  });
  showStatus();
  setInterval(showStatus, 1000);
  follow();
})();

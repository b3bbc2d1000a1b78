"use strict";
// What scripts of a page's parts share: drawing in the colours of the theme.
const gradlanePage = (() => {
  // One palette for each theme; a series keeps its number, so it keeps its colour across plots.
  const palettes = {
    light: ["#1d4ed8", "#c2570c", "#047857", "#7c3aed", "#be123c", "#0e7490", "#4d7c0f", "#86198f"],
    dark: ["#7aa8ff", "#fb9b4b", "#4fd1a5", "#b794f6", "#fb7185", "#4cc9e0", "#a3d65c", "#e78bea"],
  };
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const colored = (trace, palette, width) => {
    const number = trace.meta && trace.meta.color;
    if (number === undefined) return trace;
    const color = number === "text" ? style("--text") : palette[number % palette.length];
    const marker = { ...trace.marker, color };
    // A stroke spans the bars of its category, whose width follows from that of the plot.
    if (marker.symbol === "line-ew") marker.size = (0.55 * (width - 60)) / trace.x.length;
    if (trace.marker && trace.marker.line) marker.line = { ...trace.marker.line, color };
    return trace.line
      ? { ...trace, line: { ...trace.line, color }, marker }
      : { ...trace, marker };
  };

  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (scheme.matches ? "dark" : "light")) === "dark";
  const palette = () => (isDark() ? palettes.dark : palettes.light);

  // Draws a plot as it is described: traces whose `meta.color` is a number, a layout without colours.
  const show = (target, plot) => {
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line") };
    const narrow = target.clientWidth < 520;
    const layout = {
      hovermode: "x unified",
      ...plot.layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: narrow ? 11 : 13, color: style("--text") },
      margin: { l: 48, r: 12, t: 8, b: 40, ...plot.layout.margin },
      // "container" keeps the legend clear of the axis title whatever the width is.
      legend: { orientation: "h", x: 0, y: 1, yanchor: "top", yref: "container" },
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text") } },
      xaxis: { ...axis, ...plot.layout.xaxis },
      yaxis: { ...axis, ...plot.layout.yaxis },
    };
    const names = plot.traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name || "");
    const entry = 50 + (narrow ? 6 : 7) * Math.max(0, ...names.map((name) => name.length));
    const columns = Math.max(1, Math.floor((target.clientWidth - 60) / entry));
    const rows = Math.ceil(names.length / columns);
    layout.margin.t = 8 + 30 * rows;
    // A long legend takes no height from the plot.
    const height = layout.margin.t + (target.classList.contains("low") ? 160 : 240);
    if (target.clientHeight && target.clientHeight < height) target.style.height = `${height}px`;
    const traces = plot.traces.map((trace) => colored(trace, palette(), target.clientWidth));
    Plotly.react(target, traces, layout, { responsive: true, displayModeBar: false });
  };

  const draw = () => {
    const plots = JSON.parse(document.getElementById("plots").textContent);
    for (const target of document.querySelectorAll("[data-plot]")) {
      show(target, plots[Number(target.dataset.plot)]);
    }
  };

  const sort = (heading) => {
    const table = heading.closest("table");
    const column = [...heading.parentElement.children].indexOf(heading);
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    const numeric = heading.classList.contains("number");
    const key = (row) => row.cells[column].dataset.key;
    const rows = [...body.rows].sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = numeric ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true });
      return descending ? -order : order;
    });
    body.append(...rows);
  };

  for (const sorter of document.querySelectorAll("th button")) {
    sorter.addEventListener("click", () => sort(sorter.parentElement));
  }
  const redraws = [];
  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const changed = () => { name(); for (const redraw of redraws) redraw(); };
  button.hidden = false;
  name();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    changed();
  });
  scheme.addEventListener("change", changed);
  if (window.Plotly) {
    draw();
    redraws.push(draw);
  }
  return { show, style, palette, onTheme: (redraw) => redraws.push(redraw) };
})();

"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const HEIGHT = 420;
  const touch = matchMedia("(pointer: coarse)").matches; // dragging scrolls the page
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12.5 };
  const axis = { automargin: true, zeroline: false, gridcolor: "#888", ticks: "" };
  const plots = figures.map((figure) => {
    const plot = document.getElementById(figure.id);
    const layout = {
      height: HEIGHT,
      margin: { l: 50, r: 14, t: 12, b: 44 },
      font,
      paper_bgcolor: "#0000",
      plot_bgcolor: "#0000",
      hovermode: "closest",
      hoverlabel: { font, namelength: -1 },
      dragmode: touch ? false : "zoom",
      ...figure.layout,
      xaxis: { ...axis, ...figure.layout.xaxis },
      yaxis: { ...axis, ...figure.layout.yaxis },
    };
    Plotly.newPlot(plot, figure.data, layout, { responsive: true, displayModeBar: false, showTips: false });
    return plot;
  });

  // hiding or showing a line in one chart does so in all
  const shown = (trace) => trace.visible ?? true;
  plots.forEach((source) => source.on("plotly_restyle", () => {
    const lines = source.data.filter((trace) => trace.legendgroup);
    const wanted = new Map(lines.map((trace) => [trace.legendgroup, shown(trace)]));
    plots.forEach((plot) => {
      const visible = plot.data.map((trace) => wanted.get(trace.legendgroup) ?? shown(trace));
      if (plot.data.some((trace, i) => shown(trace) !== visible[i])) Plotly.restyle(plot, { visible });
    });
  }));

  document.querySelectorAll("button[data-axis]").forEach((button) => {
    button.addEventListener("click", () => {
      const name = button.dataset.axis;
      const plot = button.closest("figure").querySelector(".plot");
      const type = button.dataset.type;
      const ticks = type === "log" ? 4 : 7; // more labels would crowd a logarithmic axis
      Plotly.relayout(plot, { [`${name}.type`]: type, [`${name}.nticks`]: ticks, [`${name}.autorange`]: true });
      button.parentElement.querySelectorAll("button").forEach((other) => {
        other.setAttribute("aria-pressed", String(other === button));
      });
    });
  });

  // drawing again fixes the layout when the legend wraps differently
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => plots.forEach((plot) => Plotly.redraw(plot)), 300);
  });

  // printing uses one fixed width; the width of the screen is restored afterwards
  const resize = (sizes) => plots.forEach((plot, i) => {
    Plotly.relayout(plot, sizes(figures[i].layout.height ?? HEIGHT));
    Plotly.redraw(plot);
  });
  addEventListener("beforeprint", () => resize(() => ({ width: 660, height: 285 })));
  addEventListener("afterprint", () => resize((height) => ({ width: null, height, autosize: true })));
})();

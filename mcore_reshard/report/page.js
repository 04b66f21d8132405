"use strict";
// Draws the charts of the page. The library is in the page too, compressed; nothing is loaded from anywhere.
const HEAT = {
  light: [[0, "#e9f0f9"], [0.25, "#b5d0ee"], [0.5, "#649fd8"], [0.75, "#2a67ad"], [1, "#0b2c5c"]],
  dark: [[0, "#1d2c40"], [0.25, "#20497c"], [0.5, "#2e78bd"], [0.75, "#5aa6dd"], [1, "#b4e0fb"]],
};
const darkness = matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("charts").textContent);

async function library() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function themed(trace) {
  const shown = { ...trace };
  if (trace.colorscale) {
    shown.colorscale = HEAT[darkness.matches ? "dark" : "light"];
    shown.colorbar = { ...trace.colorbar, outlinewidth: 0 };
  }
  if (trace.color) {
    delete shown.color;
    shown.marker = { color: color(trace.color) };
    shown.line = { ...trace.line, color: color(trace.color) };
    if (trace.type === "bar") delete shown.line;
  }
  return shown;
}

// One chart at a time, so that the page can be read and scrolled meanwhile.
async function draw() {
  for (const [id, chart] of Object.entries(charts)) {
    await new Promise((next) => setTimeout(next));
    const axis = (given) => ({
      gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true, ...given,
    });
    const layout = {
      ...chart.layout,
      xaxis: axis(chart.layout.xaxis), yaxis: axis(chart.layout.yaxis),
      height: chart.height, margin: { l: 60, r: 20, t: 24, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("text"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    };
    Plotly.react(id, chart.traces.map(themed), layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}

library().then(draw).then(() => {
  darkness.addEventListener("change", draw);
  document.documentElement.dataset.drawnMs = Math.round(performance.now());
}).catch((error) => {
  for (const id of Object.keys(charts)) document.getElementById(id).textContent = "This chart cannot be drawn: " + error;
});

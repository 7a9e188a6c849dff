// The figures above and beside the transcript.
function drawHead() {
  byId("title").append(shown.title);
  for (const [name, value] of [["Model", shown.model], ["Policy", shown.policy]]) {
    byId("made").append(make("div", "", make("dt", "", name), make("dd", "", value)));
  }
  const rows = [
    ["Full cache", shown.full_kv_bytes, "plain"],
    ["Peak while reading", shown.peak_kv_bytes, ""],
    ["All episodes", shown.kv_bytes, ""],
    [several ? "Answering episode" : "This cache", shown.active_kv_bytes, "active"],
  ].filter(([name]) => several || name !== "All episodes");
  const most = Math.max(1, ...rows.map((row) => row[1]));
  const bars = make("dl", "bars");
  for (const [name, size, kind] of rows) {
    const bar = make("i", `bar ${kind}`);
    bar.style.width = `${(size / most) * 100}%`;
    bars.append(
      make("dt", kind, name), make("dd", "track", bar), make("dd", `size ${kind}`, bytes(size)),
      make("dd", `of ${kind}`, percent(size / Math.max(1, shown.full_kv_bytes))),
    );
  }
  const figures = make("p", "figures",
    make("span", "", make("b", "", count(shown.context_tokens)), " tokens read"),
    make("span", "", make("b", "", count(shown.budget_tokens)), " budgeted per head"),
    make("span", "", make("b", "", percent(shown.active_kv_bytes / Math.max(1, shown.full_kv_bytes))),
      " of the full cache"));
  byId("memory").append(figures, bars);
}

function strip(episode, most, bins) {
  const svg = draw("svg", { viewBox: `0 0 ${bins.length} 1`, preserveAspectRatio: "none" });
  for (const start of sessions.length > 40 ? [] : sessions) {
    const x = (start / Math.max(1, TOKENS)) * bins.length;
    svg.append(draw("line", { x1: x, x2: x, y1: 0, y2: 1, class: "tick" }));
  }
  const tops = bins.map((share) => `V${(1 - share / most).toFixed(3)}h1`).join("");
  svg.append(draw("path", { d: `M0 1${tops}V1Z` }));
  return make("span", "strip", svg);
}

function density(kept) {
  const length = Math.max(1, Math.min(300, kept.length));
  return Array.from({ length }, (_, bin) => {
    const part = kept.subarray((bin * kept.length) / length, ((bin + 1) * kept.length) / length);
    return sum(part) / Math.max(1, part.length * HEADS);
  });
}

function drawRail(choose, seek) {
  const bins = episodes.map((episode) => density(episode.kept));
  const most = Math.max(1e-9, ...bins.flat());
  const list = make("div", "rows");
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-orientation", "vertical");
  const tabs = episodes.map((episode, index) => {
    const share = episode.entries / Math.max(1, HEADS * shown.context_tokens);
    const tab = make("button", "tab",
      make("span", "label", several ? make("b", "", `${index + 1}`) : null, make("span", "name", episode.name)),
      strip(episode, most, bins[index]), make("span", "share", percent(share)));
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", "transcript");
    tab.setAttribute("aria-label",
      `Episode ${index + 1}, ${episode.name}: keeps ${percent(share)} of the full cache`);
    tab.addEventListener("click", (event) => {
      choose(index);
      const area = event.target.closest(".strip")?.getBoundingClientRect();
      if (area) seek(((event.clientX - area.left) / area.width) * TOKENS);
    });
    list.append(tab);
    return tab;
  });
  const view = make("i", "view");
  list.append(make("span", "overlay", view));
  const scale = make("div", "scale");
  const apart = TOKENS / (innerWidth < 700 ? 12 : 36);
  let last = -Infinity;
  sessions.forEach((start, index) => {
    if (start - last < apart) return;
    last = start;
    const label = make("span", "", `${index + 1}`);
    label.style.left = `${(start / TOKENS) * 100}%`;
    scale.append(label);
  });
  const caption = make("div", "caption",
    make("span", "label", several ? "Episodes" : ""), scale, make("span", "share", "kept"));
  byId("rail").append(sessions.length ? caption : "", list);
  return { tabs, view };
}

function drawLegend() {
  const steps = Math.min(HEADS, 12);
  const swatches = make("span", "swatches");
  for (let step = 0; step <= steps; step++) {
    swatches.append(shade(make("i", step ? "kept" : ""), step / Math.max(1, steps)));
  }
  return make("p", "legend", "no head", swatches, `all ${count(HEADS)} heads`);
}

function drawMap(episode) {
  const most = Math.max(1, ...episodes.flatMap((each) => each.lengths.flat()));
  const sums = episodes.map((each) => each.lengths.map(sum));
  const widest = Math.max(1, ...sums.flat());
  const columns = Math.max(0, ...shown.heads_per_layer);
  const dense = columns > 4;
  const top = make("tr", "", make("th", "corner", "layer"));
  for (let head = 0; head < columns; head++) {
    top.append(make("th", "", dense ? `${head}` : `head ${head}`));
  }
  top.append(make("th", "sum", "sum"));
  const body = make("tbody");
  episode.lengths.forEach((row, layer) => {
    const slides = shown.sliding_layers.includes(layer);
    const line = make("tr", slides ? "slides" : "", make("th", "", `${layer}${slides ? " ~" : ""}`));
    for (const length of row) {
      line.append(shade(make("td", length ? "cell" : "cell none", dense ? `${length}` : count(length)), length / most));
    }
    for (let gap = row.length; gap < columns; gap++) line.append(make("td"));
    const bar = make("i", "bar");
    const total = sums[episode.index][layer];
    line.append(make("td", "sum", make("span", "", count(total)), shade(bar, total / widest)));
    body.append(line);
  });
  const ramp = make("span", "ramp");
  const legend = make("p", "legend", "0", ramp, `${count(most)} entries`);
  if (shown.sliding_layers.length) legend.append(make("span", "note", "~ sliding window"));
  if (shown.recalled_by) {
    legend.append(make("span", "note", `what is not kept is parked, and recalled by ${shown.recalled_by}`));
  }
  byId("map").replaceChildren(
    make("h2", "", "Entries kept by layer and head"),
    make("div", "wide", make("table", dense ? "dense" : "", make("thead", "", top), body)), legend);
}

function drawPrompt(episode) {
  const parts = [];
  if (episode.topics.length) parts.push(make("p", "topics", episode.topics.join(", ")));
  if (episode.segments.length) {
    const quotes = episode.segments.map((text) => make("blockquote", "", text.trim()));
    parts.push(...quotes);
  }
  const title = make("h2", "", several ? "What this episode is about" : "What it was scored with");
  byId("prompt").replaceChildren(...(parts.length ? [title, ...parts] : []));
}

"use strict";

// What is left of a text: a share per layer and head, and a row per layer over the transcript.

// A head's ranges are start, stop, start, stop, ... in ascending order.
function count(ranges) {
  let total = 0;
  for (let i = 0; i < ranges.length; i += 2) {
    total += ranges[i + 1] - ranges[i];
  }
  return total;
}

// How much of each of `cells` equal parts of [0, tokens) the heads hold, from 0 to 1.
function shares(heads, tokens, cells) {
  const held = new Float64Array(cells);
  const width = tokens / cells;
  for (const ranges of heads) {
    for (let i = 0; i < ranges.length; i += 2) {
      spread(held, ranges[i], ranges[i + 1], width);
    }
  }
  return held.map((value) => value / (width * Math.max(heads.length, 1)));
}

function spread(held, start, stop, width) {
  for (let cell = Math.floor(start / width); cell < held.length && cell * width < stop; cell++) {
    held[cell] += Math.min(stop, (cell + 1) * width) - Math.max(start, cell * width);
  }
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function drawHeads(table, layers, tokens) {
  const width = Math.max(0, ...layers.map((heads) => heads.length));
  table.classList.toggle("dense", width > 8);
  const top = document.createElement("thead").insertRow();
  for (const text of ["layer", ...Array.from({ length: width }, (_, head) => `head ${head}`)]) {
    const name = document.createElement("th");
    name.textContent = width > 8 ? text.replace("head ", "") : text;
    top.append(name);
  }
  const body = document.createElement("tbody");
  layers.forEach((heads, layer) => {
    const row = body.insertRow();
    const name = document.createElement("th");
    name.textContent = `${layer}`;
    row.append(name);
    heads.forEach((ranges, head) => drawHead(row.insertCell(), ranges, tokens, layer, head));
  });
  table.replaceChildren(top.parentNode, body);
}

function drawHead(cell, ranges, tokens, layer, head) {
  const held = count(ranges);
  const share = tokens ? held / tokens : 0;
  cell.textContent = percent(share);
  cell.title = `layer ${layer}, head ${head}: ${held} of ${tokens} positions`;
  cell.className = held ? "cell" : "none";
  cell.style.setProperty("--s", share);
}

function drawMap(canvas, layers, tokens) {
  const cells = Math.max(1, Math.min(tokens, canvas.clientWidth || 320));
  const rowHeight = Math.max(4, Math.min(14, Math.floor(280 / Math.max(layers.length, 1))));
  canvas.width = cells;
  canvas.height = rowHeight * Math.max(layers.length, 1);
  canvas.style.height = `${canvas.height}px`;
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(canvas).color;
  layers.forEach((heads, layer) => {
    shares(heads, Math.max(tokens, 1), cells).forEach((share, cell) => {
      pen.globalAlpha = share;
      pen.fillRect(cell, layer * rowHeight, 1, rowHeight - 1);
    });
  });
}

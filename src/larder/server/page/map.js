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

function shareOf(heads, start, stop) {
  let held = 0;
  for (const ranges of heads) {
    for (let i = 0; i < ranges.length; i += 2) {
      held += Math.max(0, Math.min(stop, ranges[i + 1]) - Math.max(start, ranges[i]));
    }
  }
  return stop > start ? held / ((stop - start) * Math.max(heads.length, 1)) : 0;
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function drawHeads(table, layers, tokens, color) {
  table.replaceChildren();
  layers.forEach((heads, layer) => {
    const row = table.insertRow();
    const name = document.createElement("th");
    name.textContent = `${layer + 1}`;
    row.append(name);
    heads.forEach((ranges, head) => {
      const share = tokens ? count(ranges) / tokens : 0;
      const cell = row.insertCell();
      cell.textContent = percent(share);
      cell.title = `layer ${layer + 1}, head ${head + 1}: ${count(ranges)} of ${tokens} positions`;
      cell.style.background = `rgba(${color}, ${0.75 * share})`;
    });
  });
}

function drawMap(canvas, layers, tokens, color) {
  const cells = Math.max(1, Math.min(tokens, canvas.clientWidth || 320));
  const rowHeight = Math.max(4, Math.min(14, Math.floor(280 / Math.max(layers.length, 1))));
  canvas.width = cells;
  canvas.height = rowHeight * Math.max(layers.length, 1);
  canvas.style.height = `${canvas.height}px`;
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  layers.forEach((heads, layer) => {
    shares(heads, Math.max(tokens, 1), cells).forEach((share, cell) => {
      pen.fillStyle = `rgba(${color}, ${share})`;
      pen.fillRect(cell, layer * rowHeight, 1, rowHeight - 1);
    });
  });
}

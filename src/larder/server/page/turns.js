"use strict";

// What was said, each word tinted by how many heads still hold it.

const SPEAKERS = { user: "You", assistant: "Model", system: "System" };

function made(tag, text, kind) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) {
    element.className = kind;
  }
  return element;
}

// How many heads hold each token.
function holders(layers, tokens) {
  const held = new Uint32Array(tokens);
  for (const ranges of layers.flat()) {
    for (let i = 0; i < ranges.length; i += 2) {
      for (let token = ranges[i]; token < ranges[i + 1]; token++) {
        held[token] += 1;
      }
    }
  }
  return held;
}

// Where in the joined texts of all tokens each turn stands; null for one that is not found.
function places(turns, joined) {
  let from = 0;
  return turns.map((turn) => {
    const start = joined.indexOf(turn.text, from);
    if (start < 0 || !turn.text) {
      return null;
    }
    from = start + turn.text.length;
    return { start, stop: from };
  });
}

// Pieces of [start, stop) of the joined texts that as many heads hold: text, count, first token.
function pieces(kept, held, edges, span) {
  const found = [];
  for (let token = 0; token < kept.texts.length; token++) {
    const start = Math.max(span.start, edges[token]);
    const stop = Math.min(span.stop, edges[token + 1]);
    if (start >= stop) {
      continue;
    }
    const text = kept.texts[token].slice(start - edges[token], stop - edges[token]);
    const heads = token < held.length ? held[token] : 0;
    const last = found[found.length - 1];
    if (last && last.heads === heads) {
      last.text += text;
    } else {
      found.push({ text, heads, token });
    }
  }
  return found;
}

function drawTurns(list, turns, kept, isWaiting) {
  const edges = [0];
  for (const text of kept ? kept.texts : []) {
    edges.push(edges[edges.length - 1] + text.length);
  }
  const spans = kept ? places(turns, kept.texts.join("")) : turns.map(() => null);
  const held = kept ? holders(kept.layers, kept.tokens) : [];
  const most = kept ? kept.layers.flat().length : 0;
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const rows = turns.map((turn, number) => {
    const row = made("li", "", turn.role);
    const text = made("p", spans[number] ? "" : turn.text);
    for (const piece of spans[number] ? pieces(kept, held, edges, spans[number]) : []) {
      text.append(tinted(piece, most));
    }
    row.append(made("span", SPEAKERS[turn.role] || turn.role), text);
    return row;
  });
  list.replaceChildren(...rows);
  list.lastElementChild?.lastElementChild.classList.toggle("waits", isWaiting);
  if (isAtEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

function tinted(piece, most) {
  const element = made("i", piece.text, piece.heads ? "kept" : "");
  element.style.setProperty("--s", most ? piece.heads / most : 0);
  element.title = `held by ${piece.heads} of ${most} heads`;
  element.dataset.at = piece.token;
  return element;
}

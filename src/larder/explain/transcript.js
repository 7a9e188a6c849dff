// The transcript. Text is laid out once; shades are put on where the reader looks.
const CHUNK = 200; // tokens; a chunk is what is shaded in one go
const LEVELS = 24; // shades that an eye can tell apart; fewer heads give fewer
const chunks = [];
const drawn = new WeakMap();

const level = (kept) => (HEADS <= LEVELS ? kept : Math.ceil((kept / HEADS) * LEVELS));
const shareOf = (step) => step / Math.max(1, Math.min(HEADS, LEVELS));

function piece(text, step, isMark) {
  const element = make("span", step ? "kept" : "", text);
  if (isMark) element.classList.add("mark");
  return step ? shade(element, shareOf(step)) : element;
}

const isMark = (message, index) =>
  index < message.lead || index >= message.tokens.length - message.tail;

// Equal neighbors share one element, unless each token is asked for by itself.
function shadeChunk(chunk, episode, single) {
  const { message, start, from, to } = chunk;
  const parts = [];
  let run = null;
  for (let index = from; index < to; index++) {
    const step = level(episode.kept[start + index]);
    const mark = isMark(message, index);
    if (!single && run && run.step === step && run.mark === mark && !mark) {
      run.text += message.tokens[index];
    } else {
      run = { text: message.tokens[index], step, mark, at: start + index };
      parts.push(run);
    }
  }
  chunk.element.replaceChildren(...parts.map((part) => {
    const element = piece(part.text, part.step, part.mark);
    if (single) element.dataset.at = part.at;
    return element;
  }));
  drawn.set(chunk.element, { episode, single });
}

function plainChunk(chunk) {
  const { message, from, to } = chunk;
  for (let index = from; index < to; index++) {
    if (isMark(message, index)) chunk.element.append(piece(message.tokens[index], 0, true));
    else chunk.element.append(message.tokens[index]);
  }
  chunk.element.normalize();
}

function layMessage(message, index, before) {
  const body = make("p", "text");
  for (let from = 0; from < message.tokens.length; from += CHUNK) {
    const to = Math.min(from + CHUNK, message.tokens.length);
    const chunk = { message, start: starts[index], from, to, element: make("span", "chunk") };
    chunk.element.dataset.chunk = chunks.length;
    plainChunk(chunk);
    chunks.push(chunk);
    body.append(chunk.element);
  }
  const who = message.speaker || message.role.charAt(0).toUpperCase() + message.role.slice(1);
  const again = before && before.role === message.role && before.speaker === message.speaker;
  const row = make("div", `message ${message.role === "system" ? "system" : "speech"}`,
    make("p", "speaker", again ? "" : who), body);
  if (message.role === "assistant") row.classList.add("assistant");
  return row;
}

function layTranscript(current) {
  const rows = [];
  let date = "";
  shown.messages.forEach((message, index) => {
    const turned = message.date !== "" && message.date !== date;
    if (turned) {
      date = message.date;
      rows.push(make("h3", "session", date));
    }
    rows.push(layMessage(message, index, turned ? null : shown.messages[index - 1]));
  });
  byId("messages").append(...rows);
  const near = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chunk = chunks[entry.target.dataset.chunk];
      if (!entry.isIntersecting) near.delete(chunk);
      else {
        near.add(chunk);
        if (drawn.get(chunk.element)?.episode !== current()) shadeChunk(chunk, current(), false);
      }
    }
  }, { rootMargin: "800px" });
  for (const chunk of chunks) watcher.observe(chunk.element);
  addEventListener("beforeprint", () => {
    for (const chunk of chunks) shadeChunk(chunk, current(), false);
  });
  return () => near.forEach((chunk) => shadeChunk(chunk, current(), false));
}

function seek(token) {
  const chunk = chunks.findLast((each) => each.start + each.from <= token) ?? chunks[0];
  if (!chunk) return;
  const go = () => scrollBy({ top: chunk.element.getBoundingClientRect().top - edge() - 24 });
  go();
  requestAnimationFrame(go); // rows above have now their true heights
}

const edge = () => Math.max(0, byId("rail").getBoundingClientRect().bottom);

// The first chunk whose end lies below a line of the screen.
function chunkAt(line) {
  let low = 0;
  let high = chunks.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (chunks[middle].element.getBoundingClientRect().bottom < line) low = middle + 1;
    else high = middle;
  }
  return chunks[low];
}

function followView(view) {
  let waiting = false;
  const place = () => {
    waiting = false;
    if (!chunks.length) return;
    const [first, last] = [chunkAt(edge()), chunkAt(innerHeight)];
    const from = (first.start + first.from) / TOKENS;
    const to = (last.start + last.to) / TOKENS;
    view.style.left = `${from * 100}%`;
    view.style.width = `${(to - from) * 100}%`;
  };
  const soon = () => {
    if (!waiting) requestAnimationFrame(place);
    waiting = true;
  };
  addEventListener("scroll", soon, { passive: true });
  addEventListener("resize", soon);
  soon();
}

function layerBars(episode, at) {
  const bars = make("span", "layers");
  episode.layers.forEach((row, layer) => {
    const share = row[at] / Math.max(1, shown.heads_per_layer[layer]);
    bars.append(shade(make("i", share ? "kept" : ""), share));
  });
  return make("span", "breakdown", "layers ", `0`, bars, `${episode.layers.length - 1}`);
}

function tipFor(episode, at, text) {
  const counts = make("span", "others");
  for (const other of several ? episodes : []) {
    counts.append(make("span", other === episode ? "now" : "", `${other.index + 1}: ${other.kept[at]}`));
  }
  return [
    make("b", "", JSON.stringify(text).slice(1, -1).replaceAll(" ", "\u00b7") || "(part of a character)"),
    make("span", "", `kept by ${episode.kept[at]} of ${plural(HEADS, "head", "heads")}`),
    episode.layers.length ? layerBars(episode, at) : null,
    several ? make("span", "breakdown", "episodes ", counts) : null,
  ].filter(Boolean);
}

function followPointer(current) {
  const tip = byId("tip");
  byId("messages").addEventListener("pointerover", (event) => {
    const element = event.target.closest(".chunk");
    if (!element) return void (tip.hidden = true);
    const chunk = chunks[element.dataset.chunk];
    const state = drawn.get(element);
    if (!state?.single || state.episode !== current()) shadeChunk(chunk, current(), true);
    const token = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-at]");
    if (!token) return void (tip.hidden = true);
    const at = Number(token.dataset.at);
    tip.replaceChildren(...tipFor(current(), at, token.textContent));
    tip.hidden = false;
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > edge() ? above : box.bottom + 8}px`;
  });
  byId("messages").addEventListener("pointerleave", () => (tip.hidden = true));
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });
}

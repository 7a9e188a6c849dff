"use strict";

const find = (id) => document.getElementById(id);
const state = { model: "", session: null, turns: [], sessions: [], speaking: null, kept: null };
const PACE = 3000; // milliseconds between two looks at what the server holds

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (bytes >= 1024 && place < units.length - 1) {
    bytes /= 1024;
    place += 1;
  }
  return `${place ? bytes.toFixed(1) : bytes} ${units[place]}`;
}

function made(tag, text, kind) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) {
    element.className = kind;
  }
  return element;
}

function trouble(error) {
  find("trouble").textContent = error ? error.message : "";
  find("trouble").hidden = !error;
  if (error && error.status === 401) {
    find("door").hidden = false;
  }
}

// Runs something; what goes wrong is told on the page.
function guarded(act) {
  return async (...given) => {
    try {
      await act(...given);
    } catch (error) {
      trouble(error);
    }
  };
}

async function look() {
  state.sessions = (await get("v1/sessions")).data;
  showSessions();
  showTiers();
  if (state.session !== null && !state.speaking && known()) {
    const session = state.session;
    const kept = await get(`${place(session)}/kept`);
    if (session === state.session && !state.speaking) {
      state.kept = kept;
      state.turns = kept.turns;
      showTurns();
      showKept();
    }
  }
}

function known() {
  return state.sessions.find((each) => each.id === state.session);
}

function showSessions() {
  const rows = state.sessions.map((session) => {
    const row = document.createElement("li");
    const button = made("button", session.id);
    const held = Object.entries(session.tier_bytes).filter(([, bytes]) => bytes > 0);
    const told = held.map(([tier, bytes]) => `${tier} ${size(bytes)}`).join(", ") || "tokens only";
    const pin = session.pinned ? ", pinned" : "";
    button.append(made("small", `${session.tokens} tokens, ${session.state}${pin}`));
    button.append(made("small", told));
    button.type = "button";
    button.setAttribute("aria-current", String(session.id === state.session));
    button.addEventListener("click", guarded(() => choose(session.id)));
    row.append(button);
    return row;
  });
  const focused = document.activeElement?.closest("#sessions li");
  const at = focused ? [...find("sessions").children].indexOf(focused) : -1;
  find("sessions").replaceChildren(...rows);
  rows[at]?.firstChild.focus();
}

function showTiers() {
  const sums = {};
  for (const session of state.sessions) {
    for (const [tier, bytes] of Object.entries(session.tier_bytes)) {
      sums[tier] = (sums[tier] || 0) + bytes;
    }
  }
  const rows = Object.entries(sums).map(([tier, bytes]) => {
    const row = document.createElement("div");
    row.append(made("dt", tier), made("dd", size(bytes)));
    return row;
  });
  find("tiers").replaceChildren(...rows);
}

function showTurns() {
  const list = find("turns");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  list.replaceChildren(...state.turns.map(shownTurn));
  if (isAtEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

function shownTurn(turn) {
  const row = made("li", "", turn.role);
  const text = made("span", turn.text);
  if (state.kept && turn.stop > turn.start) {
    const share = shareOf(state.kept.layers.flat(), turn.start, turn.stop);
    text.style.setProperty("--share", share);
    row.title = `${percent(share)} of this is kept, over all layers and heads`;
  }
  row.append(text);
  return row;
}

function showKept() {
  const { layers, tokens } = state.kept || { layers: [], tokens: 0 };
  const heads = layers.flat();
  const held = heads.reduce((sum, ranges) => sum + count(ranges), 0);
  const share = tokens && heads.length ? held / (tokens * heads.length) : 0;
  find("share").textContent = tokens
    ? `${percent(share)} of ${tokens} positions over ${heads.length} heads`
    : "Nothing has been read yet.";
  const color = getComputedStyle(document.documentElement).getPropertyValue("--kept").trim();
  drawHeads(find("heads"), layers, tokens, color);
  drawMap(find("map"), layers, tokens, color);
  for (const button of find("actions").children) {
    button.disabled = !known() || Boolean(state.speaking);
  }
  find("actions").firstElementChild.textContent = known()?.pinned ? "Unpin" : "Pin";
}

// The address names the session, so that it can be kept and opened again.
function remember() {
  const name = state.session === null ? "" : `#${encodeURIComponent(state.session)}`;
  history.replaceState(null, "", `${location.pathname}${name}`);
}

async function choose(session) {
  state.speaking?.abort();
  Object.assign(state, { session, turns: [], kept: null, speaking: null });
  find("took").textContent = "";
  trouble(null);
  remember();
  showTurns();
  showKept();
  await look();
  find("text").focus();
}

// A name that one can tell from others in a list, and that two tabs do not share.
function newName() {
  const now = new Date().toISOString().slice(0, 16).replace("T", " ");
  return `${now} ${Math.random().toString(36).slice(2, 6)}`;
}

async function say(text) {
  state.session ??= newName();
  const spoken = { role: "assistant", text: "" };
  const before = state.turns;
  state.turns = [...before, { role: "user", text }, spoken];
  state.speaking = new AbortController();
  speaking(true);
  showTurns();
  const line = find("turns").lastElementChild.firstChild;
  try {
    const body = {
      model: state.model,
      session_id: state.session,
      messages: state.turns.slice(0, -1).map((turn) => ({ role: turn.role, content: turn.text })),
      stream_options: { include_usage: true },
    };
    const took = await answer(body, state.speaking.signal, (piece) => {
      spoken.text += piece;
      line.textContent = spoken.text;
      find("turns").scrollTop = find("turns").scrollHeight;
    });
    showTook(took);
    trouble(null);
  } catch (error) {
    // Stopped or failed, the session is as it was before; what was typed is given back.
    state.turns = before;
    find("text").value ||= text;
    if (error.name !== "AbortError") {
      trouble(error);
    }
  }
  state.speaking = null;
  speaking(false);
  showTurns();
}

function showTook(took) {
  if (took === null) {
    return;
  }
  const { kv, usage } = took;
  state.session = kv.session;
  remember();
  const read = usage ? `${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens}` : "";
  const exact = kv.lossless ? "nothing was dropped" : "from a compressed cache";
  find("took").textContent =
    `${read} prompt tokens were cached; first token after ${kv.first_seconds.toFixed(2)} s; ${exact}`;
}

function speaking(isSo) {
  find("send").disabled = isSo;
  find("stop").hidden = !isSo;
  for (const button of find("actions").children) {
    button.disabled = isSo;
  }
}

async function act(name) {
  const session = state.session;
  const pinned = known()?.pinned;
  if (name === "delete") {
    if (!window.confirm(`Forget ${session}?`)) {
      return;
    }
    await ask(place(session), { method: "DELETE" });
    await choose(null);
    return;
  }
  const path = name === "pin" && pinned ? "unpin" : name;
  const told = await (await post(`${place(session)}/${path}`, {})).json();
  if (name === "fork") {
    await choose(told.id);
    return;
  }
  await look();
}

async function enter() {
  const [model] = (await get("v1/models")).data;
  state.model = model.id;
  find("model").textContent = `${model.id}, ${model.kv_policy}`;
  find("door").hidden = true;
  trouble(null);
  showKept();
  const named = decodeURIComponent(location.hash.slice(1));
  await (named ? choose(named) : look());
}

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value);
  find("key").value = "";
  guarded(enter)();
});
find("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (text && !state.speaking) {
    find("text").value = "";
    guarded(async () => {
      await say(text);
      await look();
    })();
  }
});
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("say").requestSubmit();
  }
});
find("stop").addEventListener("click", () => state.speaking?.abort());
find("new").addEventListener("click", guarded(() => choose(null)));
for (const button of find("actions").children) {
  button.addEventListener("click", guarded(() => act(button.dataset.act)));
}
window.addEventListener("resize", () => showKept());
setInterval(() => {
  if (state.model && document.visibilityState === "visible") {
    guarded(look)();
  }
}, PACE);
guarded(enter)();

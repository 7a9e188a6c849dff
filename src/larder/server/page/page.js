"use strict";

const find = (id) => document.getElementById(id);
const state = {
  model: "", beyond: "", isOperator: true, numbers: null, sessions: [],
  session: null, epoch: -1, turns: [], kept: null, speaking: null,
};
const PACE = 2000; // milliseconds between two looks at what the server holds

function trouble(error) {
  const isLocked = error?.status === 401;
  const told = isLocked ? lockedMessage() : error?.message || "";
  find("said").textContent = told;
  find("trouble").hidden = !told;
  if (isLocked) {
    find("door").hidden = false;
    find("room").hidden = true;
    find("key").focus();
  }
}

// Nothing to who has not been asked for a key yet.
function lockedMessage() {
  return sessionStorage.getItem(KEY) === null ? "" : "The server does not know this key.";
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

async function look(isForced = false) {
  state.sessions = (await get("v1/sessions")).data;
  state.numbers = await numbers();
  drawSessions(find("sessions"), state.sessions, state.session, guarded(choose), state.numbers);
  drawTiers(find("tiers"), state.sessions, state.numbers);
  find("none").hidden = state.sessions.length > 0;
  const session = known();
  // What is held is much to draw, so it is asked for only when there is something new.
  if (session && (isForced || state.epoch !== session.epoch || session.state === "running")) {
    await lookInto(session);
  }
  showFigures();
}

async function lookInto(session) {
  let kept;
  try {
    kept = await get(`${place(session.id)}/kept`);
  } catch (error) {
    if (error.status === 404) {
      return; // it has gone since, as one whose first answer was stopped
    }
    throw error;
  }
  if (session.id !== state.session) {
    return;
  }
  state.kept = kept;
  if (!state.speaking) {
    state.epoch = session.epoch;
    state.turns = kept.turns;
    showTurns();
  }
  showKept();
}

// Null for who is no operator, who is not asked for again.
async function numbers() {
  if (!state.isOperator) {
    return null;
  }
  try {
    return tierNumbers(await (await ask("metrics")).text());
  } catch (error) {
    state.isOperator = error.status !== 403;
    return null;
  }
}

function known() {
  return state.sessions.find((each) => each.id === state.session);
}

function showTurns() {
  drawTurns(find("turns"), state.turns, state.kept, Boolean(state.speaking));
  find("blank").hidden = state.turns.length > 0;
}

function showKept() {
  const { layers, tokens } = state.kept || { layers: [], tokens: 0 };
  find("maps").hidden = !tokens;
  drawHeads(find("heads"), layers, tokens);
  drawMap(find("map"), layers, tokens);
  showFigures();
}

function showFigures() {
  const { layers, tokens } = state.kept || { layers: [], tokens: 0 };
  const heads = layers.flat();
  const held = heads.reduce((sum, ranges) => sum + count(ranges), 0);
  const session = known();
  find("share").textContent = tokens ? percent(held / (tokens * heads.length)) : "–";
  find("length").textContent = session ? session.tokens.toLocaleString("en") : "–";
  find("size").textContent = session ? size(memoryOf(session)) : "–";
  find("why").textContent = [why(session, tokens), parked(tokens), state.beyond].filter(Boolean).join(" ");
  find("episodes").replaceChildren(...(state.kept?.episodes || []).map(shownEpisode));
  for (const button of find("actions").children) {
    button.disabled = !session || Boolean(state.speaking);
  }
  find("actions").firstElementChild.textContent = session?.pinned ? "Unpin" : "Pin";
}

function why(session, tokens) {
  if (!session) {
    return "Nothing has been read yet.";
  }
  if (!tokens && !state.speaking) {
    const place = { host: "in host memory", disk: "in the store" }[session.tier];
    if (place) {
      return `Its cache is ${place}, and comes back when you go on.`;
    }
    return "Its cache is not in memory. When you go on, what was said is read again, but not what another conversation has in common with it.";
  }
  const gone = session.evicted_tokens + session.merged_tokens;
  const way = session.merged_tokens ? "merged into others" : "dropped";
  return gone ? `${gone.toLocaleString("en")} entries per head were ${way}.` : "";
}

function parked(tokens) {
  const heads = (state.kept?.parked || []).flat();
  const held = heads.reduce((sum, ranges) => sum + count(ranges), 0);
  const all = (state.kept?.layers || []).flat().length;
  return held ? `${percent(held / (tokens * all))} is parked, and looked up when it is needed.` : "";
}

function shownEpisode(episode) {
  const told = `${episode.segments} pieces, ${episode.kept_tokens} kept, ${size(episode.nbytes)}`;
  const row = made("li", `Episode ${episode.number + 1}: ${told} (${episode.tier})`);
  row.title = episode.about.join("\n");
  row.setAttribute("aria-current", String(episode.is_active));
  return row;
}

// The address names the session, so that it can be kept and opened again.
function remember() {
  const name = state.session === null ? "" : `#${encodeURIComponent(state.session)}`;
  history.replaceState(null, "", `${location.pathname}${name}`);
}

async function choose(session) {
  state.speaking?.abort();
  Object.assign(state, { session, turns: [], kept: null, speaking: null, epoch: -1 });
  speaking(false);
  find("took").textContent = "";
  trouble(null);
  remember();
  showTurns();
  showKept();
  await look(true);
  const chosen = find("sessions").querySelector("[aria-current=true]");
  chosen?.scrollIntoView({ block: "nearest", inline: "nearest" });
  find("text").focus({ preventScroll: true });
}

// A name that one can tell from others in a list, and that two tabs do not share.
function newName(text) {
  const words = text.replace(/[^\p{L}\p{N} ,.'!-]/gu, " ").split(" ").filter(Boolean).slice(0, 7);
  const told = [...words.join(" ")].slice(0, 48).join("");
  return `${told} #${Math.random().toString(36).slice(2, 6)}`.trim();
}

async function say(text) {
  state.session ??= newName(text);
  const own = state.session;
  const spoken = { role: "assistant", text: "" };
  const before = state.turns;
  const speaker = new AbortController();
  state.turns = [...before, { role: "user", text }, spoken];
  state.speaking = speaker;
  speaking(true);
  showTurns();
  find("turns").scrollTop = find("turns").scrollHeight;
  try {
    const body = {
      model: state.model,
      session_id: own,
      messages: state.turns.slice(0, -1).map((turn) => ({ role: turn.role, content: turn.text })),
      stream_options: { include_usage: true },
    };
    const took = await answer(body, speaker.signal, (piece) => {
      spoken.text += piece;
      if (state.speaking === speaker) {
        hearMore(spoken);
      }
    });
    if (state.speaking === speaker) {
      showTook(took);
      trouble(null);
    }
  } catch (error) {
    if (state.speaking !== speaker) {
      return; // another conversation has been chosen
    }
    // Stopped or failed, the session is as it was before; what was typed is given back.
    state.turns = before;
    if (!before.length) {
      Object.assign(state, { session: null, kept: null });
      remember();
      showKept();
    }
    find("text").value ||= text;
    if (error.name !== "AbortError") {
      trouble(error);
    }
  }
  if (state.speaking === speaker) {
    state.speaking = null;
    speaking(false);
    showTurns();
  }
}

function hearMore(spoken) {
  const list = find("turns");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  list.lastElementChild.lastElementChild.textContent = spoken.text;
  if (isAtEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

function showTook(took) {
  if (took === null) {
    return;
  }
  const { kv, usage } = took;
  state.session = kv.session;
  remember();
  const cached = usage ? usage.prompt_tokens_details.cached_tokens : 0;
  const read = usage ? `${cached} of ${usage.prompt_tokens} prompt tokens came from the cache` : "";
  const exact = kv.lossless ? "nothing was dropped" : "answered from a compressed cache";
  find("took").textContent =
    `${read}; first token after ${kv.first_seconds.toFixed(2)} s; ${exact}`;
}

function speaking(isSo) {
  find("send").hidden = isSo;
  find("stop").hidden = !isSo;
  for (const button of find("actions").children) {
    button.disabled = isSo || !known();
  }
}

async function act(name) {
  const session = state.session;
  if (name === "delete") {
    if (!window.confirm(`Forget ${session}?`)) {
      return;
    }
    await ask(place(session), { method: "DELETE" });
    await choose(null);
    return;
  }
  const path = name === "pin" && known()?.pinned ? "unpin" : name;
  const told = await (await post(`${place(session)}/${path}`, {})).json();
  if (name === "fork") {
    await choose(told.id);
    return;
  }
  if (name === "release") {
    state.kept = null;
    showTurns();
    showKept();
  }
  await look(name !== "release");
  find("took").textContent = outcome(name, told);
}

// What has become of a cache, where the buttons do not show it.
function outcome(name, session) {
  if (name !== "prefetch" && name !== "compact") {
    return "";
  }
  if (session.tier !== "device") {
    return "There is no cache to bring to the device: when you go on, what was said is read again.";
  }
  const slack = name === "compact" ? ", without slack" : "";
  return `Its cache is on the device${slack}: ${size(session.tier_bytes.device)}.`;
}

async function enter() {
  const [model] = (await get("v1/models")).data;
  Object.assign(state, { model: model.id, isOperator: true });
  find("model").replaceChildren(model.id, made("span", model.kv_policy));
  find("model").title = model.kv_policy;
  const beyond = (model.kv_beyond_budget || []).join("; ");
  state.beyond = beyond && `Beyond the budget: ${beyond}.`;
  find("door").hidden = true;
  find("room").hidden = false;
  trouble(null);
  showTurns();
  showKept();
  const named = decodeURIComponent(location.hash.slice(1));
  await (named ? choose(named) : look());
}

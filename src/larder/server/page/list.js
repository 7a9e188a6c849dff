"use strict";

// The sessions with the memory they take, and the tiers that hold it.

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (bytes >= 1024 && place < units.length - 1) {
    bytes /= 1024;
    place += 1;
  }
  return `${place && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[place]}`;
}

function bar(share) {
  const element = made("span", "", "bar");
  const filled = made("i", "");
  filled.style.setProperty("--s", Math.min(1, share));
  element.append(filled);
  return element;
}

function memoryOf(session) {
  return session.tier_bytes.device + session.tier_bytes.host;
}

// What a session's fullest cache holds of the budget; without one, its memory as a share of the
// server's for caches, where that is known.
function heldOf(session, numbers) {
  if (session.budget_tokens) {
    const said = `${session.held_tokens} of ${session.budget_tokens} entries per head`;
    return { said, share: session.held_tokens / session.budget_tokens };
  }
  const budget = numbers?.budget_bytes.device;
  return { said: "no budget", share: budget ? session.tier_bytes.device / budget : null };
}

function drawSessions(list, sessions, current, choose, numbers) {
  const rows = sessions.map((session) => {
    const row = document.createElement("li");
    const button = made("button", session.id);
    const held = Object.entries(session.tier_bytes).filter(([, bytes]) => bytes > 0);
    const told = held.map(([tier, bytes]) => `${tier} ${size(bytes)}`).join(", ") || "tokens only";
    const pin = session.pinned ? ", pinned" : "";
    const state = session.state === "idle" ? "" : `, ${session.state}`;
    const line = made("small", `${session.tokens} tokens${state}${pin}`);
    line.classList.toggle("running", session.state !== "idle");
    const { said, share } = heldOf(session, numbers);
    button.append(line, made("small", told), made("small", said));
    if (share !== null) {
      button.append(bar(share));
    }
    button.type = "button";
    button.setAttribute("aria-current", String(session.id === current));
    button.addEventListener("click", () => choose(session.id));
    row.append(button);
    return row;
  });
  const focused = document.activeElement?.closest("#sessions li");
  const at = focused ? [...list.children].indexOf(focused) : -1;
  list.replaceChildren(...rows);
  rows[at]?.firstChild.focus();
}

// Bytes by tier of the server's numbers, which only an operator may see; else of what is seen here.
function drawTiers(list, sessions, numbers) {
  const sums = {};
  for (const session of sessions) {
    for (const [tier, bytes] of Object.entries(session.tier_bytes)) {
      sums[tier] = (sums[tier] || 0) + bytes;
    }
  }
  const budgets = numbers?.budget_bytes || {};
  const told = Object.entries({ ...sums, ...numbers?.tier_bytes });
  const rows = told.filter(([tier, bytes]) => bytes || budgets[tier]).map(([tier, bytes]) => {
    const row = document.createElement("div");
    const budget = budgets[tier];
    const most = budget ? ` of ${size(budget)}` : "";
    row.append(made("dt", tier), made("dd", `${size(bytes)}${most}`));
    if (budget) {
      row.append(bar(bytes / budget));
    }
    return row;
  });
  list.replaceChildren(...rows);
}

// What Prometheus is told of tiers: {tier_bytes: {device: 10}, budget_bytes: {device: 40}}.
function tierNumbers(text) {
  const found = { tier_bytes: {}, budget_bytes: {} };
  for (const line of text.matchAll(/^larder_(tier_bytes|budget_bytes)\{tier="(\w+)"\} (\S+)$/gm)) {
    found[line[1]][line[2]] = Number(line[3]);
  }
  return found;
}

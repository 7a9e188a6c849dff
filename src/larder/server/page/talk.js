"use strict";

// Requests to the server this page came from, and answers as they come.

const KEY = "larder-key";

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

async function ask(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: headers(options.headers || {}) });
  if (!reply.ok) {
    throw await complaint(reply);
  }
  return reply;
}

async function complaint(reply) {
  let message = `The server answered ${reply.status}.`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // no body of ours: the status must do
  }
  const error = new Error(message);
  error.status = reply.status;
  return error;
}

async function get(path) {
  return (await ask(path)).json();
}

async function post(path, body, signal) {
  return ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

function place(session) {
  return `v1/sessions/${session.split("/").map(encodeURIComponent).join("/")}`;
}

// Calls heard(text) for each piece and returns what the answer took.
async function answer(body, signal, heard) {
  const reply = await post("v1/chat/completions", { ...body, stream: true }, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let took = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      return took;
    }
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      took = hear(event, heard) || took;
    }
  }
}

function hear(event, heard) {
  if (!event.startsWith("data: ") || event === "data: [DONE]") {
    return null;
  }
  const told = JSON.parse(event.slice("data: ".length));
  if (told.error) {
    throw new Error(told.error.message);
  }
  for (const choice of told.choices) {
    if (choice.delta.content) {
      heard(choice.delta.content);
    }
  }
  return told.kv ? { kv: told.kv, usage: told.usage } : null;
}

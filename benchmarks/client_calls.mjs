// Calls of the AI SDK against a running server; one JSON line per call.
//
//     node benchmarks/client_calls.mjs URL FOLDER_WITH_NODE_MODULES [--images]
//
// With --images the server has a model that sees, and calls have images.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, folder, images] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, generateObject, streamObject, tool, stepCountIs } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const words = ["bread", "salt", "plum"];
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({
  name: "larder",
  ...settings,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const models = {
  "@ai-sdk/openai-compatible": compatible("seed"),
  "@ai-sdk/openai chat": createOpenAI(settings).chat("seed"),
  "@ai-sdk/openai responses": createOpenAI(settings).responses("seed"),
};
const schema = z.object({ what: z.enum(words), kept: z.boolean() });
const count = tool({ description: "Count.", inputSchema: schema, execute: async () => "3" });
const loop = {
  tools: { count },
  toolChoice: "required",
  stopWhen: stepCountIs(3),
  maxOutputTokens: 60,
  // The bundled model would write calls until it is cut.
  providerOptions: { openai: { parallelToolCalls: false }, larder: { parallel_tool_calls: false } },
};

function check(value, what) {
  if (!value) throw new Error(what);
}

const calls = {
  async generateText(model) {
    const told = await generateText({ model, prompt: "Hello", maxOutputTokens: 8 });
    check(told.usage.outputTokens > 0, "no usage");
  },
  async "streamText with a tool, 3 steps"(model) {
    const told = streamText({ model, prompt: "What do I have?", ...loop, onError() {} });
    let parts = 0;
    for await (const part of told.fullStream) {
      if (part.type === "error") throw part.error;
      parts += 1;
    }
    const steps = await told.steps;
    check(parts > 0 && steps.length === 3, `${steps.length} steps`);
    for (const step of steps) check(words.includes(step.toolCalls[0].input.what), "no call");
  },
  async "generateText with a tool, 3 steps"(model) {
    const told = await generateText({ model, prompt: "What do I have?", ...loop });
    check(told.steps.length === 3 && told.steps[0].toolResults[0].output === "3", "no steps");
  },
  async "generateText with a tool, 10 steps of one session"(model) {
    const ten = { ...loop, stopWhen: stepCountIs(10) };
    const told = await generateText({ model, prompt: `Ten times, ${Math.random()}?`, ...ten });
    check(told.steps.length === 10, `${told.steps.length} steps`);
    const cached = told.steps.map((step) => step.usage.inputTokenDetails?.cacheReadTokens ?? 0);
    for (let step = 1; step < 10; step += 1) {
      check(cached[step] > cached[step - 1], `cached tokens ${cached.join(", ")}`);
    }
    const { data } = await (await fetch(`${url}/v1/sessions`)).json();
    check(!data.some((session) => /~\d+$/.test(session.id)), "a branch");
  },
  async generateObject(model) {
    const told = await generateObject({ model, schema, prompt: "What?", maxOutputTokens: 60 });
    check(words.includes(told.object.what), "no object");
  },
  async streamObject(model) {
    const told = streamObject({ model, schema, prompt: "What?", maxOutputTokens: 60 });
    let parts = 0;
    for await (const _ of told.partialObjectStream) parts += 1;
    check(parts > 0 && words.includes((await told.object).what), "no object");
  },
};

// One red pixel.
const pixel = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4wSUHAAKOAPGpWvKOAAAAAElFTkSuQmCC",
  "base64",
);
const shown = [{ type: "image", image: pixel }, { type: "text", text: "What is this?" }];
const given = { messages: [{ role: "user", content: shown }], maxOutputTokens: 8 };
const imageCalls = {
  async "generateText with an image"(model) {
    const told = await generateText({ model, ...given });
    check(told.usage.outputTokens > 0, "no usage");
  },
  async "streamText with an image"(model) {
    const told = streamText({ model, ...given, onError() {} });
    for await (const part of told.fullStream) if (part.type === "error") throw part.error;
    check((await told.usage).outputTokens > 0, "no usage");
  },
};

const { version } = require("ai/package.json");
let failed = 0;
for (const [name, model] of Object.entries(models)) {
  for (const [what, call] of Object.entries(images ? imageCalls : calls)) {
    let error = "";
    const started = Date.now();
    try {
      await call(model);
    } catch (caught) {
      error = String(caught?.message ?? caught).slice(0, 600);
      failed += 1;
    }
    const seconds = (Date.now() - started) / 1000;
    console.log(JSON.stringify({ client: `ai with ${name}`, version, call: what, seconds, error }));
  }
}
process.exit(failed ? 1 : 0);

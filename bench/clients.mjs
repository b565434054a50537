// Asks a server of OpenAI's interface by clients of npm: node clients.mjs URL CLIENT, in a folder where they are installed
// (npm install openai ai @ai-sdk/openai-compatible). The features, the model and what is printed are those of clients.py.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, name] = process.argv.slice(2);
const need = createRequire(pathToFileURL(process.cwd() + "/"));
const load = (module) => import(pathToFileURL(need.resolve(module)).href);

const REPLY = "Hello, 世界 😀! One, two, three, four.", CUT = "Hello, 世界 😀! One, two,", ANSWER = "It is 3.";
const HELLO = [{ role: "user", content: "hello" }], SUM = [{ role: "user", content: "1 + 2?" }];
const WILD = [{ role: "user", content: "anything" }];
const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };
const ADD = { type: "function", function: { name: "add", description: "Add two numbers.", parameters } };
const all = async (stream) => { const parts = []; for await (const part of stream) parts.push(part); return parts; };
const drawn = async (text) => {
  const [one, again, other] = [await text(1), await text(1), await text(2)];
  assert.equal(one, again);
  assert.notEqual(one, other);
};

async function openai() {
  const { default: OpenAI } = await load("openai");
  const { chat } = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const create = (choice) => chat.completions.create({ model: "tiny", temperature: 0, ...choice });
  const wild = { messages: WILD, temperature: 2, max_tokens: 16 };
  const whole = async () => {
    const [choice] = (await create({ messages: HELLO })).choices;
    assert.deepEqual([choice.message.content, choice.finish_reason], [REPLY, "stop"]);
  };
  return {
    whole,
    stream: async () => {
      const parts = await all(await create({ messages: HELLO, stream: true }));
      assert.equal(parts.map((part) => part.choices[0].delta.content ?? "").join(""), REPLY);
    },
    tools: async () => {
      const [{ message, finish_reason }] = (await create({ messages: SUM, tools: [ADD] })).choices;
      assert.equal(finish_reason, "tool_calls");
      const [call] = message.tool_calls;
      assert.deepEqual(JSON.parse(call.function.arguments), { a: 1, b: 2 });
      const messages = [...SUM, message, { role: "tool", tool_call_id: call.id, content: "3" }];
      assert.equal((await create({ messages, tools: [ADD] })).choices[0].message.content, ANSWER);
    },
    tools_in_a_stream: async () => {
      const end = await chat.completions.stream({ model: "tiny", temperature: 0, messages: SUM, tools: [ADD] }).finalMessage();
      assert.deepEqual(JSON.parse(end.tool_calls[0].function.arguments), { a: 1, b: 2 });
    },
    n: async () => {
      const { choices } = await create({ ...wild, n: 3, seed: 1 });
      assert.equal(new Set(choices.map((choice) => choice.message.content)).size, 3);
    },
    seed: () => drawn(async (seed) => (await create({ ...wild, seed })).choices[0].message.content),
    logprobs: async () => {
      const { content } = (await create({ messages: HELLO, logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
      assert(content.map((one) => one.token).join("").startsWith("Hello, "));
    },
    stop: async () => assert.equal((await create({ messages: HELLO, stop: [" three"] })).choices[0].message.content, CUT),
    usage: async () => {
      const { usage } = await create({ messages: HELLO });
      const parts = await all(await create({ messages: HELLO, stream: true, stream_options: { include_usage: true } }));
      assert.equal(parts.at(-1).usage.completion_tokens, usage.completion_tokens);
    },
    errors: () => assert.rejects(create({ messages: [{ role: "oracle", content: "x" }] }), { status: 400, message: /oracle/ }),
    formats: async () => {
      const schema = { type: "json_schema", json_schema: { name: "sum", schema: parameters } };
      for (const response_format of [{ type: "json_object" }, schema])
        await assert.rejects(create({ messages: HELLO, response_format }), { status: 400, message: /response_format/ });
      for (const tool_choice of ["required", { type: "function", function: { name: "add" } }])
        await assert.rejects(create({ messages: SUM, tools: [ADD], tool_choice }), { status: 400, message: /tool_choice/ });
    },
    abort: async () => {
      const stream = await create({ ...wild, max_tokens: 2000, stream: true });
      for await (const _ of stream) { stream.controller.abort(); break; }
      await whole();
    },
  };
}

async function aiSdk() {
  const { generateObject, generateText, streamText, tool, jsonSchema, stepCountIs } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const model = createOpenAICompatible({ name: "outsize", baseURL: url, includeUsage: true }).chatModel("tiny");
  const given = (choice) => ({ model, temperature: 0, maxRetries: 0, messages: HELLO, ...choice });
  const add = tool({ description: "Add two numbers.", inputSchema: jsonSchema(parameters), execute: async ({ a, b }) => `${a + b}` });
  const wild = { messages: WILD, temperature: 2, maxOutputTokens: 16 };
  const whole = async () => {
    const { text, finishReason } = await generateText(given({}));
    assert.deepEqual([text, finishReason], [REPLY, "stop"]);
  };
  const called = { messages: SUM, tools: { add }, stopWhen: stepCountIs(3) };
  const none = null;
  return {
    whole,
    stream: async () => assert.equal((await all(streamText(given({})).textStream)).join(""), REPLY),
    tools: async () => {
      const { text, steps } = await generateText(given(called));
      assert.deepEqual([steps[0].toolCalls[0].input, text], [{ a: 1, b: 2 }, ANSWER]);
    },
    tools_in_a_stream: async () => {
      const result = streamText(given(called));
      assert.equal((await all(result.textStream)).join(""), ANSWER);
      assert.deepEqual((await result.steps)[0].toolCalls[0].input, { a: 1, b: 2 });
    },
    n: none,
    seed: () => drawn(async (seed) => (await generateText(given({ ...wild, seed }))).text),
    logprobs: none,
    stop: async () => assert.equal((await generateText(given({ stopSequences: [" three"] }))).text, CUT),
    usage: async () => {
      const { usage } = await generateText(given({}));
      const result = streamText(given({}));
      await all(result.textStream);
      assert.equal((await result.usage).outputTokens, usage.outputTokens);
    },
    errors: () => assert.rejects(generateText(given({ topP: -1 })), { statusCode: 400, message: /top_p/ }),
    formats: async () => {
      const schema = jsonSchema(parameters);
      await assert.rejects(generateObject(given({ schema })), { statusCode: 400, message: /response_format/ });
      await assert.rejects(generateText(given({ ...called, toolChoice: "required" })), { statusCode: 400, message: /tool_choice/ });
    },
    abort: async () => {
      const stop = new AbortController();
      const { fullStream } = streamText(given({ ...wild, maxOutputTokens: 2000, abortSignal: stop.signal, onError: () => {} }));
      try { for await (const part of fullStream) if (part.type === "text-delta") stop.abort(); } catch {}
      await whole();
    },
  };
}

const results = {};
for (const [feature, check] of Object.entries(await { openai, "ai-sdk": aiSdk }[name]())) {
  try { await check?.(); results[feature] = check ? "ok" : "-"; }
  catch (error) { results[feature] = String(error).slice(0, 300); }
}
console.log(JSON.stringify(results));

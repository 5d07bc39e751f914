// Nine functions of the AI SDK with one provider: node nine.mjs PROVIDER ADDRESS prints a line of JSON for each.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // warnings would mix with the lines of JSON
const [provider, address] = process.argv.slice(2);
const model = {
  compatible: () =>
    createOpenAICompatible({ name: "ours", baseURL: `${address}/v1`, apiKey: "none", supportsStructuredOutputs: true })("scripted"),
  openai: () => createOpenAI({ baseURL: `${address}/v1`, apiKey: "none" })("scripted"),
  anthropic: () => createAnthropic({ baseURL: `${address}/v1`, apiKey: "none" })("scripted"),
}[provider]();

const schema = z.object({ name: z.string(), inhabitants: z.number().int() });
const city = { name: "Vienna", inhabitants: 7 };
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === "Vienna" ? "Sunny." : "Unknown."),
});
const common = { model, maxRetries: 0 };
const said = "You said: Hello";
const prompt = "Hello";
const failing = { onError: () => {} };

const nine = {
  generate: async () => assert.equal((await generateText({ ...common, prompt })).text, said),
  stream: async () => assert.equal(await streamText({ ...common, ...failing, prompt }).text, said),
  system: async () => assert.equal((await generateText({ ...common, system: "Be kind.", prompt })).text, said),
  messages: async () => {
    const messages = [
      { role: "user", content: "Hi" },
      { role: "assistant", content: "Yes?" },
      { role: "user", content: [{ type: "text", text: prompt }] },
    ];
    assert.equal((await generateText({ ...common, messages })).text, said);
  },
  call: async () => {
    const { toolCalls } = await generateText({ ...common, prompt, tools: { weather }, toolChoice: "required" });
    assert.deepEqual(toolCalls[0].input, { city: "Vienna" });
  },
  tools: async () => {
    const { text } = await generateText({ ...common, prompt, tools: { weather }, stopWhen: stepCountIs(3) });
    assert.equal(text, "You said: Sunny.");
  },
  streamedTools: async () => {
    const result = streamText({ ...common, ...failing, prompt, tools: { weather }, stopWhen: stepCountIs(3) });
    assert.equal(await result.text, "You said: Sunny.");
  },
  structured: async () =>
    assert.deepEqual((await generateText({ ...common, prompt, output: Output.object({ schema }) })).output, city),
  streamedStructured: async () =>
    assert.deepEqual(await streamText({ ...common, ...failing, prompt, output: Output.object({ schema }) }).output, city),
};

for (const [name, run] of Object.entries(nine)) {
  const fault = await run().then(
    () => null,
    (error) => `${error.message} ${error.responseBody ?? ""}`.trim(),
  );
  console.log(JSON.stringify({ name, fault }));
}

// What bench/judges.py runs under Node with OpenAI's package: node judge_client.mjs URL MODEL
import OpenAI from "openai";
import assert from "node:assert";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "What is the capital of France?" }], max_tokens: 12, seed: 1 };

const whole = await client.chat.completions.create(ask);
let streamed = "";
for await (const part of await client.chat.completions.create({ ...ask, stream: true }))
  streamed += part.choices[0]?.delta?.content ?? "";
assert.ok(streamed);
assert.equal(streamed, whole.choices[0].message.content);
assert.ok(Number.isSafeInteger((await client.chat.completions.create({ ...ask, seed: undefined })).verispec.seed));

const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 12, seed: 1 });
let said = "";
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 12, seed: 1, stream: true }))
  if (event.type === "response.output_text.delta") said += event.delta;
assert.equal(said, response.output_text);

assert.ok((await client.completions.create({ model, prompt: "Hello", max_tokens: 4 })).choices[0].text);
assert.ok((await client.models.list()).data.some((each) => each.id === model));
await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), OpenAI.BadRequestError);

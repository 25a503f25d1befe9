// Asks the server and reads its stream. Knows HTTP, nothing of the page.

export async function get(path, key) {
  const answer = await fetch(path, { headers: headers(key) });
  if (!answer.ok) throw new Error((await problem(answer)) || answer.statusText);
  return answer.json();
}

export async function post(path, body, key) {
  const answer = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await problem(answer)) || answer.statusText);
  return answer.json();
}

// Calls `onFrame` with every frame of a stream, to its end.
export async function stream(path, body, key, signal, onFrame) {
  const answer = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await problem(answer)) || answer.statusText);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const frame = JSON.parse(line.slice(6));
      if (frame.error) throw new Error(frame.error.message);
      onFrame(frame);
    }
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function problem(answer) {
  try { return (await answer.json()).error.message; } catch { return ""; }
}

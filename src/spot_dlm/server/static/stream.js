// Asks the server and yields what it streams. Knows nothing of the page.

/** What a person is told when a request is not answered. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const GONE = "The server cannot be reached. It may have been stopped: start it with \u201cspot serve\u201d and try again.";
const LOST = "The connection was lost before the answer was complete. The server may have been stopped.";

function headers(key) {
  if (key && !/^[\x21-\x7e]+$/.test(key)) throw new Refused("The API key holds characters that cannot be sent: use letters, digits and signs of ASCII.", 401);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(GONE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    said = `it answered with status ${response.status} and no explanation`;
  }
  const { status } = response;
  if (status === 401) return new Refused("This server wants an API key, and none or another one was given: type it under Options.", status);
  if (status === 429) {
    const wait = Number(response.headers.get("retry-after")) || 1;
    return new Refused(`The server is busy: all places are taken. Try again in ${wait} second${wait === 1 ? "" : "s"}.`, status);
  }
  if (status >= 500) return new Refused(`The server could not answer: ${said}.`, status);
  return new Refused(`The server did not take this request: ${said}.`, status);
}

/** Returns the name of the server's model. */
export async function modelName(key) {
  const response = await ask("/v1/models", { headers: headers(key) });
  return (await response.json()).data[0].id;
}

/** Yields the documents of a streamed answer; throws Refused where it ends otherwise than by its mark of the end. */
export async function* decode(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Refused(LOST);
    });
    if (done) throw new Refused(LOST);
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      const document = JSON.parse(event.slice("data: ".length));
      if (document.error) throw new Refused(`The server could not finish this answer: ${document.error.message}.`);
      yield document;
    }
  }
}

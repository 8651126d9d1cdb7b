// Talking to the server. Errors are objects { status, code, message, hint }, as the server words them.

export function sessionGet(name) {
  try { return sessionStorage.getItem(name); } catch { return null; }
}

export function sessionSet(name, text) {
  try { sessionStorage.setItem(name, text); } catch { /* storage may be off or full: it is asked again next time */ }
}

async function send(path, options) {
  const headers = new Headers(options.headers), key = sessionGet("ramatch-key");
  if (key) headers.set("X-API-Key", key);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw { message: "The server does not answer.", hint: "Is it still running? Try again when it is back." };
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw { status: response.status, wait: Number(response.headers.get("Retry-After")), ...(body.error || { message: `HTTP ${response.status}`, hint: "" }) };
}

export const call = async (path, options = {}) => (await send(path, options)).json();
export const blob = async (path) => (await send(path, {})).blob(); // an <img> could not send the key

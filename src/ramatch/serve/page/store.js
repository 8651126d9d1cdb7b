// What is there is there after a reload: controls in sessionStorage, pictures with their answers in IndexedDB, both of
// this tab alone. Pictures of tabs that are gone are forgotten after a while, at the next visit.
import { sessionGet, sessionSet } from "./api.js";

// In the order in which they are made, which is that of pictures in the store.
let made = 0;
export function newId() { return `${Date.now()}-${String(made++).padStart(6, "0")}-${Math.random().toString(36).slice(2, 10)}`; }

const MOST_BYTES = 64 * 2 ** 20, FORGET_MS = 12 * 3600 * 1000;
const kept = new Map(); // id of a picture → its bytes
const session = sessionGet("ramatch-session") || newId();
sessionSet("ramatch-session", session);

export function settings() {
  try { return JSON.parse(sessionGet("ramatch-page")) || {}; } catch { return {}; }
}

export function remember(changes) { sessionSet("ramatch-page", JSON.stringify({ ...settings(), ...changes })); }

let opened = null;
function pictures(mode) {
  opened ||= new Promise((done, failed) => {
    const request = indexedDB.open("ramatch", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("pictures", { keyPath: "id" });
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
  return opened.then((database) => database.transaction("pictures", mode).objectStore("pictures"));
}

const finished = (request) => new Promise((done, failed) => { request.onsuccess = () => done(request.result); request.onerror = () => failed(request.error); });

// All of this is a convenience: where storage is off or full, the page works without it.
async function quietly(work) {
  try { return await work(); } catch { return undefined; }
}

export const keep = ({ id, file, name, text, example, auto, asked, answer, error }) => quietly(async () => {
  const bytes = [...kept].reduce((sum, [other, size]) => sum + (other === id ? 0 : size), file.size);
  if (bytes > MOST_BYTES) return;
  kept.set(id, file.size);
  await finished((await pictures("readwrite")).put({ session, time: Date.now(), id, file, name, text, example, auto, asked, answer, error }));
});

export const forget = (id) => quietly(async () => {
  kept.delete(id);
  await finished((await pictures("readwrite")).delete(id));
});

export const restored = async () => (await quietly(async () => {
  const all = await finished((await pictures("readonly")).getAll());
  for (const one of all) if (one.session !== session && one.time < Date.now() - FORGET_MS) forget(one.id);
  const own = all.filter((one) => one.session === session);
  for (const one of own) kept.set(one.id, one.file.size);
  return own.map(({ session: _session, time: _time, ...picture }) => picture);
})) || [];

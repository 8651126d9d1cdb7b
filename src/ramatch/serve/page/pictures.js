// The pictures: adding and removing them, asking the server for each, one card each. An answer or an error belongs to
// one picture and touches no other.
import { call } from "./api.js";
import { question, wanted } from "./labels.js";
import { drawAnswer } from "./results.js";
import { $, found, make, plural, shown, state } from "./state.js";
import { forget, keep, newId, remember } from "./store.js";

const ASK = 60; // labels asked for, with their maps
const AT_ONCE = 3; // requests under way
const MOST = 200; // pictures
const TRIES = 4; // of a request that is refused because the server is busy
const NOT_A_PICTURE = { message: "This is not a picture.", hint: "Choose a JPEG, PNG, WebP, GIF or BMP file.", final: true };
let asking = { question: null, abort: new AbortController(), active: 0 };

export function addPictures(files, { text = "", example = false, auto = false } = {}) {
  if (!auto) for (const each of state.pictures.filter((p) => p.auto)) drop(each); // the example shown at first makes room
  const room = MOST - state.pictures.length, added = [...files].slice(0, room).map((file) => ({
    id: newId(), file, name: file.name || "picture", text, example, auto, url: URL.createObjectURL(file), asked: null, answer: null, busy: null,
    error: file.type && !file.type.startsWith("image/") ? NOT_A_PICTURE : null,
  }));
  if (files.length > room) $("said").textContent = `${MOST} pictures at a time: ${files.length - room} left out.`;
  restore(added);
  added.forEach(keep);
  if (added.length) select(added[0]);
  tagAll();
}

// Pictures with or without an answer, such as those that were there before a reload.
export function restore(pictures) {
  for (const picture of pictures) state.pictures.push({ ...picture, url: picture.url || URL.createObjectURL(picture.file), busy: null });
}

function drop(picture) {
  URL.revokeObjectURL(picture.url);
  state.pictures = state.pictures.filter((each) => each.id !== picture.id);
  forget(picture.id);
}

export function removePicture(picture) {
  const place = state.pictures.indexOf(picture);
  drop(picture);
  if (state.current === picture) select(state.pictures[Math.min(place, state.pictures.length - 1)] || null);
  drawCards();
}

export function removeAll() {
  [...state.pictures].forEach(drop);
  select(null);
  drawCards();
}

export function select(picture) {
  picture = picture && state.pictures.find((each) => each.id === picture.id);
  state.current = picture || null;
  state.held = null;
  state.all = false;
  remember({ current: picture?.id });
  drawAnswer();
  drawCards();
}

// ---- asking

// Asks for every picture whose answer is not one to the present question; a new question ends what is under way.
export function tagAll() {
  if (!state.info) return;
  const asked = question();
  if (asked !== asking.question) {
    asking.abort.abort();
    asking = { question: asked, abort: new AbortController(), active: 0 };
  }
  while (asking.active < AT_ONCE && next(asking)) work(asking);
  drawAnswer();
  drawCards();
}

export function tryAgain() {
  for (const picture of state.pictures) if (picture.error && !picture.error.final) picture.asked = null;
  tagAll();
}

const due = (picture, run) => picture.asked !== run.question && !picture.error?.final && picture.busy !== run;
const next = (run) => (state.current && due(state.current, run) ? state.current : state.pictures.find((each) => due(each, run)));

async function work(run) {
  run.active++;
  for (let picture; run === asking && (picture = next(run));) await ask(picture, run);
  run.active--;
}

async function ask(picture, run) {
  picture.busy = run;
  drawCards();
  if (picture === state.current) drawAnswer();
  let answer = null, error = null;
  try {
    answer = await request(picture, run.abort.signal);
  } catch (problem) {
    if (problem.name === "AbortError") return;
    error = problem.message === undefined ? { message: "Something went wrong.", hint: String(problem) } : { message: problem.message, hint: problem.hint, status: problem.status };
  }
  if (run !== asking) return;
  Object.assign(picture, { answer, error, asked: run.question, busy: null }); // an old answer never stays beside an error
  if (state.pictures.includes(picture)) keep(picture);
  if (picture === state.current) {
    if (!answer?.labels.some((label) => label.label === state.held)) state.held = null;
    drawAnswer();
  }
  drawCards();
}

async function request(picture, signal) {
  const { labels, vocabulary } = wanted(), form = new FormData();
  form.set("image", await fitting(picture.file), picture.name);
  if (labels) form.set("labels", JSON.stringify(labels));
  if (vocabulary) form.set("vocabulary", vocabulary);
  form.set("matcher", $("matcher").value);
  form.set("top", ASK);
  form.set("maps", "true");
  for (let left = TRIES; ; left--) {
    try {
      return await call($("masks").checked ? "v1/segment" : "v1/tag", { method: "POST", body: form, signal });
    } catch (error) {
      if (error.status !== 429 || left <= 1) throw error;
      await new Promise((done) => setTimeout(done, 1000 * Math.min(error.wait || 1, 10)));
      signal.throwIfAborted();
    }
  }
}

// A camera's file may be larger than the server takes: send a smaller copy then.
async function fitting(file) {
  if (file.size < state.info.limits.max_body_bytes * 0.9) return file;
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return file;
  const scale = Math.min(1, 2048 / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: bitmap.width * scale, height: bitmap.height * scale });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob((copy) => done(copy || file), "image/jpeg", 0.92));
}

// ---- cards

const CARD_TAGS = 3;

function said(picture) {
  if (picture.error) return picture.error.message;
  if (!picture.answer) return picture.busy ? "looking…" : "waiting…";
  return found(picture.answer).slice(0, CARD_TAGS).map((label) => `${label.label} ${shown(label)}`.replace(" %", "\u00a0%")).join(" · ") || "nothing above the threshold";
}

function card(picture) {
  const item = make("li", { className: `shot${picture.error ? " failed" : ""}${picture.asked === asking.question || picture.error ? "" : " pending"}` });
  const image = make("img", { src: picture.url, alt: "" }), main = make("button", { type: "button", className: "shot-main" }, image,
    make("span", { className: "shot-text" }, make("b", { textContent: picture.name, title: picture.name }), make("span", { textContent: said(picture) })));
  main.setAttribute("aria-current", String(picture === state.current));
  main.dataset.id = picture.id;
  const remove = make("button", { type: "button", className: "remove", textContent: "×", title: "Remove" });
  remove.setAttribute("aria-label", `Remove ${picture.name}`);
  item.append(main, remove);
  image.addEventListener("error", () => image.classList.add("lost"));
  main.addEventListener("click", () => select(picture));
  remove.addEventListener("click", () => removePicture(picture));
  return item;
}

export function drawCards() {
  const { pictures } = state, list = $("cards"), focused = document.activeElement?.dataset?.id;
  $("tray").hidden = pictures.length < 2;
  list.replaceChildren(...(pictures.length > 1 ? pictures.map(card) : []));
  if (focused) list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  const failed = pictures.filter((each) => each.error).length, done = pictures.filter((each) => each.answer && each.asked === asking.question).length;
  const left = pictures.length - failed - done;
  $("progress").textContent = [`${done} of ${plural(pictures.length, "picture")} done`, failed && `${failed} failed`, left && `${left} to do`].filter(Boolean).join(" · ");
  document.body.classList.toggle("busy", pictures.some((each) => each.busy === asking));
  $("csv").disabled = !pictures.some((each) => each.answer);
  for (const thumb of $("thumbs").querySelectorAll("button")) thumb.setAttribute("aria-pressed", String(Boolean(state.current?.example) && thumb.dataset.name === state.current.name));
}

// The web page: one state object, a few functions that draw parts of it. No libraries, nothing from outside.
"use strict";
const $ = (id) => document.getElementById(id);
const ASK = 60; // labels asked for, with their maps
const SHOW_BELOW = 8; // labels under the threshold that are shown before "more"
const state = { file: null, info: null, answer: null, held: null, shown: null, all: false, fileLabels: null, fileName: "", tab: "json", run: 0, abort: null };

// ---- talking to the server

async function call(path, options = {}) {
  const headers = new Headers(options.headers), key = sessionGet("ramatch-key");
  if (key) headers.set("X-API-Key", key);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw { message: "The server does not answer.", hint: "Is it still running? Reload the page when it is back." };
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw { status: response.status, ...(body.error || { message: `HTTP ${response.status}`, hint: "" }) };
  return body;
}

function choice() {
  const value = $("vocabulary").value;
  if (value === ":own") return {};
  if (value === ":typed") return { labels: splitLabels($("labels").value) };
  if (value === ":file") return { labels: state.fileLabels || [] };
  return { vocabulary: value };
}

// The same rules as labels.py: separators outside quotes, white space in order, repeats merged whatever their case.
const CLOSING = { '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»" };

function splitLabels(text) {
  const labels = [];
  let current = "", closing = "";
  for (const character of text) {
    if (closing) {
      if (character === closing) closing = "";
      else current += character;
    } else if (",;|\t\n\r".includes(character)) {
      labels.push(current);
      current = "";
    } else if (CLOSING[character] && !current.trim()) closing = CLOSING[character];
    else current += character;
  }
  return mergeLabels([...labels, current]);
}

function mergeLabels(labels) {
  const first = new Map();
  for (const label of labels.map((s) => s.replace("\ufeff", "").trim().replace(/\s+/g, " "))) {
    if (label && !first.has(label.toLowerCase())) first.set(label.toLowerCase(), label);
  }
  return [...first.values()];
}

async function tag() {
  const wanted = choice();
  if (!state.file) return;
  if (wanted.labels && !wanted.labels.length) return clear($("vocabulary").value === ":file" ? "Choose a file with labels." : "Type some labels.");
  const run = ++state.run;
  state.abort?.abort();
  state.abort = new AbortController();
  document.body.classList.add("busy");
  $("results").classList.add("stale");
  const form = new FormData();
  form.set("image", await fitting(state.file), state.file.name || "picture.jpg");
  if (wanted.labels) form.set("labels", JSON.stringify(wanted.labels));
  if (wanted.vocabulary) form.set("vocabulary", wanted.vocabulary);
  form.set("matcher", $("matcher").value);
  form.set("top", ASK);
  form.set("maps", "true");
  try {
    const answer = await call($("masks").checked ? "v1/segment" : "v1/tag", { method: "POST", body: form, signal: state.abort.signal });
    if (run !== state.run) return;
    state.answer = answer;
    state.all = false;
    if (!answer.labels.some((l) => l.label === state.held)) state.held = null;
    problem(null);
    drawResults();
  } catch (error) {
    if (run === state.run && error.name !== "AbortError") problem(error);
  } finally {
    if (run === state.run) {
      document.body.classList.remove("busy");
      $("results").classList.remove("stale");
    }
  }
}

// A camera's file may be larger than the server takes: send a smaller copy then.
async function fitting(file) {
  if (!state.info || file.size < state.info.limits.max_body_bytes * 0.9) return file;
  const bitmap = await createImageBitmap(file), scale = Math.min(1, 2048 / Math.max(bitmap.width, bitmap.height));
  const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width * scale, height: bitmap.height * scale });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob((blob) => done(blob || file), "image/jpeg", 0.92));
}

// ---- the picture

function usePicture(file, text) {
  if (!file || (file.type && !file.type.startsWith("image/"))) return problem({ message: "That is not a picture.", hint: "Choose a JPEG, PNG, WebP, GIF or BMP file." });
  if ($("picture").src) URL.revokeObjectURL($("picture").src);
  state.file = file;
  state.held = null;
  light(null);
  $("picture").src = URL.createObjectURL(file);
  $("picture").alt = text || `Your picture ${file.name || ""}`.trim();
  for (const thumb of $("thumbs").querySelectorAll("button")) thumb.setAttribute("aria-pressed", String(thumb.dataset.name === file.name && file.bundled === true));
  tag();
}

async function useBundled(name) {
  try {
    const blob = await (await fetch(`photos/${name}`)).blob();
    const file = new File([blob], name, { type: blob.type });
    file.bundled = true;
    usePicture(file, `Example picture: ${name.replace(/\.\w+$/, "")}`);
  } catch {
    problem({ message: "The example picture could not be loaded.", hint: "Is the server still running?" });
  }
}

// Shows where a label is; null shows the label that is held, or the plain picture.
function light(name) {
  const label = name || state.held, entry = label && state.answer?.labels.find((l) => l.label === label);
  state.shown = entry ? label : null;
  const mask = entry && state.answer.masks?.find((m) => m.label === label);
  $("heat").classList.toggle("lit", Boolean(mask || entry?.map));
  $("caption").hidden = !entry;
  if (!entry) return;
  $("caption").textContent = `${label} · ${shown(entry)}`;
  if (mask) drawMask($("map"), mask.rle);
  else if (entry.map) drawHeat($("map"), entry.map);
}

// ---- the labels

const percent = (p) => (p > 0 && p < 0.005 ? "<1 %" : `${Math.round(p * 100)} %`);
// A label's probability; of a model that is not calibrated its relative score, which is no percentage.
const value = (l) => l.probability ?? l.relative;
const unsure = (l) => l.probability !== undefined && !l.calibrated;
const shown = (l) => (l.probability === undefined ? l.relative.toFixed(2) : `${percent(l.probability)}${unsure(l) ? " ?" : ""}`);
const threshold = () => Number($("threshold").value) / 100;

function drawResults() {
  const answer = state.answer, cut = threshold();
  const above = answer.labels.filter((l) => value(l) >= cut), below = answer.labels.filter((l) => value(l) < cut);
  const few = state.all ? below : below.slice(0, SHOW_BELOW);
  const list = $("results"), focused = document.activeElement?.dataset?.label;
  list.style.setProperty("--threshold", `${cut * 100}%`);
  list.replaceChildren(...above.map((l) => row(l, false)));
  if (few.length) list.append(Object.assign(document.createElement("li"), { className: "cut", textContent: above.length ? "Less likely" : "Nothing above the threshold; the closest" }), ...few.map((l) => row(l, true)));
  if (few.length < below.length) list.append(moreButton(below.length - few.length));
  $("uncalibrated").hidden = answer.calibrated;
  const size = answer.vocabulary.size;
  $("count").textContent = `${above.length} of ${size} label${size === 1 ? "" : "s"} at ${Math.round(cut * 100)} % or more · ${Math.round(answer.took_ms)} ms`;
  if (focused !== undefined) list.querySelector(`[data-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  light(null);
  drawCode();
}

function row(label, below) {
  const item = document.createElement("li"), button = document.createElement("button");
  button.type = "button";
  button.className = below ? "label below" : "label";
  button.dataset.label = label.label;
  button.setAttribute("aria-pressed", String(label.label === state.held));
  const parts = ["name", "track", "value"].map((name) => Object.assign(document.createElement("span"), { className: name }));
  parts[0].textContent = label.label;
  const guess = unsure(label) ? ": take the number as a guess: ramatch hardly knows the word, or captions often leave it out" : "";
  parts[0].title = [label.label + guess, ...(label.parents || [])].join(" · ");
  parts[2].textContent = shown(label);
  const fill = Object.assign(document.createElement("span"), { className: "fill" });
  fill.style.clipPath = `inset(0 ${100 - value(label) * 100}% 0 0 round 5px)`;
  parts[1].setAttribute("aria-hidden", "true");
  parts[1].append(fill);
  button.append(...parts);
  item.append(button);
  return item;
}

function moreButton(count) {
  const item = document.createElement("li"), button = Object.assign(document.createElement("button"), { type: "button", className: "button more", textContent: `Show ${count} more` });
  button.addEventListener("click", () => {
    const seen = $("results").querySelectorAll(".label").length;
    state.all = true;
    drawResults();
    $("results").querySelectorAll(".label")[seen]?.focus();
  });
  item.append(button);
  return item;
}

function hold(name) {
  state.held = state.held === name ? null : name;
  for (const button of $("results").querySelectorAll(".label")) button.setAttribute("aria-pressed", String(button.dataset.label === state.held));
  light(state.held || name);
}

function clear(text) {
  state.run++;
  state.answer = null;
  $("results").replaceChildren();
  $("count").textContent = text;
  problem(null);
  light(null);
  drawCode();
}

function problem(error) {
  $("problem").hidden = !error || error.status === 401;
  $("key-form").hidden = error?.status !== 401;
  if (!error) return;
  document.body.classList.remove("busy");
  if (error.status === 401) return $("key").focus();
  const strong = Object.assign(document.createElement("b"), { textContent: error.message });
  $("problem").replaceChildren(strong, error.hint || "");
}

// ---- take it with you

const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const python = (value) => JSON.stringify(value);

function snippets() {
  const { labels, vocabulary } = choice(), name = state.file?.name || "photo.jpg", cut = threshold(), matcher = $("matcher").value;
  const plain = matcher === state.info?.matcher, model = state.info?.model || "ramatch-mini", fromFile = $("vocabulary").value === ":file";
  const answer = state.answer && { ...state.answer, labels: state.answer.labels.filter((l) => value(l) >= cut).map(({ map, ...rest }) => rest), masks: undefined };
  const cli = ["ramatch tag", shell(name), `--model ${shell(model)}`];
  if (fromFile) cli.push(`--labels-file ${shell(state.fileName || "labels.txt")}`);
  else if (labels) cli.push(`--labels ${shell(labels.join(","))}`);
  else if (vocabulary) cli.push(`--vocabulary ${shell(vocabulary)}`);
  cli.push(`--threshold ${cut}`);
  if (!plain) cli.push(`--matcher ${matcher}`);
  const lines = ["from ramatch import Recognizer"];
  lines.push("", `recognizer = Recognizer.from_pretrained(${python(model)})`);
  if (vocabulary) lines.push(`recognizer.set_vocabulary(${python(vocabulary)})`);
  else if (fromFile) lines.push(`recognizer.set_vocabulary(open(${python(state.fileName || "labels.txt")}).read().split("\\n"))`);
  else if (labels) lines.push(`recognizer.set_vocabulary(${python(labels)})`);
  lines.push(`prediction = recognizer.predict(${python(name)}, maps=True${plain ? "" : `, matcher=${python(matcher)}`})`,
    `for tag in prediction.above(${cut}):`, '    print(f"{tag.value:.2f}  {tag.label}")', "    heat = prediction.heatmap(tag.label)");
  const curl = [`curl ${location.origin}/v1/tag`, `-F image=@${shell(name)}`];
  if (labels) curl.push(`-F ${shell(`labels=${labels.join(",")}`)}`);
  if (vocabulary) curl.push(`-F vocabulary=${shell(vocabulary)}`);
  curl.push(`-F threshold=${cut}`);
  if (!plain) curl.push(`-F matcher=${matcher}`);
  if (sessionGet("ramatch-key")) curl.push("-H 'X-API-Key: YOUR_KEY'");
  return { json: answer ? JSON.stringify(answer, null, 2) : "", cli: cli.join(" "), python: lines.join("\n"), curl: curl.join(" ") };
}

function drawCode() { $("code").textContent = snippets()[state.tab]; }

function chooseTab(tab, focus) {
  state.tab = tab.id.replace("tab-", "");
  for (const each of document.querySelectorAll("[role=tab]")) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
  }
  $("code").setAttribute("aria-labelledby", tab.id);
  if (focus) tab.focus();
  drawCode();
}

async function copy() {
  const text = $("code").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard outside https and localhost: select the text instead
    getSelection().selectAllChildren($("code"));
    document.execCommand("copy");
  }
  $("copied").textContent = "Copied";
  $("copy").textContent = "Copied ✓";
  setTimeout(() => { $("copy").textContent = "Copy"; $("copied").textContent = ""; }, 1600);
}

// ---- wiring

function sessionGet(name) { try { return sessionStorage.getItem(name); } catch { return null; } }

function option(select, value, text) { select.append(new Option(text, value)); }

async function begin() {
  try {
    state.info = await call("v1/info");
  } catch (error) {
    return problem(error);
  }
  problem(null);
  const { info } = state, select = $("vocabulary");
  $("model").textContent = `${info.model} · ${info.device}`;
  $("model").hidden = false;
  select.replaceChildren();
  if (info.own_labels.length) option(select, ":own", `The model's own (${info.own_labels.length})`);
  for (const { name, size } of info.vocabularies) option(select, name, `${name} (${size})`);
  option(select, ":typed", "My own labels…");
  option(select, ":file", "A file of labels…");
  if (info.default_vocabulary) select.value = info.default_vocabulary;
  $("matcher").replaceChildren();
  for (const name of info.matchers) option($("matcher"), name, info.matcher_titles[name] || name);
  $("matcher").value = info.matcher;
  $("thumbs").replaceChildren(...info.photos.map((name) => {
    const item = document.createElement("li"), button = document.createElement("button");
    const image = Object.assign(new Image(), { src: `photos/${name}`, alt: name.replace(/\.\w+$/, ""), loading: "lazy" });
    button.type = "button";
    button.dataset.name = name;
    button.setAttribute("aria-pressed", "false");
    button.append(image);
    button.addEventListener("click", () => useBundled(name));
    item.append(button);
    return item;
  }));
  drawCode();
  if (info.photos.length && !state.file) useBundled(info.photos.includes("astronaut.jpg") ? "astronaut.jpg" : info.photos[0]);
}

let pause;
$("labels").addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(tag, 600); });
$("vocabulary").addEventListener("change", () => {
  $("typed").hidden = $("vocabulary").value !== ":typed";
  $("from-file").hidden = $("vocabulary").value !== ":file";
  if ($("vocabulary").value === ":typed") $("labels").focus();
  tag();
});
$("matcher").addEventListener("change", tag);
$("masks").addEventListener("change", tag);
$("labels-file").addEventListener("change", async () => {
  const file = $("labels-file").files[0];
  if (!file) return;
  const text = await file.text(), table = /\.(csv|tsv)$/i.test(file.name);
  const lines = text.split(/[\n\r]+/).filter((line) => line.trim() && !line.trim().startsWith("#"));
  state.fileLabels = table || lines.length === 1 ? splitLabels(lines.join("\n")) : mergeLabels(lines);
  state.fileName = file.name;
  $("file-name").textContent = `${file.name}: ${state.fileLabels.length} labels`;
  tag();
});
$("threshold").addEventListener("input", () => {
  $("threshold-value").textContent = `${$("threshold").value} %`;
  if (state.answer) drawResults();
});
$("file").addEventListener("change", () => { if ($("file").files[0]) usePicture($("file").files[0]); $("file").value = ""; });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  try { sessionStorage.setItem("ramatch-key", $("key").value); } catch { /* asked again next time */ }
  begin();
});
$("theme").addEventListener("click", toggleTheme);
$("copy").addEventListener("click", copy);

const list = $("results"), labelOf = (event) => event.target.closest?.(".label")?.dataset.label;
list.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse" && labelOf(event)) light(labelOf(event)); });
list.addEventListener("pointerleave", () => light(list.contains(document.activeElement) && document.activeElement.matches(":focus-visible") ? document.activeElement.dataset.label : null));
list.addEventListener("focusin", (event) => { if (labelOf(event)) light(labelOf(event)); });
list.addEventListener("focusout", (event) => { if (!list.contains(event.relatedTarget)) light(null); });
list.addEventListener("click", (event) => { if (labelOf(event)) hold(labelOf(event)); });
list.addEventListener("keydown", (event) => {
  const rows = [...list.querySelectorAll(".label")], at = rows.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (at >= 0 && to !== undefined && rows[to]) { event.preventDefault(); rows[to].focus(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.held) hold(state.held); });
for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => chooseTab(tab));
  tab.addEventListener("keydown", (event) => {
    const tabs = [...document.querySelectorAll("[role=tab]")], step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) chooseTab(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length], true);
  });
}
let depth = 0; // dragenter and dragleave come for every element on the way
const dragging = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
addEventListener("dragenter", (event) => { if (dragging(event)) { depth++; document.body.classList.add("dragging"); } });
addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); if (!depth) document.body.classList.remove("dragging"); });
addEventListener("dragover", (event) => { if (dragging(event)) event.preventDefault(); });
addEventListener("drop", (event) => {
  depth = 0;
  document.body.classList.remove("dragging");
  if (!dragging(event)) return;
  event.preventDefault();
  usePicture(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files || [])].find((each) => each.type.startsWith("image/"));
  if (file) usePicture(file);
});
begin();

// The picture that is shown large, with its labels: best first, where each is, or what went wrong.
import { drawCode } from "./take.js";
import { $, make, plural, shown, state, threshold, unsure, value } from "./state.js";
import { question } from "./labels.js";

const SHOW_BELOW = 8; // labels under the threshold that are shown before "more"
const SHARP = 768; // pixels across that a map is drawn with at most
let drawn = null; // the picture in the stage

// Draws the current picture and its answer; a picture without one has an empty list, and its error says why.
export function drawAnswer() {
  const picture = state.current, answer = picture?.answer || null;
  drawStage(picture);
  drawProblem(picture?.error || null);
  $("results").classList.toggle("stale", Boolean(answer) && picture.asked !== question());
  if (answer) drawLabels(answer);
  else {
    $("results").replaceChildren();
    $("uncalibrated").hidden = true;
    $("count").textContent = !picture ? "Choose a picture." : picture.error ? "No answer." : "Looking…";
  }
  light(null);
  drawCode();
}

function drawStage(picture) {
  if (drawn === picture?.id) return;
  drawn = picture?.id;
  $("heat").hidden = !picture;
  if (!picture) return $("picture").removeAttribute("src");
  $("picture").src = picture.url;
  $("picture").alt = picture.text || `Your picture ${picture.name}`;
}

// The figure gets the picture's shape, and the style sheet lets it fill the stage, so that small pictures are enlarged.
export function fitStage() {
  const { naturalWidth: width, naturalHeight: height } = $("picture");
  $("heat").style.setProperty("--ratio", String(width && height ? width / height : 1));
  $("heat").classList.toggle("broken", !width);
  $("heat").classList.toggle("tiny", Math.max(width, height) < 48); // of so few pixels each is shown as it is
  light(state.held);
}

export function drawProblem(error) {
  $("problem").hidden = !error || error.status === 401;
  $("key-form").hidden = error?.status !== 401;
  if (!error) return;
  if (error.status === 401) return $("key").focus();
  $("problem-text").replaceChildren(make("b", { textContent: error.message }), error.hint || "");
  $("again").hidden = Boolean(error.final);
}

// Shows where a label is; null shows the label that is held, or the plain picture.
export function light(name) {
  const label = name || state.held, entry = label && state.current?.answer?.labels.find((each) => each.label === label);
  const mask = entry && state.current.answer.masks?.find((each) => each.label === label);
  $("heat").classList.toggle("lit", Boolean(mask || entry?.map));
  $("caption").hidden = !entry;
  if (!entry) return;
  $("caption").textContent = `${label} · ${shown(entry)}`;
  if (mask) return window.drawMask($("map"), mask.rle);
  const pixels = Math.min(SHARP, $("map").clientWidth * (window.devicePixelRatio || 1));
  if (entry.map) window.drawHeat($("map"), entry.map, Math.max(8, Math.ceil(pixels / entry.map[0].length)));
}

function drawLabels(answer) {
  const cut = threshold(), above = answer.labels.filter((l) => value(l) >= cut), below = answer.labels.filter((l) => value(l) < cut);
  const few = state.all ? below : below.slice(0, SHOW_BELOW);
  const list = $("results"), focused = document.activeElement?.dataset?.label;
  list.style.setProperty("--threshold", `${cut * 100}%`);
  list.replaceChildren(...above.map((l) => row(l, false)));
  if (few.length) list.append(make("li", { className: "cut", textContent: above.length ? "Less likely" : "Nothing above the threshold; the closest" }), ...few.map((l) => row(l, true)));
  if (few.length < below.length) list.append(moreButton(below.length - few.length));
  $("uncalibrated").hidden = answer.calibrated;
  $("count").textContent = `${above.length} of ${plural(answer.vocabulary.size, "label")} at ${Math.round(cut * 100)} % or more · ${Math.round(answer.took_ms)} ms`;
  if (focused !== undefined) list.querySelector(`[data-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function row(label, below) {
  const guess = unsure(label) ? ": take the number as a guess: ramatch hardly knows the word, or captions often leave it out" : "";
  const fill = make("span", { className: "fill" }), track = make("span", { className: "track" }, fill);
  fill.style.clipPath = `inset(0 ${100 - value(label) * 100}% 0 0 round 5px)`;
  track.setAttribute("aria-hidden", "true");
  const button = make("button", { type: "button", className: below ? "label below" : "label" },
    make("span", { className: "name", textContent: label.label, title: [label.label + guess, ...(label.parents || [])].join(" · ") }),
    track, make("span", { className: "value", textContent: shown(label) }));
  button.dataset.label = label.label;
  button.setAttribute("aria-pressed", String(label.label === state.held));
  return make("li", {}, button);
}

function moreButton(count) {
  const button = make("button", { type: "button", className: "button more", textContent: `Show ${count} more` });
  button.addEventListener("click", () => {
    const seen = $("results").querySelectorAll(".label").length;
    state.all = true;
    drawAnswer();
    $("results").querySelectorAll(".label")[seen]?.focus();
  });
  return make("li", {}, button);
}

export function hold(name) {
  state.held = state.held === name ? null : name;
  for (const button of $("results").querySelectorAll(".label")) button.setAttribute("aria-pressed", String(button.dataset.label === state.held));
  light(state.held || name);
}

export function wireResults() {
  const list = $("results"), labelOf = (event) => event.target.closest?.(".label")?.dataset.label;
  const focused = () => (list.contains(document.activeElement) && document.activeElement.matches(":focus-visible") ? document.activeElement.dataset.label : null);
  list.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse" && labelOf(event)) light(labelOf(event)); });
  list.addEventListener("pointerleave", () => light(focused()));
  list.addEventListener("focusin", (event) => { if (labelOf(event)) light(labelOf(event)); });
  list.addEventListener("focusout", (event) => { if (!list.contains(event.relatedTarget)) light(null); });
  list.addEventListener("click", (event) => { if (labelOf(event)) hold(labelOf(event)); });
  list.addEventListener("keydown", (event) => {
    const rows = [...list.querySelectorAll(".label")], at = rows.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (at >= 0 && to !== undefined && rows[to]) { event.preventDefault(); rows[to].focus(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.held) hold(state.held); });
  $("picture").addEventListener("load", fitStage);
  $("picture").addEventListener("error", fitStage);
}

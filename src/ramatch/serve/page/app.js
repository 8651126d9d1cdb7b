// The web page: begins, fills the controls and connects them with the parts. No libraries, nothing from outside.
import { blob, call, sessionSet } from "./api.js";
import { download } from "./csv.js";
import { readLabels } from "./labels.js";
import { addPictures, drawCards, removeAll, restore, select, tagAll, tryAgain } from "./pictures.js";
import { drawAnswer, drawProblem, wireResults } from "./results.js";
import { search, wireSearch } from "./search.js";
import { $, make, state, threshold } from "./state.js";
import { remember, restored, settings } from "./store.js";
import { chooseTab, wireCode } from "./take.js";

const FIRST = "astronaut.jpg"; // the example that is tagged when there is nothing else

async function useBundled(name, auto = false) {
  const known = state.pictures.find((each) => each.example && each.name === name);
  if (known) return select(known);
  try {
    const file = await blob(`photos/${name}`);
    if (auto && state.pictures.length) return; // somebody was quicker
    addPictures([new File([file], name, { type: file.type })], { example: true, auto, text: `Example picture: ${name.replace(/\.\w+$/, "")}` });
  } catch (error) {
    drawProblem({ message: "The example picture could not be loaded.", hint: error.message });
  }
}

function thumb(name) {
  const button = make("button", { type: "button" }, make("img", { src: `photos/${name}`, alt: name.replace(/\.\w+$/, ""), loading: "lazy" }));
  button.dataset.name = name;
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => useBundled(name));
  return make("li", {}, button);
}

// Options from the server, and what was chosen before a reload where it still can be.
function fillControls(info, before) {
  const vocabularies = info.vocabularies.map(({ name, size }) => new Option(`${name} (${size})`, name));
  const own = info.own_labels.length ? [new Option(`The model's own (${info.own_labels.length})`, ":own")] : [];
  $("vocabulary").replaceChildren(...own, ...vocabularies);
  $("matcher").replaceChildren(...info.matchers.map((name) => new Option(info.matcher_titles[name] || name, name)));
  for (const [id, usual] of [["vocabulary", info.default_vocabulary], ["matcher", info.matcher]]) {
    const known = [...$(id).options].map((option) => option.value);
    $(id).value = known.includes(before[id]) ? before[id] : usual ?? known[0];
  }
  if (before.threshold !== undefined) $("threshold").value = before.threshold;
  $("labels").value = before.labels ?? $("labels").value;
  state.file = before.file ?? null;
  $("masks").checked = before.masks ?? false;
  $("advanced").open = before.advanced ?? false;
  $("words").value = before.words ?? "";
  drawThreshold();
  drawVocabulary();
}

function drawThreshold() { $("threshold-value").textContent = `${$("threshold").value} %`; }

function drawVocabulary() {
  const own = Boolean($("labels").value.trim());
  $("vocabulary-row").classList.toggle("unused", own);
  $("vocabulary-tip").textContent = own ? "not used while there are labels of your own" : "";
}

function rememberControls() {
  remember({ labels: $("labels").value, file: state.file, vocabulary: $("vocabulary").value, matcher: $("matcher").value, threshold: $("threshold").value, masks: $("masks").checked, advanced: $("advanced").open });
}

async function begin() {
  try {
    state.info = await call("v1/info");
  } catch (error) {
    return drawProblem(error);
  }
  drawProblem(null);
  const { info } = state, before = settings();
  $("model").textContent = `${info.model} · ${info.device}`;
  $("model").hidden = false;
  fillControls(info, before);
  $("thumbs").replaceChildren(...info.photos.map(thumb));
  wireSearch();
  if (before.words && info.index) search();
  if (before.tab) chooseTab($(`tab-${before.tab}`));
  if (state.pictures.length) return tryAgain(); // a key was asked for on the way
  const old = (await restored()).filter(({ id }) => !state.pictures.some((each) => each.id === id)); // some may be new by now
  restore(old.map((each) => (each.answer?.model === info.model ? each : { ...each, asked: null })));
  if (!state.current) select(state.pictures.find((each) => each.id === before.current) || state.pictures[0] || null);
  if (state.pictures.length) tagAll();
  else if (info.photos.length) useBundled(info.photos.includes(FIRST) ? FIRST : info.photos[0], true);
}

function wireControls() {
  let pause;
  const asked = () => { rememberControls(); drawVocabulary(); tagAll(); };
  $("labels").addEventListener("input", () => { clearTimeout(pause); drawVocabulary(); pause = setTimeout(asked, 600); });
  $("vocabulary").addEventListener("change", asked);
  $("matcher").addEventListener("change", asked);
  $("masks").addEventListener("change", asked);
  $("labels-file").addEventListener("change", async () => {
    const [file] = $("labels-file").files;
    $("labels-file").value = "";
    if (!file) return;
    await readLabels(file);
    asked();
  });
  $("threshold").addEventListener("input", () => { drawThreshold(); rememberControls(); drawAnswer(); drawCards(); });
  $("advanced").addEventListener("toggle", rememberControls);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionSet("ramatch-key", $("key").value);
    begin();
  });
  $("again").addEventListener("click", () => (state.info ? tryAgain() : begin()));
  $("theme").addEventListener("click", window.toggleTheme);
  $("csv").addEventListener("click", () => download(threshold()));
  $("remove-all").addEventListener("click", () => { removeAll(); $("file").focus(); });
}

function wirePictures() {
  $("file").addEventListener("change", () => {
    addPictures([...$("file").files]);
    $("file").value = "";
  });
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
    addPictures([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files || [])].filter((each) => each.type.startsWith("image/"));
    if (files.length) addPictures(files);
  });
}

wireControls();
wirePictures();
wireResults();
wireCode();
begin();

// Take it with you: the answer as JSON, and the same question for the command line, Python and curl.
import { sessionGet } from "./api.js";
import { fromFile, wanted } from "./labels.js";
import { $, found, state, threshold } from "./state.js";
import { remember } from "./store.js";

const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const python = (text) => JSON.stringify(text);
const typed = (labels) => labels.map((label) => (/[,;|]|^["'“‘«]/.test(label) ? `"${label}"` : label)).join(",");

function facts() {
  const matcher = $("matcher").value, own = matcher === state.info?.matcher || !matcher;
  return { ...wanted(), file: fromFile(), name: state.current?.name || "photo.jpg", cut: threshold(), matcher: own ? null : matcher, model: state.info?.model || "ramatch-mini" };
}

function json() {
  const { answer } = state.current || {};
  return answer ? JSON.stringify({ ...answer, labels: found(answer).map(({ map, ...rest }) => rest), masks: undefined }, null, 2) : "";
}

function cli({ labels, vocabulary, file, name, cut, matcher, model }) {
  const words = ["ramatch tag", shell(name), `--model ${shell(model)}`];
  if (file) words.push(`--labels-file ${shell(file)}`);
  else if (labels) words.push(`--labels ${shell(typed(labels))}`);
  else if (vocabulary) words.push(`--vocabulary ${shell(vocabulary)}`);
  words.push(`--threshold ${cut}`);
  if (matcher) words.push(`--matcher ${matcher}`);
  return words.join(" ");
}

function code({ labels, vocabulary, file, name, cut, matcher, model }) {
  const lines = ["from ramatch import Recognizer", "", `recognizer = Recognizer.from_pretrained(${python(model)})`];
  if (file) lines.push(`recognizer.set_vocabulary(open(${python(file)}).read().split("\\n"))`);
  else if (labels || vocabulary) lines.push(`recognizer.set_vocabulary(${python(labels || vocabulary)})`);
  lines.push(`prediction = recognizer.predict(${python(name)}, maps=True${matcher ? `, matcher=${python(matcher)}` : ""})`,
    `for tag in prediction.above(${cut}):`, '    print(f"{tag.value:.2f}  {tag.label}")', "    heat = prediction.heatmap(tag.label)");
  return lines.join("\n");
}

function curl({ labels, vocabulary, name, cut, matcher }) {
  const words = [`curl ${location.origin}/v1/tag`, `-F image=@${shell(name)}`];
  if (labels) words.push(`-F ${shell(`labels=${typed(labels)}`)}`);
  if (vocabulary) words.push(`-F vocabulary=${shell(vocabulary)}`);
  words.push(`-F threshold=${cut}`);
  if (matcher) words.push(`-F matcher=${matcher}`);
  if (sessionGet("ramatch-key")) words.push("-H 'X-API-Key: YOUR_KEY'");
  return words.join(" ");
}

const TABS = { json, cli, python: code, curl };

export function drawCode() { $("code").textContent = TABS[state.tab](facts()); }

export function chooseTab(tab, focus) {
  state.tab = tab.id.replace("tab-", "");
  remember({ tab: state.tab });
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
  $("said").textContent = "Copied";
  $("copy").textContent = "Copied ✓";
  setTimeout(() => { $("copy").textContent = "Copy"; $("said").textContent = ""; }, 1600);
}

export function wireCode() {
  $("copy").addEventListener("click", copy);
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => chooseTab(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) chooseTab(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length], true);
    });
  }
}

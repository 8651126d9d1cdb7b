// What to look for: the labels that were typed, or else a vocabulary; and the matcher.
import { $, state } from "./state.js";

// The same rules as labels.py: separators outside quotes, white space in order, repeats merged whatever their case.
const CLOSING = { '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»" }, SEPARATORS = ",;|\t\n\r";

export function splitLabels(text) {
  const labels = [];
  let current = "", closing = "";
  for (const character of text) {
    if (closing) {
      if (character === closing) closing = "";
      else current += character;
    } else if (SEPARATORS.includes(character)) {
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

// A file of labels comes into the box as one label per line, where it can be changed.
export async function readLabels(file) {
  const text = await file.text(), table = /\.(csv|tsv)$/i.test(file.name);
  const lines = text.split(/[\n\r]+/).filter((line) => line.trim() && !line.trim().startsWith("#"));
  const labels = table || lines.length === 1 ? splitLabels(lines.join("\n")) : mergeLabels(lines);
  $("labels").value = labels.map((label) => (/[,;|"]|^'/.test(label) ? `"${label.replaceAll('"', "")}"` : label)).join("\n");
  state.file = { name: file.name, text: $("labels").value };
}

export const fromFile = () => (state.file && state.file.text === $("labels").value ? state.file.name : null);

export function wanted() {
  const labels = splitLabels($("labels").value), vocabulary = $("vocabulary").value;
  if (labels.length) return { labels };
  return vocabulary === ":own" || !vocabulary ? {} : { vocabulary };
}

export const question = () => JSON.stringify({ ...wanted(), matcher: $("matcher").value, masks: $("masks").checked });

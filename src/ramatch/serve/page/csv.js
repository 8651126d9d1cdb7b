// Answers as a CSV, in the form of `ramatch tag --format csv`.
import { state, value } from "./state.js";

const COLUMNS = ["label", "probability", "score", "relative", "calibrated", "familiarity"];

// Text as a cell that a spreadsheet does not run: control characters as codes, what begins like a formula quoted.
export function cell(text) {
  const plain = text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, code);
  return /^ *[=+\-@]/.test(plain) ? `'${plain}` : plain;
}

const NAMED = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };

function code(character) {
  const number = character.codePointAt(0), hex = number.toString(16);
  if (number >= 0xd800 && number <= 0xdfff) return "?"; // half a character
  if (NAMED[character]) return NAMED[character];
  return number < 0x100 ? `\\x${hex.padStart(2, "0")}` : number < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

const quoted = (field) => (/[",\r\n]/.test(field) ? `"${field.replaceAll('"', '""')}"` : field);

function written(field) {
  if (typeof field === "boolean") return field ? "True" : "False";
  return field === undefined || field === null ? "" : String(field);
}

// A row for each label that reaches the threshold, of each picture that has an answer.
export function table(pictures, threshold) {
  const rows = [["image", ...COLUMNS]];
  for (const { name, answer } of pictures) for (const label of answer?.labels || []) {
    if (value(label) >= threshold) rows.push([cell(name), cell(label.label), ...COLUMNS.slice(1).map((column) => written(label[column]))]);
  }
  return rows.map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

export function download(threshold) {
  const url = URL.createObjectURL(new Blob([table(state.pictures, threshold)], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: "ramatch.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

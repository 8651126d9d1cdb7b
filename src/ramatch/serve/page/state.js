// What the page knows, and small helpers that every part of it uses.
export const $ = (id) => document.getElementById(id);

// pictures: [{ id, file, name, text, url, example, auto, asked, answer, error, busy }], in the order they came.
// current: the one that is shown large. held: the label whose map stays. file: where the labels were read from.
export const state = { info: null, pictures: [], current: null, held: null, all: false, file: null, tab: "json" };

export const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// How values are shown. A label's probability; of a model that is not calibrated its relative score, no percentage.
const percent = (p) => (p > 0 && p < 0.005 ? "<1 %" : `${Math.round(p * 100)} %`);
export const value = (label) => label.probability ?? label.relative;
export const unsure = (label) => label.probability !== undefined && !label.calibrated;
export const shown = (label) => (label.probability === undefined ? label.relative.toFixed(2) : `${percent(label.probability)}${unsure(label) ? " ?" : ""}`);
export const threshold = () => Number($("threshold").value) / 100;
export const found = (answer) => answer.labels.filter((label) => value(label) >= threshold());

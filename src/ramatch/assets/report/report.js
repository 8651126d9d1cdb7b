// The HTML report: maps on hover, focus or tap; a filter by labels and file names; orders; the most frequent labels as
// shortcuts.
"use strict";
(function () {
  const $ = (id) => document.getElementById(id);
  const cards = [...document.querySelectorAll(".card")].map((element, place) => {
    const [rows, columns] = element.dataset.grid.split(" ").map(Number), labels = [...element.querySelectorAll(".label")];
    return { element, place, rows, columns, heat: element.querySelector(".heat"), canvas: element.querySelector("canvas"), held: null, wanted: null, matched: [],
      name: element.querySelector("h2").textContent, labels, found: labels.filter((label) => !label.classList.contains("below")) };
  });

  function grid(card, label) {
    const text = atob(label.dataset.map);
    return Array.from({ length: card.rows }, (_, y) => Array.from({ length: card.columns }, (_, x) => text.charCodeAt(y * card.columns + x) / 255));
  }

  // Shows a label's map; null shows the label that is held, the one filtered for, or the plain picture.
  function light(card, label) {
    label = label || card.held || card.wanted;
    const lit = Boolean(label?.dataset.map && card.canvas);
    if (lit) drawHeat(card.canvas, grid(card, label));
    card.heat.classList.toggle("lit", lit);
  }

  function hold(card, label) {
    card.held = card.held === label ? null : label;
    for (const each of card.labels) each.setAttribute("aria-pressed", String(each === card.held));
    light(card, card.held);
  }

  for (const card of cards) {
    for (const label of card.labels) {
      label.querySelector(".fill").style.clipPath = `inset(0 ${100 - Number(label.dataset.p) * 100}% 0 0 round 5px)`;
      label.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") light(card, label); });
      label.addEventListener("focus", () => light(card, label));
      label.addEventListener("click", () => hold(card, label));
    }
    card.element.addEventListener("pointerleave", () => light(card, null));
    card.element.addEventListener("focusout", (event) => { if (!card.element.contains(event.relatedTarget)) light(card, null); });
    card.element.addEventListener("keydown", (event) => {
      const at = card.labels.indexOf(document.activeElement), to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
      if (at >= 0 && card.labels[to]) { event.preventDefault(); card.labels[to].focus(); }
      if (event.key === "Escape" && card.held) hold(card, card.held);
    });
  }

  // Parts between commas must all fit: dog, beach, "a label, with a comma". Each is a label that counts as found; what is
  // no label of any image is taken as a part of one, or of the file's name. With a minus before it, it must not fit.
  const terms = () => ($("filter").value.toLowerCase().match(/("[^"]*"|[^,])+/g) || []).map((text) => text.replaceAll('"', "").trim()).filter((text) => text && text !== "-");
  const likely = (label) => Number(label?.dataset.p ?? 0);

  const named = (label) => label.dataset.label.toLowerCase(), known = new Set(cards.flatMap((card) => card.found.map(named)));
  const labelFor = (card, term) => card.found.find((label) => (known.has(term) ? named(label) === term : named(label).includes(term)));
  const fits = (card, term) => Boolean(labelFor(card, term)) || (!known.has(term) && card.name.toLowerCase().includes(term));

  function filter() {
    const all = terms(), without = all.filter((term) => term.startsWith("-")).map((term) => term.slice(1).trim()), wanted = all.filter((term) => !term.startsWith("-"));
    let shown = 0;
    for (const card of cards) {
      card.matched = wanted.map((term) => labelFor(card, term)).filter(Boolean);
      card.wanted = card.matched[0] || null;
      card.element.hidden = !wanted.every((term) => fits(card, term)) || without.some((term) => fits(card, term));
      if (!card.element.hidden) shown++;
      light(card, null);
    }
    $("count").textContent = all.length ? `${shown} of ${cards.length} images` : `${cards.length} image${cards.length === 1 ? "" : "s"}`;
    $("nothing").hidden = shown > 0 || !cards.length;
    for (const button of $("common").querySelectorAll("button")) button.setAttribute("aria-pressed", String(all.includes(button.dataset.label.toLowerCase())));
    sort();
  }

  // How likely: all labels of the filter together; without a filter, the best label.
  const together = (card) => (card.matched.length ? card.matched.reduce((product, label) => product * likely(label), 1) : terms().length ? 0 : likely(card.labels[0]));
  const ORDERS = [
    () => 0,
    (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
    (a, b) => together(b) - together(a),
    (a, b) => b.found.length - a.found.length,
    (a, b) => a.found.length - b.found.length,
  ];

  let order = cards;
  function sort() {
    const sorted = [...cards].sort((a, b) => ORDERS[$("sort").selectedIndex](a, b) || a.place - b.place);
    if (sorted.every((card, i) => card === order[i])) return; // moving them would lose the focus
    order = sorted;
    $("cards").append(...sorted.map((card) => card.element));
  }

  // A shortcut adds its label to the filter, or takes it out again.
  function toggle(label) {
    const all = terms(), name = label.toLowerCase();
    const left = all.includes(name) ? all.filter((term) => term !== name) : [...all, label];
    $("filter").value = left.map((term) => (term.includes(",") ? `"${term}"` : term)).join(", ");
  }

  const counts = new Map();
  for (const card of cards) for (const label of card.found) counts.set(label.dataset.label, (counts.get(label.dataset.label) || 0) + 1);
  const common = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, 40);
  if (cards.length > 1) for (const [label, count] of common) {
    const item = document.createElement("li"), button = Object.assign(document.createElement("button"), { type: "button", textContent: `${label} ${count}` });
    button.dataset.label = label;
    button.addEventListener("click", () => { toggle(label); filter(); });
    item.append(button);
    $("common").append(item);
  }
  $("filter").addEventListener("input", filter);
  $("sort").addEventListener("change", sort);
  $("theme").addEventListener("click", toggleTheme);
  filter();
})();

// The HTML report: maps on hover, focus or tap; a filter by label; the most frequent labels as shortcuts.
"use strict";
(function () {
  const $ = (id) => document.getElementById(id);
  const cards = [...document.querySelectorAll(".card")].map((element) => {
    const [rows, columns] = element.dataset.grid.split(" ").map(Number);
    return { element, rows, columns, heat: element.querySelector(".heat"), canvas: element.querySelector("canvas"), held: null,
      labels: [...element.querySelectorAll(".label")] };
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

  // The filter looks at labels that count as found; an exact name wins over a part of one.
  function filter() {
    const wanted = $("filter").value.trim().toLowerCase(), name = (label) => label.dataset.label.toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const found = card.labels.filter((label) => !label.classList.contains("below"));
      const match = wanted && (found.find((label) => name(label) === wanted) || found.find((label) => name(label).includes(wanted)));
      card.wanted = match || null;
      card.element.hidden = Boolean(wanted) && !match;
      if (!card.element.hidden) shown++;
      light(card, null);
    }
    $("count").textContent = wanted ? `${shown} of ${cards.length} images` : `${cards.length} image${cards.length === 1 ? "" : "s"}`;
    $("nothing").hidden = shown > 0 || !cards.length;
    for (const button of $("common").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.label.toLowerCase() === wanted));
  }

  const counts = new Map();
  for (const card of cards) for (const label of card.labels) if (!label.classList.contains("below")) counts.set(label.dataset.label, (counts.get(label.dataset.label) || 0) + 1);
  const common = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, 40);
  if (cards.length > 1) for (const [label, count] of common) {
    const item = document.createElement("li"), button = Object.assign(document.createElement("button"), { type: "button", textContent: `${label} ${count}` });
    button.dataset.label = label;
    button.addEventListener("click", () => { $("filter").value = button.getAttribute("aria-pressed") === "true" ? "" : label; filter(); });
    item.append(button);
    $("common").append(item);
  }
  $("filter").addEventListener("input", filter);
  $("theme").addEventListener("click", toggleTheme);
  filter();
})();

// Before the first paint: the theme chosen last time. Without a choice the system's preference rules.
"use strict";
(function () {
  const root = document.documentElement;
  let kept = null;
  try { kept = localStorage.getItem("ramatch-theme"); } catch { /* storage may be off */ }
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  window.toggleTheme = function () {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("ramatch-theme", root.dataset.theme); } catch { /* fine, for this visit only */ }
  };
})();

// Search of the photo library that the server was started with (--index): thumbnails, best first.
import { blob, call } from "./api.js";
import { $, make, plural, shown, state } from "./state.js";
import { remember } from "./store.js";

const LIMIT = 40;
let run = 0, urls = [];

function hit(found, calibrated) {
  const text = found.labels.map((label) => `${label.label} ${shown({ ...label, calibrated })}`).join(" · ");
  const image = make("img", { alt: "", width: 160, height: 120 });
  const item = make("li", { className: "hit", title: `${found.image}\n${text}` }, image,
    make("b", { textContent: found.image }), make("span", { textContent: shown({ ...found, calibrated }) }));
  return { item, image, address: found.thumbnail };
}

async function fill(hits, mine) {
  for (const { image, address } of hits) {
    const picture = await blob(address).catch(() => null);
    if (mine !== run) return;
    if (picture) urls.push(image.src = URL.createObjectURL(picture));
  }
}

export async function search() {
  const words = $("words").value.trim(), mine = ++run;
  urls.forEach((url) => URL.revokeObjectURL(url));
  urls = [];
  $("hits").replaceChildren();
  remember({ words });
  $("hits-said").textContent = words ? "Searching…" : "";
  if (!words) return;
  try {
    const answer = await call(`v1/search?${new URLSearchParams({ q: words, limit: LIMIT })}`);
    if (mine !== run) return;
    const hits = answer.hits.map((each) => hit(each, answer.calibrated));
    $("hits").append(...hits.map((each) => each.item));
    $("hits-said").textContent = hits.length ? `${plural(hits.length, "photo")}, the most likely first${answer.calibrated ? "" : " (relative scores)"}` : "No photo fits.";
    for (let part = 0; part < 4; part++) fill(hits.filter((_, i) => i % 4 === part), mine);
  } catch (error) {
    if (mine === run) $("hits-said").textContent = `${error.message} ${error.hint || ""}`;
  }
}

export function wireSearch() {
  $("search").hidden = !state.info.index;
  $("search-form").onsubmit = (event) => { event.preventDefault(); search(); };
}

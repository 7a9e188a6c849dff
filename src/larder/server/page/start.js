"use strict";

// What the page does when something is clicked, typed, or a while has passed.

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value);
  find("key").value = "";
  guarded(enter)();
});
find("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (text && !state.speaking) {
    find("text").value = "";
    guarded(async () => {
      await say(text);
      await look();
    })();
  }
});
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("say").requestSubmit();
  }
});
find("stop").addEventListener("click", () => state.speaking?.abort());
find("new").addEventListener("click", guarded(() => choose(null)));
find("dismiss").addEventListener("click", () => trouble(null));
for (const button of find("actions").children) {
  button.addEventListener("click", guarded(() => act(button.dataset.act)));
}

// A word shows where it is on the map, and the map leads to its words.
find("turns").addEventListener("mouseover", (event) => {
  const at = event.target.dataset.at;
  find("here").hidden = at === undefined;
  find("here").style.left = `${(100 * (at || 0)) / Math.max(state.kept?.tokens || 1, 1)}%`;
});
find("map").addEventListener("click", (event) => {
  const at = (event.offsetX / find("map").clientWidth) * (state.kept?.tokens || 0);
  const before = [...find("turns").querySelectorAll("[data-at]")].filter((each) => each.dataset.at <= at);
  before.at(-1)?.scrollIntoView({ block: "center", behavior: "smooth" });
});

window.addEventListener("resize", showKept);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showKept);
setInterval(() => {
  if (state.model && document.visibilityState === "visible") {
    guarded(look)();
  }
}, PACE);
guarded(enter)();

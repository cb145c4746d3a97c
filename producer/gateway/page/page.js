"use strict";
(() => {
  const EVERY_MS = 2000;
  const fleet = document.getElementById("fleet");
  const freshness = document.getElementById("freshness");

  const say = (text, lost) => {
    if (freshness.textContent !== text) freshness.textContent = text;
    freshness.classList.toggle("lost", lost);
  };

  // what the reader has scrolled to and where the keyboard is stay as they are
  const show = (text) => {
    const places = [...fleet.querySelectorAll("section[id]")].map((s) => [s.id, s.scrollLeft]);
    const focused = fleet.contains(document.activeElement) ? document.activeElement.id : "";
    fleet.innerHTML = text;
    for (const [id, left] of places) {
      const section = document.getElementById(id);
      if (section) section.scrollLeft = left;
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };

  const look = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("status/fragment", { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const text = await answer.text();
      if (document.getSelection().isCollapsed) show(text);
      say("live", false);
    } catch (error) {
      say("the gateway does not answer; what is shown is old", true);
    }
  };

  document.addEventListener("visibilitychange", look);
  setInterval(look, EVERY_MS);
  say("live", false);
})();

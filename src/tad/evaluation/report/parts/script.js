// Three small things: methods can be switched off in the charts, a link to a folded section unfolds it, and the replay
// plays. The page is whole without any of them.
"use strict";

function unfold() {
  const place = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  const fold = place && place.querySelector(":scope > details.fold");
  if (fold) fold.open = true;
}
addEventListener("hashchange", unfold);
unfold();

for (const legend of document.querySelectorAll(".legend")) {
  const board = legend.closest(".board");
  const parts = (slot) => board.querySelectorAll("figure g." + CSS.escape(slot));
  const buttons = [...legend.querySelectorAll("button")];
  const point = (chosen) => {
    for (const other of buttons)
      for (const part of parts(other.dataset.slot)) part.classList.toggle("dim", chosen !== null && other !== chosen);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const part of parts(button.dataset.slot)) part.classList.toggle("off", !on);
    });
    button.addEventListener("pointerenter", () => point(button.getAttribute("aria-pressed") === "true" ? button : null));
    button.addEventListener("pointerleave", () => point(null));
  }
}

const replay = document.querySelector(".replay");
if (replay) {
  const find = (name) => replay.querySelector(`[data-do="${name}"]`);
  const play = find("play"), speed = find("speed"), choice = find("scene");
  const range = replay.querySelector("input[type=range]"), output = replay.querySelector("output");
  const scenes = [...replay.querySelectorAll(".scene")].map((element) => ({
    element,
    last: Number(element.dataset.last),
    sides: [...element.querySelectorAll(".side")].map((side) => ({
      forwards: Number(side.dataset.forwards),
      tokens: Number(side.dataset.tokens),
      now: side.querySelector(".now"),
      verdict: side.querySelector(".verdict"),
      bar: side.querySelector(".bar i"),
      cells: [...side.querySelectorAll(".cell")].map((cell) => ({ cell, step: Number(cell.dataset.step) })),
    })),
  }));
  let scene = scenes[0], timer = null;

  function show(forward) {
    range.value = forward;
    output.textContent = forward;
    for (const side of scene.sides) {
      const done = forward >= side.forwards, at = Math.min(forward, side.forwards);
      let revealed = 0, places = 0;
      for (const { cell, step } of side.cells) {
        // Filler (step 0) is written when the row ends.
        const visible = step === 0 ? done : step <= at;
        cell.classList.toggle("masked", !visible);
        cell.classList.toggle("fresh", visible && step === forward && forward > 0);
        if (step > 0) places += 1;
        if (step > 0 && visible) revealed += 1;
      }
      side.now.textContent = done
        ? `done: ${side.forwards} forwards, ${side.tokens} tokens, TPF ${(side.tokens / side.forwards).toFixed(2)}`
        : `forward ${at} of ${side.forwards}, ${revealed} of ${places} positions revealed`;
      if (side.verdict) side.verdict.hidden = !done;
      side.bar.style.width = `${(100 * at) / Math.max(1, side.forwards)}%`;
    }
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  function go(forward) {
    show(Math.max(0, Math.min(scene.last, forward)));
  }
  function start() {
    if (Number(range.value) >= scene.last) go(0);
    play.textContent = "Pause";
    clearInterval(timer);
    timer = setInterval(() => {
      go(Number(range.value) + 1);
      if (Number(range.value) >= scene.last) stop();
    }, 1000 / Number(speed.value));
  }
  function toggle() {
    if (timer === null) start();
    else stop();
  }

  play.addEventListener("click", toggle);
  find("back").addEventListener("click", () => { stop(); go(Number(range.value) - 1); });
  find("next").addEventListener("click", () => { stop(); go(Number(range.value) + 1); });
  range.addEventListener("input", () => { stop(); show(Number(range.value)); });
  speed.addEventListener("change", () => { if (timer !== null) start(); });
  if (choice)
    choice.addEventListener("change", () => {
      stop();
      scene.element.hidden = true;
      scene = scenes[Number(choice.value)];
      scene.element.hidden = false;
      range.max = scene.last;
      show(scene.last);
    });
  replay.addEventListener("keydown", (event) => {
    const own = event.target === replay || event.target === range;
    if (!own || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === " ") toggle();
    else if (event.key in moves) { stop(); go(Number(range.value) + moves[event.key]); }
    else return;
    event.preventDefault();
  });
}

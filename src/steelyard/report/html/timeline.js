// Makes the picture of the schedule move: zoom, drag, and say what is under the pointer. The page is complete without it.
"use strict";
(() => {
  const figure = document.getElementById("schedule");
  if (!figure) return;
  const view = figure.querySelector(".view");
  const picture = view.querySelector("svg");
  const axis = figure.querySelector(".axis");
  const { step_s: stepTime, width, names, lanes } = JSON.parse(figure.querySelector("script").textContent);
  const FIELDS = 4; // of a slice: name, microbatch, left edge, width
  const LEAST = width / 2000; // units that the closest view shows
  const LABEL = 22; // pixels from which on a pass is labelled
  const MOST_LABELS = 600;
  const NEAR = 12; // pixels of a typical pass from which on passes have an edge
  const typical = width / Math.max(...lanes.map((lane) => lane.length / FIELDS));
  const labels = document.createElement("div");
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  view.append(labels);
  document.body.append(tip);
  figure.classList.add("live");

  let left = 0, shown = width;

  function seconds(value) {
    if (value === 0) return "0";
    const [factor, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return `${(value / factor).toPrecision(3)} ${unit}`;
  }

  function show(start, span) {
    shown = Math.min(Math.max(span, LEAST), width);
    left = Math.min(Math.max(start, 0), width - shown);
    picture.setAttribute("viewBox", `${left} 0 ${shown} ${lanes.length * 10}`);
    [...axis.children].forEach((tick, index, all) => {
      tick.textContent = seconds(((left + (shown * index) / (all.length - 1)) / width) * stepTime);
    });
    label();
    figure.classList.toggle("near", view.clientWidth / shown > NEAR / typical);
  }

  function zoom(factor, at = 0.5) {
    show(left + shown * at * (1 - 1 / factor), shown / factor);
  }

  // The index of the slice of a lane at a place, by bisection; -1 where there is none.
  function find(lane, place) {
    let low = 0, high = lane.length / FIELDS - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      const start = lane[middle * FIELDS + 2];
      if (place < start) high = middle - 1;
      else if (place >= start + lane[middle * FIELDS + 3]) low = middle + 1;
      else return middle;
    }
    return -1;
  }

  function label() {
    const pixels = view.clientWidth / shown;
    const made = [];
    lanes.forEach((lane, row) => {
      for (let at = 0; at < lane.length && made.length < MOST_LABELS; at += FIELDS) {
        const [name, microbatch, start, span] = lane.slice(at, at + FIELDS);
        const wide = span * pixels;
        const isBubble = names[name].startsWith("bubble");
        if (wide < (isBubble ? 130 : LABEL) || start + span < left || start > left + shown) continue;
        const text = document.createElement("em");
        text.textContent = isBubble ? names[name].replace("bubble: ", "") : microbatch < 0 ? names[name] : microbatch;
        text.className = isBubble ? "dark" : "";
        if (isBubble) text.style.color = "var(--soft)";
        const from = Math.max(start, left), to = Math.min(start + span, left + shown);
        text.style.left = `${((from - left) / shown) * 100}%`;
        text.style.width = `${((to - from) / shown) * 100}%`;
        text.style.top = `${((row + 0.5) / lanes.length) * 100}%`;
        made.push(text);
      }
    });
    labels.replaceChildren(...made);
  }

  function point(event) {
    const box = view.getBoundingClientRect();
    const place = left + ((event.clientX - box.left) / box.width) * shown;
    const row = Math.min(Math.max(Math.floor(((event.clientY - box.top) / box.height) * lanes.length), 0), lanes.length - 1);
    const index = find(lanes[row], place);
    tip.hidden = index < 0;
    if (index < 0) return;
    const [name, microbatch, start, span] = lanes[row].slice(index * FIELDS, index * FIELDS + FIELDS);
    const begun = (start / width) * stepTime, took = (span / width) * stepTime;
    const of = microbatch >= 0 && !names[name].startsWith("bubble") ? ` of microbatch ${microbatch}` : "";
    tip.textContent = `stage ${row}: ${names[name]}${of}, ${seconds(took)} from ${seconds(begun)} on`;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 18}px`;
  }

  const held = new Map(); // pointers that are down, by id
  view.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event);
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return point(event);
    const box = view.getBoundingClientRect();
    const other = [...held.values()].find((each) => each.pointerId !== event.pointerId);
    if (other) {
      const ratio = Math.abs(event.clientX - other.clientX) / Math.max(Math.abs(before.clientX - other.clientX), 1);
      if (ratio > 0) zoom(ratio, ((event.clientX + other.clientX) / 2 - box.left) / box.width);
    } else {
      show(left - ((event.clientX - before.clientX) / box.width) * shown, shown);
    }
    held.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
    view.addEventListener(name, (event) => {
      held.delete(event.pointerId);
      if (name !== "pointerup") tip.hidden = true;
    });
  }
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = view.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 300), (event.clientX - box.left) / box.width);
  }, { passive: false });
  view.addEventListener("dblclick", (event) => {
    const box = view.getBoundingClientRect();
    zoom(3, (event.clientX - box.left) / box.width);
  });
  const moves = {
    whole: () => show(0, width),
    start: () => show(0, width / 8),
    end: () => show(width, width / 8),
    in: () => zoom(2),
    out: () => zoom(0.5),
  };
  const keys = { "+": "in", "=": "in", "-": "out", 0: "whole", Home: "start", End: "end" };
  for (const button of figure.querySelectorAll("button")) {
    button.addEventListener("click", moves[button.dataset.zoom]);
  }
  view.addEventListener("keydown", (event) => {
    if (event.key in keys) moves[keys[event.key]]();
    else if (event.key === "ArrowLeft") show(left - shown / 5, shown);
    else if (event.key === "ArrowRight") show(left + shown / 5, shown);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(label).observe(view);
  window.addEventListener("beforeprint", () => {
    show(0, width);
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
  show(0, width);
})();

// Chooses which solved plan is seen, and finds the nearest place that reaches a milestone. It computes no plan.
"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const { keys, axes, own, command, points, plans } = await new Response(unpacked).json();
  const [form] = document.forms;
  const at = (name) => document.getElementById(name);
  const [LEVER, SIZE, DEVICES, MEMORY] = [1, 2, 3, 4];
  const places = points.map((_, index) => place(index));
  let chosen = [...own];

  function place(index) {
    return axes.reduceRight(([found, rest], axis) => {
      const count = axis.words.length;
      return [[rest % count, ...found], Math.floor(rest / count)];
    }, [[], index])[0];
  }
  const pointAt = (where) => points[where.reduce((sum, each, axis) => sum * axes[axis].words.length + each, 0)];
  const planAt = (where) => {
    const point = pointAt(where);
    return Array.isArray(point) ? plans[point[0]] : null;
  };
  const moved = (where, axis, to) => where.with(axis, to);
  const moves = (from, to) => axes
    .map((axis, index) => from[index] === to[index] ? "" : `${axis.name}: ${axis.words[from[index]]} → ${axis.words[to[index]]}`)
    .filter(Boolean).join("; ");

  const distance = (from, where) => where.filter((each, axis) => each !== from[axis]).length;

  // The solved place that changes the fewest controls, of these the one of the least device-time for a token.
  function nearest(from, isWanted) {
    const cost = (where) => axes[DEVICES].values[where[DEVICES]] / planAt(where).tokens;
    return places.filter((where) => planAt(where) && isWanted(where, planAt(where)))
      .sort((a, b) => distance(from, a) - distance(from, b) || cost(a) - cost(b) || planAt(a).step_s - planAt(b).step_s)[0];
  }

  const milestones = {
    fits() {
      if (planAt(chosen)) {
        const least = axes[MEMORY].words.map((_, to) => moved(chosen, MEMORY, to)).find(planAt);
        if (least[MEMORY] >= chosen[MEMORY]) return ["It fits, and no smaller memory on this page is enough."];
        return [`It fits, and also into ${axes[MEMORY].words[least[MEMORY]]}: ${planAt(least).step} a step.`, least];
      }
      const found = nearest(chosen, (where) => where[SIZE] === chosen[SIZE]);
      return found ? [`${moves(chosen, found)}: ${planAt(found).step} a step.`, found] : ["No solved choice fits."];
    },
    twice() {
      const size = axes[SIZE].values.indexOf(2 * axes[SIZE].values[chosen[SIZE]]);
      if (size < 0) return ["Not on this page: ask for it with a larger size."];
      const from = moved(chosen, SIZE, size), found = nearest(from, (where) => where[SIZE] === size);
      if (!found) return ["No solved choice fits it."];
      const now = planAt(chosen), then = planAt(found), also = moves(from, found);
      const speed = now ? `, ${Math.round(100 * then.tokens / now.tokens)} % of the tokens per second` : "";
      return [`${also ? `Fits with ${also}` : "Fits with no other change"}: ${then.step} a step${speed}.`, found];
    },
    half() {
      const now = planAt(chosen);
      if (!now) return ["Nothing fits yet."];
      const isSame = (where) => where[SIZE] === chosen[SIZE];
      const found = nearest(chosen, (where, plan) => isSame(where) && plan.step_s <= now.step_s / 2);
      if (found) return [`${moves(chosen, found)}: ${planAt(found).step} a step.`, found];
      const best = places.filter((where) => planAt(where) && isSame(where))
        .sort((a, b) => planAt(a).step_s - planAt(b).step_s || distance(chosen, a) - distance(chosen, b))[0];
      const share = Math.round(100 * planAt(best).step_s / now.step_s);
      if (share >= 100) return ["No solved choice is faster."];
      return [`No solved choice halves it. The fastest takes ${share} %: ${moves(chosen, best)}, ${planAt(best).step}.`, best];
    },
  };

  const make = (name, properties, ...children) => {
    const found = Object.assign(document.createElement(name), properties);
    found.append(...children);
    return found;
  };

  function showFigures(plan) {
    const budget = axes[MEMORY].values[chosen[MEMORY]];
    at("figures").replaceChildren(...(plan ? plan.tiles : []).map(([name, figure, below], index) => {
      const isMemory = index === 2, share = plan?.bytes / budget;
      const gauge = make("i", { className: share > 1 ? "over" : "" });
      gauge.style.width = `${Math.min(share, 1) * 100}%`;
      const words = isMemory ? `${Math.round(share * 100)} % of ${axes[MEMORY].words[chosen[MEMORY]]}` : below;
      return make("div", {}, make("div", { className: "name" }, name), make("div", { className: "figure" }, figure),
        make("div", { className: "below" }, words, ...(isMemory ? [make("span", { className: "gauge" }, gauge)] : [])));
    }));
  }

  function showCells() {
    const most = Math.max(...places.map((where) => planAt(where)?.tokens ?? 0));
    const rows = axes[DEVICES].words.map((words, device) => make("tr", {}, make("th", { scope: "row" }, words),
      ...axes[MEMORY].words.map((_, memory) => {
        const where = moved(moved(chosen, DEVICES, device), MEMORY, memory), plan = planAt(where);
        const text = plan ? plan.step : pointAt(where) === null ? "not solved" : "no plan";
        const button = make("button", { type: "button", onclick: () => choose(where) }, text);
        if (plan) button.style.setProperty("--share", `${Math.round(10 + 60 * plan.tokens / most)}%`);
        if (`${where}` === `${chosen}`) button.setAttribute("aria-current", "true");
        return make("td", {}, button);
      })));
    const head = make("tr", {}, make("td", {}), ...axes[MEMORY].words.map((words) => make("th", { scope: "col" }, words)));
    at("cells").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  function show() {
    const point = pointAt(chosen), plan = planAt(chosen);
    at("choice").textContent = axes.map((axis, index) => axis.words[chosen[index]]).join(" · ");
    at("verdict").textContent = plan ? point[1]
      : point === null ? "Not solved: the time ran out before this choice." : `No plan: ${point}.`;
    at("plan").innerHTML = plan ? plan.html : "";
    const budget = axes[MEMORY].values[chosen[MEMORY]], most = Math.max(...axes[MEMORY].values);
    for (const line of at("plan").querySelectorAll(".limit i")) line.style.left = `${budget / Math.max(most, plan.bytes) * 100}%`;
    for (const [name, find] of Object.entries(milestones)) {
      const [text, target] = find();
      at(`${name}-text`).textContent = text[0].toUpperCase() + text.slice(1);
      at(`${name}-show`).hidden = !target;
      at(`${name}-show`).onclick = target ? () => choose(target) : null;
    }
    const line = [command, ...axes.map((axis, index) => axis.options[chosen[index]])].filter(Boolean).join(" ");
    at("line").replaceChildren(...line.split(" ").flatMap((word) => [make("span", {}, word), " "]));
    for (const [axis, key] of keys.entries()) {
      if (axis <= LEVER) form.elements[key].value = String(chosen[axis]);
      else {
        const slider = form.elements[key];
        slider.value = chosen[axis];
        slider.setAttribute("aria-valuetext", axes[axis].words[chosen[axis]]);
        at(`${key}-value`).textContent = axes[axis].words[chosen[axis]];
      }
    }
    showFigures(plan);
    showCells();
  }

  const hasAddress = location.protocol !== "about:"; // the frame of a report has none
  at("kept").hidden = !hasAddress;

  function choose(where) {
    chosen = [...where];
    if (hasAddress) history.replaceState(null, "", `#${keys.map((key, axis) => `${key}=${chosen[axis]}`).join("&")}`);
    show();
  }

  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const found = keys.map((key) => Number(given.get(key) ?? NaN));
    chosen = found.map((each, axis) => axes[axis].words[each] === undefined ? own[axis] : each);
    show();
  }

  form.addEventListener("input", () => choose(keys.map((key) => Number(form.elements[key].value))));
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    choose(own);
  });
  window.addEventListener("hashchange", read);
  read();
})();

// Two toys of the page "playground": masks with the tiles that kernels skip, and kernel regression with a width to drag.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const N = 32, TILE = 8;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawn(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // A labelled slider; `changed` is called when it moves.
  function slider(label, least, most, value, step, changed) {
    const input = element("input", { type: "range", min: least, max: most, step, value });
    const shown = element("output", {}, String(value));
    input.addEventListener("input", () => { shown.textContent = input.value; changed(); });
    return { box: element("label", {}, `${label} `, input, " ", shown), get value() { return Number(input.value); } };
  }

  function choice(label, names, changed) {
    const select = element("select");
    for (const name of names) select.add(new Option(name));
    select.addEventListener("change", changed);
    return { box: element("label", {}, `${label} `, select), select, get value() { return select.value; } };
  }

  // Masks -------------------------------------------------------------------------------------------------------------

  // Visible iff …, with n the number of each: as in regard.masks.
  const MASKS = {
    "everything()": () => () => true,
    "causal()": () => (i, j) => j <= i,
    "window(n, 0)": (n) => (i, j) => j >= i - n && j <= i,
    "window(n, n)": (n) => (i, j) => Math.abs(i - j) <= n,
    "sinks(n)": (n) => (i, j) => j < n,
    "prefix(n)": (n) => (i, j) => j < n,
    "dilated(n)": (n) => (i, j) => (i - j) % n === 0,
    "chunked(n)": (n) => (i, j) => Math.floor(i / n) === Math.floor(j / n),
    "leave_one_out()": () => (i, j) => i !== j,
  };

  function masks(place) {
    const names = Object.keys(MASKS);
    const show = () => draw();
    const first = choice("", names, show), second = choice("", names, show), third = choice("", names, show);
    const operators = [choice("", ["&", "|"], show), choice("", ["&", "|"], show)];
    const sizes = [4, 4, 2].map((value) => slider("n", 1, 16, value, 1, show));
    first.select.value = "causal()";
    second.select.value = "window(n, 0)";
    third.select.value = "sinks(n)";
    operators[1].select.value = "|";
    const picture = drawn("svg", { viewBox: `-2 -2 ${N + 3} ${N + 3}`, role: "img" });
    const said = element("p", { "aria-live": "polite" });
    place.append(
      element("div", {}, first.box, sizes[0].box),
      element("div", {}, operators[0].box, " (", second.box, sizes[1].box),
      element("div", {}, operators[1].box, third.box, sizes[2].box, " )"),
      picture, said,
    );

    function draw() {
      const [a, b, c] = [first, second, third].map((each, k) => MASKS[each.value](sizes[k].value));
      const join = (operator, p, q) => (operator.value === "&" ? p && q : p || q);
      const visible = (i, j) => join(operators[0], a(i, j), join(operators[1], b(i, j), c(i, j)));
      picture.replaceChildren();
      let pairs = 0, skipped = 0;
      for (let i = 0; i < N; i++) {
        for (let j = 0; j < N; j++) {
          if (!visible(i, j)) continue;
          pairs += 1;
          picture.append(drawn("rect", { x: j, y: i, width: 0.94, height: 0.94, class: "pair" }));
        }
      }
      for (let y = 0; y < N; y += TILE) {
        for (let x = 0; x < N; x += TILE) {
          let empty = true;
          for (let i = y; i < y + TILE; i++) for (let j = x; j < x + TILE; j++) empty = empty && !visible(i, j);
          skipped += empty ? 1 : 0;
          picture.append(drawn("rect", { x, y, width: TILE, height: TILE, class: empty ? "skipped" : "tile" }));
        }
      }
      const text = (each, k) => each.value.replaceAll("n", (letter, at, all) =>
        /[(, ]/.test(all[at - 1] ?? "") ? sizes[k].value : letter);
      const code = `${text(first, 0)} ${operators[0].value} (${text(second, 1)} ${operators[1].value} ${text(third, 2)})`;
      said.replaceChildren(
        element("code", {}, code),
        ` shows ${(100 * pairs / N ** 2).toFixed(0)} % of the pairs; ${skipped} of ${(N / TILE) ** 2} tiles are skipped.`,
      );
      picture.setAttribute("aria-label", said.textContent);
    }
    draw();
  }

  // Kernel regression -------------------------------------------------------------------------------------------------

  const KERNELS = {
    gaussian: (u) => Math.exp(-u * u / 2),
    laplacian: (u) => Math.exp(-Math.abs(u)),
    boxcar: (u) => (Math.abs(u) <= 1 ? 1 : 0),
    triangular: (u) => Math.max(0, 1 - Math.abs(u)),
    epanechnikov: (u) => Math.max(0, 1 - u * u),
  };

  // The same points on every visit.
  function points(count) {
    let state = 7;
    const random = () => { state = (state * 48271) % 2147483647; return state / 2147483647; };
    return Array.from({ length: count }, () => {
      const x = 5 * random();
      const noise = random() + random() + random() - 1.5;
      return [x, Math.sin(2 * x) + x / 2 + 0.6 * noise];
    });
  }

  function regression(place) {
    const data = points(60);
    const show = () => draw();
    const width = slider("width", 0.02, 2, 0.25, 0.01, show);
    const kernel = choice("kernel", Object.keys(KERNELS), show);
    const W = 60, H = 30;
    const picture = drawn("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
    const said = element("p", { "aria-live": "polite" });
    place.append(element("div", {}, width.box, " ", kernel.box), picture, said);
    const px = (x) => 1 + (W - 2) * x / 5, py = (y) => H - 2 - (H - 4) * (y + 1.5) / 5.5;

    // The weighted mean at x, without the point `without`; NaN where no point is within reach.
    function predicted(x, without = -1) {
      let sum = 0, total = 0;
      data.forEach(([at, y], k) => {
        if (k === without) return;
        const weight = KERNELS[kernel.value]((x - at) / width.value);
        sum += weight * y;
        total += weight;
      });
      return sum / total;
    }

    function draw() {
      picture.replaceChildren();
      for (const [x, y] of data) picture.append(drawn("circle", { cx: px(x), cy: py(y), r: 0.4, class: "point" }));
      let path = "", drawing = false;
      for (let x = 0; x <= 5; x += 0.01) {
        const y = predicted(x);
        if (!Number.isFinite(y)) { drawing = false; continue; }
        path += `${drawing ? "L" : "M"}${px(x).toFixed(2)} ${py(y).toFixed(2)}`;
        drawing = true;
      }
      picture.append(drawn("path", { d: path, class: "curve" }));
      const errors = data.map(([x, y], k) => (predicted(x, k) - y) ** 2);
      const alone = errors.filter((error) => !Number.isFinite(error)).length;
      const mean = errors.filter(Number.isFinite).reduce((a, b) => a + b, 0) / (errors.length - alone);
      said.textContent = `Mean squared leave-one-out error: ${mean.toFixed(4)}` +
        (alone ? `; ${alone} points have no neighbour within reach` : "") + ".";
      picture.setAttribute("aria-label", said.textContent);
    }
    draw();
  }

  const maskPlace = document.getElementById("mask-playground");
  if (maskPlace) masks(maskPlace);
  const regressionPlace = document.getElementById("regression-playground");
  if (regressionPlace) regression(regressionPlace);
})();

// A matrix on a canvas: tiles, tokens along its sides, and the cell, row or column that is pointed at.

import type { Camera } from "./camera";
import { along, css, ink, MASKED, palette, shade, type Theme } from "./colors";
import { type Levels, type Matrix, TILE } from "./matrix";
import { named, type Side } from "./text";
import { type Look, Tiles } from "./tiles";

export interface Cell {
  row: number;
  col: number;
}

/** A query or a key that stays chosen. */
export interface Pin {
  side: "query" | "key";
  at: number;
}

/** A line of text in a picture, turned by an angle. */
export interface Label {
  text: string;
  x: number;
  y: number;
  turned: boolean;
  strong: boolean;
}

export const FONT = (size: number): string => `${size}px system-ui, sans-serif`;
/** Least pixels of a cell whose token is written, between labels where not all are, and of a cell with its weight. */
const READABLE = 9.5;
const APART = 14;
const NUMBERED = 34;
export const LEFT = 96;
export const TOP = 84;
/** Pixels right of and below a matrix that is shown whole: of its frame. */
const EDGE = 2;
/** What rows and columns are, in the corner of a matrix: text and place. */
const AXES: [string, number][] = [["queries (rows) ↓", 14], ["keys (columns) →", 30]];
/** Pixels left of that, and the room that it has. */
const [INDENT, SPAN] = [8, LEFT - 14];

export class View {
  readonly tiles: Tiles;
  hovered: Cell | null = null;
  pinned: Pin | null = null;
  marked: Record<Pin["side"], Set<number>> = { query: new Set(), key: new Set() };
  #drawn = 0;
  #ends: (() => void)[] = [];

  constructor(
    readonly canvas: HTMLCanvasElement,
    readonly camera: Camera,
    readonly matrix: Matrix,
    private readonly queries: Side,
    private readonly keys: Side,
    private look: Look,
    private readonly events: {
      hover(cell: Cell | null): void;
      pick(row: number | null, col: number | null): void;
      /** The wheel was turned without the key that makes it zoom. */
      scroll(): void;
    },
  ) {
    this.tiles = new Tiles(matrix, look, () => this.refresh());
    this.#ends.push(camera.listen(() => this.refresh()));
    this.#pointers();
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(canvas.parentElement!);
    this.#ends.push(() => observer.disconnect());
    this.resize();
  }

  close(): void {
    for (const end of this.#ends) end();
    cancelAnimationFrame(this.#drawn);
    this.#drawn = -1;
  }

  setLook(look: Look): void {
    this.look = look;
    this.tiles.setLook(look);
    this.refresh();
  }

  get size(): { width: number; height: number } {
    const ratio = devicePixelRatio || 1;
    return { width: this.canvas.width / ratio, height: this.canvas.height / ratio };
  }

  get plot(): { width: number; height: number } {
    const { width, height } = this.size;
    return { width: Math.max(width - LEFT - EDGE, 1), height: Math.max(height - TOP - EDGE, 1) };
  }

  resize(): void {
    const { clientWidth, clientHeight } = this.canvas.parentElement!;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.max(Math.round(clientWidth * ratio), 1);
    this.canvas.height = Math.max(Math.round(clientHeight * ratio), 1);
    this.canvas.style.width = `${clientWidth}px`;
    this.canvas.style.height = `${clientHeight}px`;
    this.camera.refit(this.matrix.rows, this.matrix.cols, this.plot.width, this.plot.height);
    this.refresh();
  }

  fit(): void {
    this.camera.fit(this.matrix.rows, this.matrix.cols, this.plot.width, this.plot.height);
  }

  zoom(factor: number, x = this.plot.width / 2, y = this.plot.height / 2): void {
    const { width, height } = this.plot;
    const fitted = [width / Math.max(this.matrix.cols, 1), height / Math.max(this.matrix.rows, 1)];
    const square = Math.min(...fitted);
    // Cells that were stretched keep their proportions.
    const least = (this.camera.scaleX === this.camera.scaleY ? [square, square] : fitted).map((each) => Math.min(each, 8) / 2);
    this.camera.zoom(factor, x, y, least as [number, number]);
  }

  reveal(row: number | null, col: number | null): void {
    this.camera.reveal(row, col, this.plot.width, this.plot.height);
  }

  /** Draw soon, once. */
  refresh(): void {
    if (this.#drawn) return;
    this.#drawn = requestAnimationFrame(() => {
      this.#drawn = 0;
      const ratio = devicePixelRatio || 1;
      const context = this.canvas.getContext("2d")!;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw(context);
    });
  }

  draw(context: CanvasRenderingContext2D, paper = colorsOf(this.canvas)[0]): void {
    const { width, height } = this.plot;
    const [, text, soft, mark] = colorsOf(this.canvas);
    context.fillStyle = paper;
    context.fillRect(0, 0, width + LEFT + EDGE, height + TOP + EDGE);
    context.save();
    context.beginPath();
    context.rect(LEFT - 1, TOP - 1, width + 1 + EDGE, height + 1 + EDGE);
    context.clip();
    context.translate(LEFT, TOP);
    this.#drawTiles(context, soft);
    if (this.#numbered) this.#drawNumbers(context);
    this.#drawMarks(context, mark, text);
    context.restore();
    this.canvas.dataset.state = this.tiles.complete ? "complete" : "drawing";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = FONT(11);
    context.fillStyle = soft;
    for (const [text, y] of AXES) context.fillText(text, INDENT, y, SPAN);
    for (const label of this.labels()) {
      context.save();
      context.translate(label.x, label.y);
      if (label.turned) context.rotate(-Math.PI / 2);
      context.font = FONT(Math.min(12, Math.max(label.turned ? this.camera.scaleX : this.camera.scaleY, READABLE)));
      context.textAlign = label.turned ? "left" : "right";
      context.fillStyle = label.strong ? mark : text;
      context.fillText(clip(context, label.text, label.turned ? TOP - 10 : LEFT - 10), 0, 0);
      context.restore();
    }
  }

  get #numbered(): boolean {
    return Math.min(this.camera.scaleX, this.camera.scaleY * 1.8) >= NUMBERED;
  }

  #levels(): Levels {
    const level = (scale: number, top: number): number => Math.min(Math.max(Math.floor(-Math.log2(scale) + 0.25), 0), top);
    return [level(this.camera.scaleY, this.tiles.top[0]), level(this.camera.scaleX, this.tiles.top[1])];
  }

  #drawTiles(context: CanvasRenderingContext2D, border: string): void {
    const { scaleX, scaleY, x, y } = this.camera;
    const { width, height } = this.plot;
    const { rows, cols } = this.matrix;
    const levels = this.#levels();
    const [down, across] = [TILE * 2 ** levels[0] * scaleY, TILE * 2 ** levels[1] * scaleX];
    const shown = (at: number, room: number, cells: number, level: number, side: number): [number, number] => {
      const count = Math.ceil(cells / (TILE * 2 ** level));
      return [Math.max(Math.floor(-at / side), 0), Math.min(Math.ceil((room - at) / side), count)];
    };
    const downs = shown(y, height, rows, levels[0], down);
    const acrosses = shown(x, width, cols, levels[1], across);
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    context.rect(x, y, cols * scaleX, rows * scaleY);
    context.clip();
    context.fillStyle = context.createPattern(stripes(this.look.theme), "repeat")!;
    context.fillRect(Math.max(x, 0), Math.max(y, 0), width, height);
    for (let i = downs[0]; i < downs[1]; i++)
      for (let j = acrosses[0]; j < acrosses[1]; j++)
        this.tiles.draw(context, levels, i, j, [x + j * across, y + i * down, across, down]);
    context.restore();
    context.strokeStyle = border;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, cols * scaleX + 1, rows * scaleY + 1);
    this.tiles.want(levels, downs, acrosses);
  }

  /** The cells in view: rows and columns, from the first to behind the last. */
  #span(): [number, number, number, number] {
    const { scaleX, scaleY, x, y } = this.camera;
    const { width, height } = this.plot;
    const { rows, cols } = this.matrix;
    return [
      Math.max(Math.floor(-y / scaleY), 0), Math.min(Math.ceil((height - y) / scaleY), rows),
      Math.max(Math.floor(-x / scaleX), 0), Math.min(Math.ceil((width - x) / scaleX), cols),
    ];
  }

  /** Call a function with each cell in view whose weight is written, its place, its colour and its text. */
  #numbers(run: (text: string, x: number, y: number, ink: string) => void): void {
    const { scaleX, scaleY, x, y } = this.camera;
    const [top, bottom, left, right] = this.#span();
    const { signed } = this.matrix;
    const colors = palette(this.look.theme, signed);
    for (let row = top; row < bottom; row++) {
      const facts = this.matrix.facts(row, this.look.bare);
      for (let col = left; col < right; col++) {
        if (this.look.bare && this.matrix.sinks.has(col)) continue;
        const weight = this.matrix.weight(row, col);
        if (!(Math.abs(weight) >= 0.005)) continue;
        const color = ink(colors, shade(along(this.look.scale, weight, facts, signed), signed));
        run(weight.toFixed(2).replace("0.", "."), x + (col + 0.5) * scaleX, y + (row + 0.5) * scaleY, color);
      }
    }
  }

  #drawNumbers(context: CanvasRenderingContext2D): void {
    context.font = FONT(11);
    context.textAlign = "center";
    context.textBaseline = "middle";
    this.#numbers((text, x, y, color) => {
      context.fillStyle = color;
      context.fillText(text, x, y);
    });
  }

  #drawMarks(context: CanvasRenderingContext2D, mark: string, text: string): void {
    const { scaleX, scaleY, x, y } = this.camera;
    const { rows, cols } = this.matrix;
    context.lineWidth = 2;
    if (this.pinned) {
      const { side, at } = this.pinned;
      context.strokeStyle = mark;
      if (side === "query") context.strokeRect(x - 1, y + at * scaleY - 1, cols * scaleX + 2, Math.max(scaleY, 2) + 2);
      else context.strokeRect(x + at * scaleX - 1, y - 1, Math.max(scaleX, 2) + 2, rows * scaleY + 2);
    }
    if (this.hovered) {
      context.lineWidth = 1.5;
      context.strokeStyle = text;
      const [width, height] = [Math.max(scaleX, 4), Math.max(scaleY, 4)];
      const [left, top] = [x + (this.hovered.col + 0.5) * scaleX, y + (this.hovered.row + 0.5) * scaleY];
      context.strokeRect(left - width / 2, top - height / 2, width, height);
      // Lines to the labels, unless they would strike through numbers.
      if (!this.#numbered) {
        context.globalAlpha = 0.35;
        context.beginPath();
        context.moveTo(0, top);
        context.lineTo(left - width / 2, top);
        context.moveTo(left, 0);
        context.lineTo(left, top - height / 2);
        context.stroke();
        context.globalAlpha = 1;
      }
    }
    context.fillStyle = mark;
    for (const at of this.marked.key) context.fillRect(x + (at + 0.5) * scaleX - 2, Math.max(y, 0) - 2, 4, 6);
    for (const at of this.marked.query) context.fillRect(Math.max(x, 0) - 2, y + (at + 0.5) * scaleY - 2, 6, 4);
  }

  /** The tokens that have room, or else every so many of them with their numbers. */
  labels(): Label[] {
    const { scaleX, scaleY, x, y } = this.camera;
    const { width, height } = this.plot;
    const found: Label[] = [];
    const along = (side: Side, from: number, scale: number, room: number, count: number, add: (at: number, text: string) => void): void => {
      const every = scale >= READABLE ? 1 : nice(APART / scale);
      const first = Math.max(Math.ceil((-from / scale - 0.5) / every) * every, 0);
      const last = Math.min(Math.floor((room - from) / scale - 0.5), count - 1);
      for (let at = first; at <= last; at += every) {
        const name = named(side, at);
        add(at, every === 1 || side.times?.[at] || /\d/.test(name) ? name : `${name} ${at}`);
      }
    };
    const isPinned = (side: string, at: number): boolean => this.pinned?.side === side && this.pinned.at === at;
    along(this.queries, y, scaleY, height, this.matrix.rows, (row, text) =>
      found.push({ text, x: LEFT - 6, y: TOP + y + (row + 0.5) * scaleY, turned: false,
        strong: isPinned("query", row) || row === this.hovered?.row || this.marked.query.has(row) }));
    along(this.keys, x, scaleX, width, this.matrix.cols, (col, text) =>
      found.push({ text, x: LEFT + x + (col + 0.5) * scaleX, y: TOP - 6, turned: true,
        strong: isPinned("key", col) || col === this.hovered?.col || this.marked.key.has(col) }));
    return found;
  }

  /** The row and column at a place, each null beside the matrix or on the other side's labels. */
  #at(x: number, y: number): [number | null, number | null] {
    const col = Math.floor((x - LEFT - this.camera.x) / this.camera.scaleX);
    const row = Math.floor((y - TOP - this.camera.y) / this.camera.scaleY);
    const [isRow, isCol] = [y >= TOP && row >= 0 && row < this.matrix.rows, x >= LEFT && col >= 0 && col < this.matrix.cols];
    return [isRow && (isCol || x < LEFT) ? row : null, isCol && (isRow || y < TOP) ? col : null];
  }

  #pointers(): void {
    const down = new Map<number, { x: number; y: number }>();
    let moved = 0;
    const place = (event: MouseEvent): { x: number; y: number } => {
      const box = this.canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    const on = <K extends keyof HTMLElementEventMap>(name: K, run: (event: HTMLElementEventMap[K]) => void): void => {
      this.canvas.addEventListener(name, run as EventListener, { passive: false });
      this.#ends.push(() => this.canvas.removeEventListener(name, run as EventListener));
    };
    on("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      down.set(event.pointerId, place(event));
      moved = 0;
    });
    on("pointermove", (event) => {
      const now = place(event);
      const before = down.get(event.pointerId);
      if (!before) {
        const [row, col] = this.#at(now.x, now.y);
        return this.events.hover(row === null || col === null ? null : { row, col });
      }
      const others = [...down].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const other = others[0][1];
        const distance = (point: { x: number; y: number }): number => Math.hypot(point.x - other.x, point.y - other.y);
        this.zoom(distance(now) / Math.max(distance(before), 1), (now.x + other.x) / 2 - LEFT, (now.y + other.y) / 2 - TOP);
      } else if (moved + Math.hypot(now.x - before.x, now.y - before.y) > 3) {
        this.camera.pan(now.x - before.x, now.y - before.y);
      }
      moved += Math.hypot(now.x - before.x, now.y - before.y);
      down.set(event.pointerId, now);
    });
    on("pointerup", (event) => {
      const now = place(event);
      const [row, col] = this.#at(now.x, now.y);
      if (moved <= 3 && (row !== null || col !== null)) this.events.pick(row, col);
      down.delete(event.pointerId);
    });
    on("pointercancel", (event) => void down.delete(event.pointerId));
    on("pointerleave", () => this.events.hover(null));
    on("dblclick", () => this.fit());
    on("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return this.events.scroll();
      event.preventDefault();
      const { x, y } = place(event);
      this.zoom(2 ** (-event.deltaY / (event.deltaMode ? 8 : 240)), x - LEFT, y - TOP);
    });
  }

  /** The view as a drawing: cells as rectangles where they are few, as an image where they are many. */
  svg(paper: string): string {
    const { width, height } = this.plot;
    const { scaleX, scaleY, x, y } = this.camera;
    const [, text, soft, mark] = colorsOf(this.canvas);
    const [top, bottom, left, right] = this.#span();
    const { signed } = this.matrix;
    const parts: string[] = [];
    if ((bottom - top) * (right - left) <= 6400) {
      const colors = palette(this.look.theme, signed);
      for (let row = top; row < bottom; row++) {
        const facts = this.matrix.facts(row, this.look.bare);
        for (let col = left; col < right; col++) {
          const weight = this.matrix.weight(row, col);
          const hidden = weight !== weight || (this.look.bare && this.matrix.sinks.has(col));
          const fill = hidden ? "url(#striped)" : css(colors, shade(along(this.look.scale, weight, facts, signed), signed));
          const [at, down, across, high] = [x + col * scaleX, y + row * scaleY, scaleX, scaleY].map((each) => each.toFixed(2));
          parts.push(`<rect x="${at}" y="${down}" width="${across}" height="${high}" fill="${fill}"/>`);
        }
      }
    } else {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [width * 2, height * 2];
      const context = canvas.getContext("2d")!;
      context.scale(2, 2);
      this.#drawTiles(context, "transparent");
      parts.push(`<image width="${width}" height="${height}" href="${canvas.toDataURL()}"/>`);
    }
    const frame = (left: number, high: number, wide: number, tall: number, color: string, line: number): string =>
      `<rect x="${left}" y="${high}" width="${wide}" height="${tall}" fill="none" stroke="${color}" stroke-width="${line}"/>`;
    const [wide, tall] = [this.matrix.cols * scaleX, this.matrix.rows * scaleY];
    const frames = [frame(x - 0.5, y - 0.5, wide + 1, tall + 1, soft, 1)];
    if (this.pinned?.side === "query") frames.push(frame(x - 1, y + this.pinned.at * scaleY - 1, wide + 2, Math.max(scaleY, 2) + 2, mark, 2));
    if (this.pinned?.side === "key") frames.push(frame(x + this.pinned.at * scaleX - 1, y - 1, Math.max(scaleX, 2) + 2, tall + 2, mark, 2));
    const labels = this.labels().map((each) => written(each.text, {
      transform: `translate(${each.x.toFixed(1)} ${each.y.toFixed(1)})${each.turned ? " rotate(-90)" : ""}`,
      "text-anchor": each.turned ? "start" : "end", "dominant-baseline": "central", ...(each.strong ? { fill: mark } : {}),
    }));
    if (this.#numbered)
      this.#numbers((number, at, down, fill) => labels.push(written(number, { x: (at + LEFT).toFixed(1), y: (down + TOP).toFixed(1), fill,
        "font-size": "11", "text-anchor": "middle", "dominant-baseline": "central" })));
    for (const [label, at] of AXES)
      labels.push(written(label, { x: String(INDENT), y: String(at), "font-size": "11", "dominant-baseline": "central", textLength: String(SPAN), lengthAdjust: "spacingAndGlyphs" }));
    return (
      `<svg width="${width + LEFT + EDGE}" height="${height + TOP + EDGE}" fill="${text}"><rect width="100%" height="100%" fill="${paper}"/>` +
      `<svg x="${LEFT}" y="${TOP}" width="${width}" height="${height}" shape-rendering="crispEdges">${parts.join("")}</svg>` +
      `<svg x="${LEFT - EDGE}" y="${TOP - EDGE}" width="${width + 2 * EDGE}" height="${height + 2 * EDGE}" viewBox="${-EDGE} ${-EDGE} ${width + 2 * EDGE} ${height + 2 * EDGE}">${frames.join("")}</svg>` +
      `${labels.join("")}</svg>`
    );
  }
}

/** Return the colours of a page around an element: paper, ink, soft ink, marks and lines. */
export function colorsOf(element: Element): string[] {
  const style = getComputedStyle(element);
  return ["--paper", "--ink", "--soft", "--mark", "--line"].map((name) => style.getPropertyValue(name).trim());
}

/** Return an element of text in a drawing. */
export function written(text: string, attributes: Record<string, string>): string {
  const given = Object.entries(attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`);
  return `<text${given.join("")}>${escaped(text)}</text>`;
}

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
}

/** Return a picture of stripes for what has no weight. */
export function stripes(theme: Theme): HTMLCanvasElement {
  const known = striped.get(theme);
  if (known) return known;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 6;
  const context = canvas.getContext("2d")!;
  [context.fillStyle, context.strokeStyle] = MASKED[theme];
  context.fillRect(0, 0, 6, 6);
  context.lineWidth = 1.5;
  context.beginPath();
  for (const at of [-6, 0, 6]) {
    context.moveTo(at - 1, 7);
    context.lineTo(at + 7, -1);
  }
  context.stroke();
  striped.set(theme, canvas);
  return canvas;
}
const striped = new Map<Theme, HTMLCanvasElement>();

/** Return the next of 1, 2, 5, 10, 20 … */
function nice(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least && each >= 1) ?? 10 * power;
}

/** Return a text as far as it has room, found by halving: measuring it letter by letter is quadratic. */
export function clip(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  let [fits, exceeds] = [0, letters.length];
  while (exceeds - fits > 1) {
    const middle = (fits + exceeds) >> 1;
    if (context.measureText(letters.slice(0, middle).join("") + "…").width <= room) fits = middle;
    else exceeds = middle;
  }
  return letters.slice(0, fits).join("") + "…";
}

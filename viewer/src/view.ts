// A matrix on a canvas: tiles, tokens along its sides, and the cell or the row that is pointed at.

import type { Camera } from "./camera";
import { along, css, ink, palette, shade } from "./colors";
import { type Matrix, TILE } from "./matrix";
import { label as tokenLabel } from "./tokens";
import { type Look, Tiles } from "./tiles";

export interface Cell {
  row: number;
  col: number;
}

/** A line of text in a picture, turned by an angle. */
export interface Label {
  text: string;
  x: number;
  y: number;
  turned: boolean;
  strong: boolean;
}

const FONT = (size: number): string => `${size}px system-ui, sans-serif`;
/** Least pixels of a cell whose token is written, and whose weight is. */
const READABLE = 9.5;
const NUMBERED = 34;
const LEFT = 96;
const TOP = 84;

export class View {
  readonly tiles: Tiles;
  hovered: Cell | null = null;
  pinned: number | null = null;
  marked: Set<number> = new Set();
  #drawn = 0;
  #ends: (() => void)[] = [];

  constructor(
    readonly canvas: HTMLCanvasElement,
    readonly camera: Camera,
    readonly matrix: Matrix,
    private readonly queries: string[],
    private readonly keys: string[],
    private look: Look,
    private readonly events: { hover(cell: Cell | null): void; pin(cell: Cell): void },
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

  get plot(): { width: number; height: number } {
    const ratio = devicePixelRatio || 1;
    return { width: Math.max(this.canvas.width / ratio - LEFT, 1), height: Math.max(this.canvas.height / ratio - TOP, 1) };
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
    const least = Math.min(this.plot.width / this.matrix.cols, this.plot.height / this.matrix.rows, 8) / 2;
    this.camera.zoom(factor, x, y, least);
  }

  reveal(row: number, col: number | null): void {
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

  draw(context: CanvasRenderingContext2D): void {
    const { width, height } = this.plot;
    const style = getComputedStyle(this.canvas);
    const [paper, text, soft, mark] = ["--paper", "--ink", "--soft", "--mark"].map((name) => style.getPropertyValue(name));
    context.fillStyle = paper;
    context.fillRect(0, 0, width + LEFT, height + TOP);
    context.save();
    context.beginPath();
    context.rect(LEFT - 1, TOP - 1, width + 1, height + 1);
    context.clip();
    context.translate(LEFT, TOP);
    this.#drawTiles(context, soft);
    if (this.camera.scale >= NUMBERED) this.#drawNumbers(context);
    this.#drawMarks(context, mark, text);
    context.restore();
    this.canvas.dataset.state = this.tiles.complete ? "complete" : "drawing";
    context.font = FONT(12);
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = soft;
    context.fillText("queries ↓", 8, 14);
    context.fillText("keys →", 8, 30);
    context.font = FONT(Math.min(12, Math.max(this.camera.scale, READABLE)));
    for (const label of this.labels()) {
      context.save();
      context.translate(label.x, label.y);
      if (label.turned) context.rotate(-Math.PI / 2);
      context.textAlign = label.turned ? "left" : "right";
      context.fillStyle = label.strong ? mark : text;
      context.fillText(clip(context, label.text, label.turned ? TOP - 10 : LEFT - 10), 0, 0);
      context.restore();
    }
  }

  #level(): number {
    return Math.min(Math.max(Math.floor(-Math.log2(this.camera.scale) + 0.25), 0), this.tiles.top);
  }

  #drawTiles(context: CanvasRenderingContext2D, border: string): void {
    const { scale, x, y } = this.camera;
    const { width, height } = this.plot;
    const level = this.#level();
    const side = TILE * 2 ** level * scale;
    const along = (at: number, room: number, cells: number): [number, number] => {
      const count = Math.ceil(cells / (TILE * 2 ** level));
      return [Math.max(Math.floor(-at / side), 0), Math.min(Math.ceil((room - at) / side), count)];
    };
    const [downs, acrosses] = [along(y, height, this.matrix.rows), along(x, width, this.matrix.cols)];
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    context.rect(x, y, this.matrix.cols * scale, this.matrix.rows * scale);
    context.clip();
    for (let down = downs[0]; down < downs[1]; down++)
      for (let across = acrosses[0]; across < acrosses[1]; across++)
        this.tiles.draw(context, level, down, across, x + across * side, y + down * side, side);
    context.restore();
    context.strokeStyle = border;
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, y - 0.5, this.matrix.cols * scale + 1, this.matrix.rows * scale + 1);
    this.tiles.want(level, downs, acrosses);
  }

  /** The cells in view: rows and columns, from the first to behind the last. */
  #span(): [number, number, number, number] {
    const { scale, x, y } = this.camera;
    const { width, height } = this.plot;
    const { rows, cols } = this.matrix;
    return [
      Math.max(Math.floor(-y / scale), 0), Math.min(Math.ceil((height - y) / scale), rows),
      Math.max(Math.floor(-x / scale), 0), Math.min(Math.ceil((width - x) / scale), cols),
    ];
  }

  #drawNumbers(context: CanvasRenderingContext2D): void {
    const { scale, x, y } = this.camera;
    const [top, bottom, left, right] = this.#span();
    const colors = palette(this.look.theme, this.matrix.signed);
    const largest = this.matrix.rowMax(this.look.bare);
    context.font = FONT(11);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = top; row < bottom; row++)
      for (let col = left; col < right; col++) {
        if (this.look.bare && this.matrix.sinks.has(col)) continue;
        const weight = this.matrix.weight(row, col);
        if (!(Math.abs(weight) >= 0.005)) continue;
        const t = along(this.look.scale, weight, largest[row]);
        context.fillStyle = ink(colors, shade(t, this.matrix.signed));
        context.fillText(weight.toFixed(2).replace("0.", "."), x + (col + 0.5) * scale, y + (row + 0.5) * scale);
      }
  }

  #drawMarks(context: CanvasRenderingContext2D, mark: string, text: string): void {
    const { scale, x, y } = this.camera;
    context.lineWidth = 1.5;
    if (this.pinned !== null) {
      context.strokeStyle = mark;
      context.strokeRect(x - 1, y + this.pinned * scale - 1, this.matrix.cols * scale + 2, Math.max(scale, 2) + 2);
    }
    if (this.hovered) {
      context.strokeStyle = text;
      const side = Math.max(scale, 4);
      const [left, top] = [x + this.hovered.col * scale, y + this.hovered.row * scale];
      context.strokeRect(left - (side - scale) / 2, top - (side - scale) / 2, side, side);
      context.globalAlpha = 0.35;
      context.beginPath();
      context.moveTo(0, top + scale / 2);
      context.lineTo(left, top + scale / 2);
      context.moveTo(left + scale / 2, 0);
      context.lineTo(left + scale / 2, top);
      context.stroke();
      context.globalAlpha = 1;
    }
    if (this.marked.size) {
      context.fillStyle = mark;
      for (const at of this.marked) {
        context.fillRect(x + (at + 0.5) * scale - 2, Math.max(y, 0) - 2, 4, 6);
        if (this.queries === this.keys) context.fillRect(Math.max(x, 0) - 2, y + (at + 0.5) * scale - 2, 6, 4);
      }
    }
  }

  /** The tokens that have room, or else every so many of their indices. */
  labels(): Label[] {
    const { scale, x, y } = this.camera;
    const { width, height } = this.plot;
    const every = scale >= READABLE ? 1 : nice(48 / scale);
    const label = (tokens: string[], at: number): string => (every === 1 ? tokenLabel(tokens[at] ?? `${at}`) : `${at}`);
    const found: Label[] = [];
    const span = (from: number, room: number, count: number): [number, number] => [
      Math.max(Math.ceil((-from / scale - 0.5) / every) * every, 0),
      Math.min(Math.floor((room - from) / scale - 0.5), count - 1),
    ];
    const [top, bottom] = span(y, height, this.matrix.rows);
    for (let row = top; row <= bottom; row += every)
      found.push({
        text: label(this.queries, row), x: LEFT - 6, y: TOP + y + (row + 0.5) * scale, turned: false,
        strong: row === this.pinned || row === this.hovered?.row,
      });
    const [left, right] = span(x, width, this.matrix.cols);
    for (let col = left; col <= right; col += every)
      found.push({
        text: label(this.keys, col), x: LEFT + x + (col + 0.5) * scale, y: TOP - 6, turned: true,
        strong: col === this.hovered?.col,
      });
    return found;
  }

  at(x: number, y: number): Cell | null {
    const col = Math.floor((x - LEFT - this.camera.x) / this.camera.scale);
    const row = Math.floor((y - TOP - this.camera.y) / this.camera.scale);
    if (x < LEFT || y < TOP || row < 0 || col < 0 || row >= this.matrix.rows || col >= this.matrix.cols) return null;
    return { row, col };
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
      if (!before) return this.events.hover(this.at(now.x, now.y));
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
      const cell = this.at(now.x, now.y);
      if (moved <= 3 && cell) this.events.pin(cell);
      down.delete(event.pointerId);
    });
    on("pointercancel", (event) => void down.delete(event.pointerId));
    on("pointerleave", () => this.events.hover(null));
    on("dblclick", () => this.fit());
    on("wheel", (event) => {
      event.preventDefault();
      const { x, y } = place(event);
      this.zoom(2 ** (-event.deltaY / (event.deltaMode ? 8 : 240)), x - LEFT, y - TOP);
    });
  }

  /** The view as a drawing: cells as rectangles where they are few, as an image where they are many. */
  svg(): string {
    const { width, height } = this.plot;
    const { scale, x, y } = this.camera;
    const style = getComputedStyle(this.canvas);
    const [paper, text] = ["--paper", "--ink"].map((name) => style.getPropertyValue(name).trim());
    const [top, bottom, left, right] = this.#span();
    const parts: string[] = [];
    if ((bottom - top) * (right - left) <= 6400) {
      const { signed } = this.matrix;
      const colors = palette(this.look.theme, signed);
      const largest = this.matrix.rowMax(this.look.bare);
      for (let row = top; row < bottom; row++)
        for (let col = left; col < right; col++) {
          const hidden = this.look.bare && this.matrix.sinks.has(col);
          const t = along(this.look.scale, hidden ? 0 : this.matrix.weight(row, col) || 0, largest[row]);
          const fill = css(colors, shade(t, signed));
          const [at, down, side] = [x + col * scale, y + row * scale, scale].map((each) => each.toFixed(2));
          parts.push(`<rect x="${at}" y="${down}" width="${side}" height="${side}" fill="${fill}"/>`);
        }
    } else {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [width * 2, height * 2];
      const context = canvas.getContext("2d")!;
      context.scale(2, 2);
      this.#drawTiles(context, "transparent");
      parts.push(`<image width="${width}" height="${height}" href="${canvas.toDataURL()}"/>`);
    }
    const labels = this.labels().map(
      (each) =>
        `<text transform="translate(${each.x.toFixed(1)} ${each.y.toFixed(1)})${each.turned ? " rotate(-90)" : ""}" ` +
        `text-anchor="${each.turned ? "start" : "end"}" dominant-baseline="central">${escaped(each.text)}</text>`,
    );
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width + LEFT} ${height + TOP}" width="${width + LEFT}" ` +
      `height="${height + TOP}" font-family="system-ui, sans-serif" font-size="12" fill="${text}">` +
      `<rect width="100%" height="100%" fill="${paper}"/><svg x="${LEFT}" y="${TOP}" width="${width}" height="${height}" ` +
      `shape-rendering="crispEdges">${parts.join("")}</svg>${labels.join("")}</svg>`
    );
  }
}

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
}

/** Return the next of 1, 2, 5, 10, 20 … */
function nice(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least && each >= 1) ?? 10 * power;
}

/** Return a text as far as it has room, found by halving: measuring it letter by letter is quadratic. */
function clip(context: CanvasRenderingContext2D, text: string, room: number): string {
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

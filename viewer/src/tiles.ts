// Tiles of a matrix: computed a little in each frame, nearest first, and kept as pictures.

import { along, palette, shade, type Scale, type Theme } from "./colors";
import { type Matrix, TILE } from "./matrix";

/** Milliseconds of a frame in which tiles are computed, and how many are kept. */
const SLICE = 8;
const KEPT = 800;

export interface Look {
  scale: Scale;
  theme: Theme;
  /** Whether sinks are hidden. */
  bare: boolean;
}

interface Wanted {
  key: string;
  level: number;
  down: number;
  across: number;
  distance: number;
}

export class Tiles {
  #values = new Map<string, Float32Array>();
  #pictures = new Map<string, HTMLCanvasElement>();
  #running: { key: string; steps: Generator<void, Float32Array> } | null = null;
  #wanted: Wanted[] = [];
  #scheduled = false;
  readonly top: number;

  constructor(readonly matrix: Matrix, private look: Look, private readonly changed: () => void) {
    this.top = Math.max(0, Math.ceil(Math.log2(Math.max(matrix.rows, matrix.cols) / TILE)));
  }

  setLook(look: Look): void {
    if (look.bare !== this.look.bare) {
      this.#values.clear();
      this.#running = null;
    }
    this.look = look;
    this.#pictures.clear();
  }

  /** Whether everything that was asked for last is there. */
  get complete(): boolean {
    return this.#wanted.length === 0 && this.#running === null;
  }

  /** Ask for tiles of a level; what was asked for before and is not begun is forgotten. */
  want(level: number, downs: [number, number], acrosses: [number, number]): void {
    const middle = [(downs[0] + downs[1] - 1) / 2, (acrosses[0] + acrosses[1] - 1) / 2];
    this.#wanted = [];
    for (let down = downs[0]; down < downs[1]; down++)
      for (let across = acrosses[0]; across < acrosses[1]; across++) {
        const key = `${level}/${down}/${across}`;
        const distance = Math.hypot(down - middle[0], across - middle[1]);
        if (!this.#values.has(key)) this.#wanted.push({ key, level, down, across, distance });
      }
    this.#wanted.sort((a, b) => b.distance - a.distance);
    if (this.#running && !this.#wanted.some((each) => each.key === this.#running!.key)) this.#running = null;
    this.#schedule();
  }

  /** Draw a tile into a square, or the part of a coarser one that covers it; nothing where none is there yet. */
  draw(context: CanvasRenderingContext2D, level: number, down: number, across: number, x: number, y: number, side: number): void {
    for (let up = 0; level + up <= this.top; up++) {
      const picture = this.#picture(level + up, down >> up, across >> up);
      if (!picture) continue;
      const part = TILE / 2 ** up;
      const left = (across - ((across >> up) << up)) * part;
      const top = (down - ((down >> up) << up)) * part;
      context.drawImage(picture, left, top, part, part, x, y, side, side);
      return;
    }
  }

  #picture(level: number, down: number, across: number): HTMLCanvasElement | null {
    const key = `${level}/${down}/${across}`;
    const known = this.#pictures.get(key);
    if (known) return known;
    const values = this.#values.get(key);
    if (!values) return null;
    const { scale, theme, bare } = this.look;
    const signed = this.matrix.signed;
    const colors = new Uint32Array(palette(theme, signed).buffer);
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = TILE;
    const context = canvas.getContext("2d")!;
    const image = context.createImageData(TILE, TILE);
    const pixels = new Uint32Array(image.data.buffer);
    const largest = scale === "row" ? this.matrix.rowMax(bare) : null;
    const size = 1 << level;
    for (let row = 0; row < TILE; row++) {
      let most = 0;
      if (largest) {
        const first = (down * TILE + row) * size;
        for (let i = first; i < Math.min(first + size, largest.length); i++) most = Math.max(most, largest[i]);
      }
      for (let col = 0, at = row * TILE; col < TILE; col++, at++)
        pixels[at] = colors[shade(along(scale, values[at], most), signed)];
    }
    context.putImageData(image, 0, 0);
    this.#pictures.set(key, canvas);
    return canvas;
  }

  #schedule(): void {
    if (this.#scheduled || this.complete) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#work(performance.now() + SLICE);
      this.#schedule();
    });
  }

  #work(until: number): void {
    let finished = false;
    do {
      if (!this.#running) {
        const next = this.#wanted.pop();
        if (!next) break;
        if (this.#values.has(next.key)) continue;
        this.#running = { key: next.key, steps: this.matrix.tile(next.level, next.down, next.across, this.look.bare) };
      }
      const step = this.#running.steps.next();
      if (step.done) {
        this.#keep(this.#running.key, step.value);
        this.#running = null;
        finished = true;
      }
    } while (performance.now() < until);
    if (finished) this.changed();
  }

  #keep(key: string, values: Float32Array): void {
    this.#values.set(key, values);
    while (this.#values.size > KEPT) {
      const oldest = this.#values.keys().next().value!;
      this.#values.delete(oldest);
      this.#pictures.delete(oldest);
    }
  }
}

// Tiles of a matrix: computed a little in each frame, nearest first, and kept as pictures.

import { along, palette, type RowFacts, type Scale, shade, type Theme } from "./colors";
import { type Levels, type Matrix, TILE } from "./matrix";

/** Milliseconds of a frame in which tiles are computed, until the first picture is whole and then; and how many tiles are kept. */
const [OPENING, SLICE] = [40, 8];
const KEPT = 800;

export interface Look {
  scale: Scale;
  theme: Theme;
  /** Whether sinks are hidden. */
  bare: boolean;
}

interface Wanted {
  key: string;
  levels: Levels;
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
  #opened = false;
  /** The levels at which one tile holds the whole matrix. */
  readonly top: Levels;

  constructor(readonly matrix: Matrix, private look: Look, private readonly changed: () => void) {
    this.top = [matrix.rows, matrix.cols].map((each) => Math.max(0, Math.ceil(Math.log2(each / TILE)))) as Levels;
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
  want(levels: Levels, downs: [number, number], acrosses: [number, number]): void {
    const middle = [(downs[0] + downs[1] - 1) / 2, (acrosses[0] + acrosses[1] - 1) / 2];
    this.#wanted = [];
    for (let down = downs[0]; down < downs[1]; down++)
      for (let across = acrosses[0]; across < acrosses[1]; across++) {
        const key = `${levels}/${down}/${across}`;
        const distance = Math.hypot(down - middle[0], across - middle[1]);
        if (!this.#values.has(key)) this.#wanted.push({ key, levels, down, across, distance });
      }
    this.#wanted.sort((a, b) => b.distance - a.distance);
    if (this.#running && !this.#wanted.some((each) => each.key === this.#running!.key)) this.#running = null;
    this.#schedule();
  }

  /** Draw a tile into a rectangle, or the part of a coarser one that covers it; nothing where none is there yet. */
  draw(context: CanvasRenderingContext2D, levels: Levels, down: number, across: number, box: [number, number, number, number]): void {
    const [ups, wides] = [0, 1].map((side) => Math.max(this.top[side] - levels[side], 0));
    for (let up = 0; up <= Math.max(ups, wides); up++) {
      const [high, wide] = [Math.min(up, ups), Math.min(up, wides)];
      const picture = this.#picture([levels[0] + high, levels[1] + wide], down >> high, across >> wide);
      if (!picture) continue;
      const [height, width] = [TILE / 2 ** high, TILE / 2 ** wide];
      const left = (across - ((across >> wide) << wide)) * width;
      const top = (down - ((down >> high) << high)) * height;
      context.drawImage(picture, left, top, width, height, ...box);
      return;
    }
  }

  #picture(levels: Levels, down: number, across: number): HTMLCanvasElement | null {
    const key = `${levels}/${down}/${across}`;
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
    for (let row = 0; row < TILE; row++) {
      const facts = this.#facts((down * TILE + row) << levels[0], 1 << levels[0], bare);
      // What is masked stays transparent.
      for (let col = 0, at = row * TILE; col < TILE; col++, at++)
        if (values[at] === values[at]) pixels[at] = colors[shade(along(scale, values[at], facts, signed), signed)];
    }
    context.putImageData(image, 0, 0);
    this.#pictures.set(key, canvas);
    return canvas;
  }

  /** What the colours of some rows that are drawn as one follow from. */
  #facts(first: number, size: number, bare: boolean): RowFacts {
    const last = Math.min(first + size, this.matrix.rows);
    const found = { count: 0, max: 0, entropy: 0 };
    for (let row = first; row < last; row++) {
      const { count, max, entropy } = this.matrix.facts(row, bare);
      found.max = Math.max(found.max, max);
      found.count += count / (last - first);
      found.entropy += entropy / (last - first);
    }
    return found;
  }

  #schedule(): void {
    if (this.#scheduled || this.complete) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#work(performance.now() + (this.#opened ? SLICE : OPENING));
      this.#opened ||= this.complete;
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
        this.#running = { key: next.key, steps: this.matrix.tile(next.levels, next.down, next.across, this.look.bare) };
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

// The weights of one head, computed on demand: single ones, rows, and tiles at any zoom.

import { DECODED, type Fetch, floats, integers } from "./blocks";
import type { Overviews } from "./overview";
import type { Head, Largest, Layer, Page, Products, Table } from "./schema";

/** Cells along the side of a tile. */
export const TILE = 128;

/** A matrix that can be looked at. */
export interface Matrix {
  readonly rows: number;
  readonly cols: number;
  /** Whether values have signs, as those of a difference do. */
  readonly signed: boolean;
  /** The weight of a key for a query; NaN where it was not kept. */
  weight(row: number, col: number): number;
  /** The weights of a query; not to be written into. */
  row(row: number): Float32Array;
  /** The largest value of each row. */
  rowMax(bare: boolean): Float32Array;
  /** Columns that are left out where sinks are hidden. */
  readonly sinks: Set<number>;
  /** Whether tiles of cells of 2^level × 2^level are there without products. */
  pooled(level: number): boolean;
  /** Largest values of cells 2^level on a side, TILE × TILE, in steps, to keep the page responsive. */
  tile(level: number, down: number, across: number, bare: boolean): Generator<void, Float32Array>;
}

/** Read what a head's weights follow from. */
export async function load(page: Page, head: Head, overviews: Overviews, fetch: Fetch): Promise<Matrix> {
  const layer = page.layers[head.layer];
  const sinks = new Set(page.texts[layer.keys].special);
  const sink = (await overviews.of(head.layer)).sinks[head.head];
  if (sink >= 0) sinks.add(sink);
  const [whole, bare] = await Promise.all(head.rowMax.map(async (block) => floats(await fetch(block), "float32")));
  const pooled = head.pooled && (await loadPooled(layer, head.pooled, fetch, [...sinks].sort((a, b) => a - b)));
  const { weights } = head;
  const rows = await (weights.kind === "table" ? tableRows(weights, layer, fetch)
    : weights.kind === "largest" ? largestRows(weights, fetch) : productRows(weights, fetch));
  return new Weights(layer.shape, weights.kind === "table" && weights.signed, rows, [whole, bare], sinks, pooled);
}

interface Rows {
  weight(row: number, col: number): number;
  /** Write weights of keys from first to before last. */
  fill(row: number, first: number, last: number, into: Float32Array): void;
}

async function tableRows(table: Table, layer: Layer, fetch: Fetch): Promise<Rows> {
  const values = floats(await fetch(table.block), "float16");
  const cols = layer.shape[1];
  return {
    weight: (row, col) => values[row * cols + col],
    fill: (row, first, last, into) => into.set(values.subarray(row * cols + first, row * cols + last)),
  };
}

async function largestRows({ count, weights, keys }: Largest, fetch: Fetch): Promise<Rows> {
  const [values, cols] = await Promise.all([
    fetch(weights).then((bytes) => floats(bytes, "float32")),
    fetch(keys).then(integers),
  ]);
  const weight = (row: number, col: number): number => {
    for (let at = row * count; at < (row + 1) * count; at++) if (cols[at] === col) return values[at];
    return NaN;
  };
  const fill = (row: number, first: number, last: number, into: Float32Array): void => {
    into.fill(0, 0, last - first);
    for (let at = row * count; at < (row + 1) * count; at++)
      if (cols[at] >= first && cols[at] < last) into[cols[at] - first] = values[at];
  };
  return { weight, fill };
}

async function productRows(given: Products, fetch: Fetch): Promise<Rows> {
  const { width, scale, softcap } = given;
  const [query, key, lse, start, stop] = await Promise.all([
    fetch(given.query).then((bytes) => floats(bytes, given.format)),
    fetch(given.key).then((bytes) => floats(bytes, given.format)),
    fetch(given.lse).then((bytes) => floats(bytes, "float32")),
    fetch(given.start).then(integers),
    fetch(given.stop).then(integers),
  ]);
  const weight = (row: number, col: number): number => {
    if (col < start[row] || col >= stop[row]) return 0;
    let score = 0;
    for (let e = 0, q = row * width, k = col * width; e < width; e++) score += query[q + e] * key[k + e];
    score *= scale;
    if (softcap) score = softcap * Math.tanh(score / softcap);
    return Math.exp(score - lse[row]);
  };
  const fill = (row: number, first: number, last: number, into: Float32Array): void => {
    into.fill(0, 0, last - first);
    const end = Math.min(last, stop[row]);
    for (let col = Math.max(first, start[row]); col < end; col++) {
      // Four sums, which the processor can keep apart.
      let a = 0, b = 0, c = 0, d = 0;
      let q = row * width, k = col * width;
      const whole = q + (width & ~3);
      for (; q < whole; q += 4, k += 4) {
        a += query[q] * key[k];
        b += query[q + 1] * key[k + 1];
        c += query[q + 2] * key[k + 2];
        d += query[q + 3] * key[k + 3];
      }
      for (const ending = (row + 1) * width; q < ending; q++, k++) a += query[q] * key[k];
      let score = (a + b + c + d) * scale;
      if (softcap) score = softcap * Math.tanh(score / softcap);
      into[col - first] = Math.exp(score - lse[row]);
    }
  };
  return { weight, fill };
}

/** Largest weights of blocks, without sinks, and those of sinks beside them. */
interface Pooled {
  level: number;
  rows: number;
  cols: number;
  blocks: Uint8Array;
  /** Codes (rows, sinks), and the sinks' columns. */
  sinks: Uint8Array;
  columns: number[];
}

async function loadPooled(
  layer: Layer, pooled: NonNullable<Head["pooled"]>, fetch: Fetch, columns: number[],
): Promise<Pooled> {
  const [blocks, sinks] = await Promise.all([fetch(pooled.blocks), fetch(pooled.sinks)]);
  const [rows, cols] = layer.shape.map((each) => Math.ceil(each / pooled.size));
  return { level: Math.log2(pooled.size), rows, cols, blocks, sinks, columns };
}

class Weights implements Matrix {
  readonly rows: number;
  readonly cols: number;
  #last: { row: number; values: Float32Array } | null = null;

  constructor(
    shape: [number, number],
    readonly signed: boolean,
    private readonly values: Rows,
    private readonly largest: Float32Array[],
    readonly sinks: Set<number>,
    private readonly pooledBlocks: Pooled | null,
  ) {
    [this.rows, this.cols] = shape;
  }

  weight(row: number, col: number): number {
    return this.values.weight(row, col);
  }

  row(row: number): Float32Array {
    if (this.#last?.row !== row) {
      const values = new Float32Array(this.cols);
      this.values.fill(row, 0, this.cols, values);
      this.#last = { row, values };
    }
    return this.#last.values;
  }

  rowMax(bare: boolean): Float32Array {
    return this.largest[bare ? 1 : 0];
  }

  pooled(level: number): boolean {
    return this.pooledBlocks !== null && level >= this.pooledBlocks.level;
  }

  *tile(level: number, down: number, across: number, bare: boolean): Generator<void, Float32Array> {
    const out = new Float32Array(TILE * TILE);
    if (this.pooledBlocks && level >= this.pooledBlocks.level) fillPooled(this.pooledBlocks, level, down, across, bare, out);
    else yield* this.#computed(level, down, across, bare, out);
    return out;
  }

  *#computed(level: number, down: number, across: number, bare: boolean, out: Float32Array): Generator<void> {
    const size = 1 << level;
    const first = across * TILE * size;
    const last = Math.min(first + TILE * size, this.cols);
    const end = Math.min((down + 1) * TILE * size, this.rows);
    const buffer = new Float32Array(Math.max(last - first, 0));
    for (let row = down * TILE * size; row < end; row++) {
      this.values.fill(row, first, last, buffer);
      if (bare) for (const col of this.sinks) if (col >= first && col < last) buffer[col - first] = 0;
      const at = ((row >> level) - down * TILE) * TILE;
      for (let i = 0; i < buffer.length; i++) {
        const cell = at + (i >> level);
        if (Math.abs(buffer[i]) > Math.abs(out[cell])) out[cell] = buffer[i];
      }
      if (row % 8 === 7) yield;
    }
  }
}

function fillPooled(
  pooled: Pooled, level: number, down: number, across: number, bare: boolean, out: Float32Array,
): void {
  const shift = level - pooled.level;
  const size = 1 << shift;
  const top = down * TILE * size;
  const left = across * TILE * size;
  const codes = new Uint8Array(TILE * TILE);
  for (let row = top; row < Math.min(top + TILE * size, pooled.rows); row++) {
    const at = ((row - top) >> shift) * TILE;
    for (let col = left, end = Math.min(left + TILE * size, pooled.cols); col < end; col++) {
      const cell = at + ((col - left) >> shift);
      const code = pooled.blocks[row * pooled.cols + col];
      if (code > codes[cell]) codes[cell] = code;
    }
    if (bare) continue;
    for (let i = 0; i < pooled.columns.length; i++) {
      const col = (pooled.columns[i] >> pooled.level) - left;
      if (col < 0 || col >= TILE * size) continue;
      const code = pooled.sinks[row * pooled.columns.length + i];
      if (code > codes[at + (col >> shift)]) codes[at + (col >> shift)] = code;
    }
  }
  for (let i = 0; i < codes.length; i++) out[i] = DECODED[codes[i]];
}

/** The difference of two matrices of the same shape. */
export class Difference implements Matrix {
  readonly rows: number;
  readonly cols: number;
  readonly signed = true;
  readonly sinks: Set<number>;

  constructor(private readonly first: Matrix, private readonly second: Matrix) {
    [this.rows, this.cols] = [first.rows, first.cols];
    this.sinks = new Set([...first.sinks, ...second.sinks]);
  }

  weight(row: number, col: number): number {
    return this.first.weight(row, col) - this.second.weight(row, col);
  }

  row(row: number): Float32Array {
    const other = this.second.row(row);
    return this.first.row(row).map((value, col) => value - other[col]);
  }

  rowMax(bare: boolean): Float32Array {
    const other = this.second.rowMax(bare);
    return this.first.rowMax(bare).map((value, row) => Math.max(value, other[row]));
  }

  pooled(level: number): boolean {
    return this.first.pooled(level) && this.second.pooled(level);
  }

  /** The difference of the largest weights, where a cell stands for many. */
  *tile(level: number, down: number, across: number, bare: boolean): Generator<void, Float32Array> {
    const tile = (yield* this.first.tile(level, down, across, bare)).slice();
    const other = yield* this.second.tile(level, down, across, bare);
    for (let i = 0; i < tile.length; i++) tile[i] -= other[i];
    return tile;
  }
}

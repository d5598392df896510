// The weights of one head, computed on demand: single ones, rows, columns, and tiles at any zoom.

import { DECODED, type Fetch, floats, integers } from "./blocks";
import type { RowFacts } from "./colors";
import { hiddenKeys, type Overviews } from "./overview";
import type { Facts, Head, Largest, Layer, Page, Products, Table } from "./schema";

/** Cells along the side of a tile. */
export const TILE = 128;
/** Products of a query and a key between two looks at the clock. */
const WORK = 1 << 15;
/** The largest matrix whose words can be merged. */
export const MERGED = 1 << 22;

/** How many cells of a matrix one cell of a tile stands for, as powers of two. */
export type Levels = [down: number, across: number];

/** A matrix that can be looked at. */
export abstract class Matrix {
  /** Products that a weight takes, about. */
  protected cost = 1;
  #last: { row: number; values: Float32Array } | null = null;
  #facts: { max: Float32Array; bare: Float32Array; entropy: Float32Array } | null = null;

  constructor(
    readonly rows: number,
    readonly cols: number,
    /** Whether values have signs, as those of a difference do. */
    readonly signed: boolean,
    /** Columns that are left out where sinks are hidden. */
    readonly sinks: Set<number>,
    /** Whether only the largest weights are known. */
    readonly partial = false,
  ) {}

  /** The weight of a key for a query; NaN where it is masked or was not kept. */
  abstract weight(row: number, col: number): number;
  /** Write weights of keys from first to before last; NaN where they are masked or were not kept. */
  abstract fill(row: number, first: number, last: number, into: Float32Array): void;
  /** How many keys a query sees. */
  abstract count(row: number): number;

  /** Whether what these rows follow from is there; what is not is requested. */
  ready(_first: number, _last: number): boolean {
    return true;
  }

  /** The most rows that are read for a row of a tile: fewer than there are, where all take too long. */
  protected read = Infinity;

  /** The weights of a query, NaN where masked or not kept; not to be written into. */
  row(row: number): Float32Array {
    if (this.#last?.row !== row) {
      const values = new Float32Array(this.cols);
      this.fill(row, 0, this.cols, values);
      this.#last = { row, values };
    }
    return this.#last.values;
  }

  /** The weights that a key is given, NaN where masked or not kept. */
  column(col: number): Float32Array {
    return Float32Array.from({ length: this.rows }, (_, row) => this.weight(row, col));
  }

  /** Each row's largest weight and entropy. */
  rowFacts(): { max: Float32Array; bare: Float32Array; entropy: Float32Array } {
    if (this.#facts) return this.#facts;
    const [max, bare, entropy] = [0, 0, 0].map(() => new Float32Array(this.rows));
    for (let row = 0; row < this.rows; row++) {
      const values = this.row(row);
      for (let col = 0; col < this.cols; col++) {
        const size = Math.abs(values[col]);
        if (size > max[row]) max[row] = size;
        if (size > bare[row] && !this.sinks.has(col)) bare[row] = size;
        if (size) entropy[row] -= size * Math.log(size);
      }
    }
    return (this.#facts = { max, bare, entropy });
  }

  /** What the colours of a row follow from. */
  facts(row: number, bare: boolean): RowFacts {
    const { max, bare: without, entropy } = this.rowFacts();
    return { count: this.count(row), max: (bare ? without : max)[row], entropy: entropy[row] };
  }

  /** Largest values of cells of a tile, TILE × TILE, in steps that keep the page responsive; NaN where all are masked. */
  *tile(levels: Levels, down: number, across: number, bare: boolean): Generator<void, Float32Array> {
    const out = new Float32Array(TILE * TILE).fill(NaN);
    const [ups, wides] = levels;
    const first = (across * TILE) << wides;
    const last = Math.min(first + (TILE << wides), this.cols);
    const end = Math.min(((down + 1) * TILE) << ups, this.rows);
    const buffer = new Float32Array(Math.max(last - first, 0));
    let work = 0;
    const step = Math.max((1 << ups) / this.read, 1);
    for (let row = (down * TILE) << ups; row < end; row += step) {
      while (!this.ready(row, row + 1)) yield;
      this.fill(row, first, last, buffer);
      if (bare) for (const col of this.sinks) if (col >= first && col < last) buffer[col - first] = NaN;
      const at = ((row >> ups) - down * TILE) * TILE;
      for (let i = 0; i < buffer.length; i++) {
        const cell = at + (i >> wides);
        const value = buffer[i];
        if (value === value && !(Math.abs(value) <= Math.abs(out[cell]))) out[cell] = value;
      }
      work += this.cost * buffer.length;
      if (work > WORK) {
        work = 0;
        yield;
      }
    }
    return out;
  }
}

/** Read what a head's weights follow from. */
export async function load(page: Page, head: Head, overviews: Overviews, fetch: Fetch): Promise<Weights> {
  const layer = page.layers[head.layer];
  const { weights } = head;
  const [sinks, facts, rows] = await Promise.all([
    sinksOf(page, head.layer, head.head, overviews),
    loadFacts(layer, head, fetch),
    weights.kind === "table" ? tableRows(weights, layer, fetch)
      : weights.kind === "largest" ? largestRows(weights, layer, fetch) : productRows(weights, layer, fetch),
  ]);
  const pooled = head.pooled && (await loadPooled(layer, head.pooled, fetch, sinks, rows));
  return new Weights(layer.shape, weights.kind === "table" && weights.signed, rows, facts, sinks, pooled, weights.kind === "largest");
}

/** Return the mean of a layer's heads. */
export async function loadMean(page: Page, number: number, heads: Weights[], overviews: Overviews, fetch: Fetch): Promise<Weights> {
  const layer = page.layers[number];
  const [sinks, facts] = await Promise.all([
    sinksOf(page, number, heads.length, overviews), loadFacts(layer, layer.mean!, fetch),
  ]);
  const rows = meanRows(heads);
  const pooled = layer.mean!.pooled && (await loadPooled(layer, layer.mean!.pooled, fetch, sinks, rows));
  return new Weights(layer.shape, heads.some((each) => each.signed), rows, facts, sinks, pooled, false);
}

async function sinksOf(page: Page, layer: number, at: number, overviews: Overviews): Promise<Set<number>> {
  return hiddenKeys(page, layer, (await overviews.of(layer)).sinks[at]);
}

async function loadFacts(layer: Layer, { rows }: Facts, fetch: Fetch): Promise<Float32Array[]> {
  const values = floats(await fetch(rows), "float16");
  return [0, 1, 2].map((at) => values.subarray(at * layer.shape[0], (at + 1) * layer.shape[0]));
}

interface Rows {
  cost: number;
  weight(row: number, col: number): number;
  fill(row: number, first: number, last: number, into: Float32Array): void;
  /** The first key that a query sees, and the one behind the last. */
  span(row: number): [number, number];
  count(row: number): number;
  ready?(first: number, last: number): boolean;
}

/** Rows that share a block of log-sum-exps, where there are several, and that are read for a row of a tile then. */
const CHUNK = 1024;
const READ = 4;
const LARGE = 1 << 28;

async function tableRows(table: Table, { shape: [rows, cols] }: Layer, fetch: Fetch): Promise<Rows> {
  const values = floats(await fetch(table.block), "float16");
  const counts = new Int32Array(rows).fill(cols);
  if (!table.signed)
    for (let at = 0; at < values.length; at++)
      if (values[at] === 0 && 1 / values[at] < 0) {
        values[at] = NaN;
        counts[Math.floor(at / cols)]--;
      }
  return {
    cost: 1,
    weight: (row, col) => values[row * cols + col],
    fill: (row, first, last, into) => into.set(values.subarray(row * cols + first, row * cols + last)),
    span: () => [0, cols],
    count: (row) => counts[row],
  };
}

async function largestRows({ count, weights, keys }: Largest, { shape: [, length] }: Layer, fetch: Fetch): Promise<Rows> {
  const [values, cols] = await Promise.all([
    fetch(weights).then((bytes) => floats(bytes, "float32")),
    fetch(keys).then(integers),
  ]);
  const weight = (row: number, col: number): number => {
    for (let at = row * count; at < (row + 1) * count; at++) if (cols[at] === col) return values[at];
    return NaN;
  };
  const fill = (row: number, first: number, last: number, into: Float32Array): void => {
    into.fill(NaN, 0, last - first);
    for (let at = row * count; at < (row + 1) * count; at++)
      if (cols[at] >= first && cols[at] < last) into[cols[at] - first] = values[at];
  };
  return { cost: 1, weight, fill, span: () => [0, length], count: () => length };
}

async function productRows(given: Products, layer: Layer, fetch: Fetch): Promise<Rows> {
  const { width, scale, softcap } = given;
  const blocks = Array.isArray(given.lse) ? given.lse : null;
  const [query, key, lse, start, stop] = await Promise.all([
    fetch(given.query).then((bytes) => floats(bytes, given.format)),
    fetch(given.key).then((bytes) => floats(bytes, given.format)),
    Array.isArray(given.lse) ? new Float32Array(layer.shape[0]).fill(NaN) : fetch(given.lse).then((bytes) => floats(bytes, "float32")),
    fetch(given.start).then(integers),
    fetch(given.stop).then(integers),
  ]);
  const cols = layer.shape[1];
  const requested = new Set<number>();
  /** Request the log-sum-exps of a row's chunk; return whether they are there. */
  const known = (row: number): boolean => {
    const chunk = Math.floor(row / CHUNK);
    if (blocks && !requested.has(chunk)) {
      requested.add(chunk);
      fetch(blocks[chunk]).then((bytes) => lse.set(floats(bytes, "float32"), chunk * CHUNK), () => requested.delete(chunk));
    }
    return !blocks || lse[row] === lse[row];
  };
  const scored = (row: number, col: number): number => {
    let score = 0;
    for (let e = 0, q = row * width, k = col * width; e < width; e++) score += query[q + e] * key[k + e];
    score *= scale;
    return softcap ? softcap * Math.tanh(score / softcap) : score;
  };
  const weight = (row: number, col: number): number => {
    if (col < start[row] || col >= stop[row]) return NaN;
    if (!known(row)) sum(row);
    return Math.exp(scored(row, col) - lse[row]);
  };
  /** Compute the log-sum-exp of a row that is wanted before its block is there. */
  const sum = (row: number): void => {
    const scores = new Float64Array(Math.max(stop[row] - start[row], 0)).map((_, at) => scored(row, start[row] + at));
    const most = scores.reduce((max, score) => Math.max(max, score), -Infinity);
    lse[row] = most + Math.log(scores.reduce((total, score) => total + Math.exp(score - most), 0));
  };
  const fill = (row: number, first: number, last: number, into: Float32Array): void => {
    into.fill(NaN, 0, last - first);
    const end = Math.min(last, stop[row]);
    if (!known(row)) sum(row);
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
  const span = (row: number): [number, number] => [start[row], Math.min(stop[row], cols)];
  const ready = (first: number, last: number): boolean => {
    let all = true;
    for (let row = first; row < last; row++) all = known(row) && all;
    return all;
  };
  return { cost: width / 8 + 1, weight, fill, span, ready: blocks ? ready : undefined, count: (row) => Math.max(Math.min(stop[row], cols) - start[row], 0) };
}

function meanRows(heads: Weights[]): Rows {
  const [first] = heads;
  let buffer = new Float32Array(0);
  return {
    cost: heads.length * 4,
    weight: (row, col) => heads.reduce((sum, head) => sum + head.weight(row, col), 0) / heads.length,
    fill: (row, from, last, into) => {
      if (buffer.length < last - from) buffer = new Float32Array(last - from);
      heads.forEach((head, at) => {
        const part = at ? buffer : into;
        head.fill(row, from, last, part);
        if (at) for (let i = 0; i < last - from; i++) into[i] += buffer[i];
      });
      for (let i = 0; i < last - from; i++) into[i] /= heads.length;
    },
    span: (row) => first.span(row),
    count: (row) => first.count(row),
    ready: (from, to) => heads.map((head) => head.ready(from, to)).every(Boolean),
  };
}

/** Largest weights of blocks, without sinks, and those of sinks beside them. */
interface Pooled {
  levels: Levels;
  rows: number;
  cols: number;
  blocks: Uint8Array;
  /** Codes (rows, sinks), and the sinks' columns. */
  sinks: Uint8Array;
  columns: number[];
  /** The first and last key that queries of a row of blocks see. */
  spans: Int32Array;
}

async function loadPooled(
  layer: Layer, pooled: NonNullable<Facts["pooled"]>, fetch: Fetch, sinks: Set<number>, given: Rows,
): Promise<Pooled> {
  const [blocks, codes] = await Promise.all([fetch(pooled.blocks), fetch(pooled.sinks)]);
  const levels = pooled.size.map(Math.log2) as Levels;
  const [rows, cols] = layer.shape.map((each, side) => Math.ceil(each / pooled.size[side]));
  const spans = new Int32Array(2 * rows);
  for (let row = 0; row < layer.shape[0]; row++) {
    const [start, stop] = given.span(row);
    const at = 2 * (row >> levels[0]);
    const fresh = row % pooled.size[0] === 0;
    spans[at] = fresh ? start : Math.min(spans[at], start);
    spans[at + 1] = fresh ? stop : Math.max(spans[at + 1], stop);
  }
  return { levels, rows, cols, blocks, sinks: codes, columns: [...sinks].sort((a, b) => a - b), spans };
}

/** A head, or the mean of a layer's. */
export class Weights extends Matrix {
  constructor(
    [rows, cols]: [number, number],
    signed: boolean,
    private readonly values: Rows,
    private readonly given: Float32Array[],
    sinks: Set<number>,
    private readonly pooled: Pooled | null,
    partial: boolean,
  ) {
    super(rows, cols, signed, sinks, partial);
    this.cost = values.cost;
    if (values.ready && pooled && rows * cols > LARGE) this.read = READ;
  }

  override ready(first: number, last: number): boolean {
    return this.values.ready?.(first, last) ?? true;
  }

  weight(row: number, col: number): number {
    return this.values.weight(row, col);
  }

  fill(row: number, first: number, last: number, into: Float32Array): void {
    this.values.fill(row, first, last, into);
  }

  count(row: number): number {
    return this.values.count(row);
  }

  span(row: number): [number, number] {
    return this.values.span(row);
  }

  override rowFacts(): { max: Float32Array; bare: Float32Array; entropy: Float32Array } {
    const [max, bare, entropy] = this.given;
    return { max, bare, entropy };
  }

  override *tile(levels: Levels, down: number, across: number, bare: boolean): Generator<void, Float32Array> {
    const { pooled } = this;
    if (pooled && levels[0] >= pooled.levels[0] && levels[1] >= pooled.levels[1])
      return filled(pooled, this.cols, levels, down, across, bare);
    return yield* super.tile(levels, down, across, bare);
  }
}

function filled(pooled: Pooled, keys: number, levels: Levels, down: number, across: number, bare: boolean): Float32Array {
  const [ups, wides] = [levels[0] - pooled.levels[0], levels[1] - pooled.levels[1]];
  const [top, left] = [(down * TILE) << ups, (across * TILE) << wides];
  const right = Math.min(left + (TILE << wides), pooled.cols);
  const codes = new Int16Array(TILE * TILE).fill(-1);
  for (let row = top; row < Math.min(top + (TILE << ups), pooled.rows); row++) {
    const at = ((row - top) >> ups) * TILE;
    const start = pooled.spans[2 * row] >> pooled.levels[1];
    const stop = Math.ceil(pooled.spans[2 * row + 1] / 2 ** pooled.levels[1]);
    for (let col = Math.max(left, start), end = Math.min(right, stop); col < end; col++) {
      const cell = at + ((col - left) >> wides);
      const code = pooled.blocks[row * pooled.cols + col];
      if (code > codes[cell]) codes[cell] = code;
    }
    if (bare) continue;
    for (let i = 0; i < pooled.columns.length; i++) {
      const col = (pooled.columns[i] >> pooled.levels[1]) - left;
      if (col < 0 || col >= TILE << wides) continue;
      const code = pooled.sinks[row * pooled.columns.length + i];
      if (code > codes[at + (col >> wides)]) codes[at + (col >> wides)] = code;
    }
  }
  if (bare) {
    const counts = new Map<number, number>();
    for (const key of pooled.columns) counts.set(key >> levels[1], (counts.get(key >> levels[1]) ?? 0) + 1);
    // Where all keys of a cell are hidden, it has none.
    for (const [col, count] of counts) {
      const cell = col - across * TILE;
      if (cell < 0 || cell >= TILE || count < Math.min(1 << levels[1], keys - (col << levels[1]))) continue;
      for (let at = cell; at < codes.length; at += TILE) codes[at] = -1;
    }
  }
  return Float32Array.from(codes, (code) => (code < 1 ? NaN : DECODED[code]));
}

/** The difference of two matrices of the same shape. */
export class Difference extends Matrix {
  #buffer = new Float32Array(0);
  #largest: { max: Float32Array; bare: Float32Array; entropy: Float32Array } | null = null;

  constructor(private readonly first: Matrix, private readonly second: Matrix) {
    super(first.rows, first.cols, true, new Set([...first.sinks, ...second.sinks]), first.partial || second.partial);
  }

  weight(row: number, col: number): number {
    return difference(this.first.weight(row, col), this.second.weight(row, col));
  }

  fill(row: number, first: number, last: number, into: Float32Array): void {
    if (this.#buffer.length < last - first) this.#buffer = new Float32Array(last - first);
    this.first.fill(row, first, last, into);
    this.second.fill(row, first, last, this.#buffer);
    for (let i = 0; i < last - first; i++) into[i] = difference(into[i], this.#buffer[i]);
  }

  count(row: number): number {
    return Math.max(this.first.count(row), this.second.count(row));
  }

  override rowFacts(): { max: Float32Array; bare: Float32Array; entropy: Float32Array } {
    return (this.#largest ??= this.#compared());
  }

  #compared(): { max: Float32Array; bare: Float32Array; entropy: Float32Array } {
    const [mine, theirs] = [this.first.rowFacts(), this.second.rowFacts()];
    const larger = (a: Float32Array, b: Float32Array): Float32Array => a.map((value, at) => Math.max(value, b[at]));
    return { max: larger(mine.max, theirs.max), bare: larger(mine.bare, theirs.bare), entropy: mine.entropy };
  }

  /** The difference of the largest weights, where a cell stands for many. */
  override *tile(levels: Levels, down: number, across: number, bare: boolean): Generator<void, Float32Array> {
    const tile = (yield* this.first.tile(levels, down, across, bare)).slice();
    const other = yield* this.second.tile(levels, down, across, bare);
    for (let i = 0; i < tile.length; i++) tile[i] = difference(tile[i], other[i]);
    return tile;
  }
}

/** Return a difference in which what is masked on one side counts as zero. */
function difference(first: number, second: number): number {
  if (first !== first) return second !== second ? NaN : -second;
  return second !== second ? first : first - second;
}

/** The weights between words: averaged over the queries of a word, summed over its keys. */
export class Merged extends Matrix {
  #counts: Int32Array;
  #sums: Float32Array[];

  constructor(matrix: Matrix, rows: [number, number][] | null, cols: [number, number][] | null) {
    const downs = rows ?? Array.from({ length: matrix.rows }, (_, at): [number, number] => [at, at + 1]);
    const acrosses = cols ?? Array.from({ length: matrix.cols }, (_, at): [number, number] => [at, at + 1]);
    const sinks = acrosses.flatMap(([first, last], at) => {
      for (let i = first; i < last; i++) if (!matrix.sinks.has(i)) return [];
      return [at];
    });
    super(downs.length, acrosses.length, matrix.signed, new Set(sinks), matrix.partial);
    const buffer = new Float32Array(matrix.cols);
    this.#counts = new Int32Array(downs.length);
    this.#sums = downs.map(([first, last], word) => {
      const sums = new Float32Array(acrosses.length).fill(NaN);
      for (let row = first; row < last; row++) {
        matrix.fill(row, 0, matrix.cols, buffer);
        acrosses.forEach(([from, to], at) => {
          for (let col = from; col < to; col++) {
            if (buffer[col] !== buffer[col]) continue;
            sums[at] = (sums[at] || 0) + buffer[col] / (last - first);
          }
        });
      }
      this.#counts[word] = sums.reduce((count, value) => count + Number(value === value), 0);
      return sums;
    });
  }

  weight(row: number, col: number): number {
    return this.#sums[row][col];
  }

  fill(row: number, first: number, last: number, into: Float32Array): void {
    into.set(this.#sums[row].subarray(first, last));
  }

  count(row: number): number {
    return this.#counts[row];
  }
}

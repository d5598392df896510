// What the grid shows of each head, and how layers and heads are named and arranged.

import { DECODED, type Fetch, floats, integers } from "./blocks";
import type { RowFacts } from "./colors";
import type { Layer, Page, Summary } from "./schema";

/** A layer's heads, and their mean as the last of them. */
export interface Overview {
  /** The mean entropy of each head's rows, in nats. */
  entropy: Float32Array;
  /** The share of all attention that one key receives at most, and that within one position of the query's own. */
  received: Float32Array;
  diagonal: Float32Array;
  /** The mean weight of a query on sinks and special tokens. */
  hidden: Float32Array;
  /** The key that takes most of the attention of most queries, of each head; −1 where there is none. */
  sinks: Int32Array;
  /** The first key that queries of each row of a thumbnail see, the one behind the last, and their mean number. */
  starts: Int32Array;
  stops: Int32Array;
  counts: Int32Array;
  /** How evenly the rows of thumbnails are spread, in 255ths. */
  spread: Uint8Array;
  /** Codes of the thumbnails, one behind the other. */
  thumbnails: Uint8Array;
  /** For each head, the columns of its thumbnail that have sinks or special tokens, and their codes without these. */
  bare: { cols: number[]; codes: Uint8Array }[];
}

/** Overviews of a page's layers, each of which is requested once. */
export class Overviews {
  #known = new Map<number, Promise<Overview>>();

  constructor(private readonly page: Page, private readonly fetch: Fetch) {}

  of(layer: number): Promise<Overview> {
    let found = this.#known.get(layer);
    if (!found) {
      found = this.#read(layer);
      this.#known.set(layer, found);
      found.catch(() => this.#known.delete(layer));
    }
    return found;
  }

  async #read(number: number): Promise<Overview> {
    const layer = this.page.layers[number];
    const bytes = await this.fetch(layer.overview);
    const heads = this.page.heads.filter((each) => each.layer === number).length + (layer.mean ? 1 : 0);
    const [rows] = layer.thumbnail;
    let at = 0;
    const next = (size: number): Uint8Array => bytes.slice(at, (at += size));
    const [entropy, received, diagonal, hidden] = [0, 0, 0, 0].map(() => floats(next(4 * heads), "float32"));
    const sinks = integers(next(4 * heads));
    const [starts, stops, counts] = [0, 0, 0].map(() => integers(next(4 * rows)));
    const [spread, thumbnails] = [next(heads * rows), next(heads * rows * layer.thumbnail[1])];
    const bare = Array.from(sinks, (sink) => {
      const keys = [...hiddenKeys(this.page, number, sink)];
      const cols = [...new Set(keys.map((key) => Math.floor(key / layer.block[1])))].sort((a, b) => a - b);
      // Where each column is one key, nothing is left of it.
      return { cols, codes: layer.block[1] > 1 ? next(rows * cols.length) : new Uint8Array(rows * cols.length) };
    });
    return { entropy, received, diagonal, hidden, sinks, starts, stops, counts, spread, thumbnails, bare };
  }
}

/** Return the keys that "Hide sinks" hides in a head with this sink, −1 for none. */
export function hiddenKeys(page: Page, layer: number, sink: number): Set<number> {
  const keys = new Set(page.texts[page.layers[layer].keys].special);
  if (sink >= 0) keys.add(sink);
  return keys;
}

/** Return a head's entropy next to the highest that it can have: both are means of its rows. */
export function spread({ entropy, counts }: Overview, at: number): string {
  if (!Number.isFinite(entropy[at]) || !counts.length) return "";
  const most = counts.reduce((sum, count) => sum + Math.log(Math.max(count, 1)), 0) / counts.length;
  return `entropy ${entropy[at].toFixed(2)} of at most ${most.toFixed(2)} nats (mean of rows)`;
}

/** Whether a matrix is of all layers together. */
export function isStacked(layer: Layer): boolean {
  return layer.kind === "rollout" || layer.kind === "flow";
}

/** Return the codes of a head's thumbnail, and what colours of its rows follow from. */
export function thumbnail(layer: Layer, overview: Overview, head: number, bare: boolean): { codes: Uint8Array; facts: RowFacts[] } {
  const [rows, cols] = layer.thumbnail;
  const codes = overview.thumbnails.slice(head * rows * cols, (head + 1) * rows * cols);
  const without = overview.bare[head];
  if (bare)
    without.cols.forEach((col, at) => {
      for (let row = 0; row < rows; row++) codes[row * cols + col] = without.codes[row * without.cols.length + at];
    });
  const facts = Array.from({ length: rows }, (_, row) => {
    let most = 0;
    for (let at = row * cols; at < (row + 1) * cols; at++) most = Math.max(most, codes[at]);
    const count = overview.counts[row];
    return { count, max: DECODED[most], entropy: (overview.spread[head * rows + row] / 255) * Math.log(Math.max(count, 2)) };
  });
  return { codes, facts };
}

/** A head, or the mean of a layer's heads, in the order of the grid: heads first, in the page's order. */
export interface Item {
  layer: number;
  /** Its number among the layer's heads; null for their mean. */
  head: number | null;
  /** Its place in the layer's overview. */
  at: number;
  title: string;
  /** A label of a few letters. */
  short: string;
  summary: Summary | null;
}

export interface Section {
  title: string;
  layers: number[];
}

/** What a page shows, with its names. */
export interface Contents {
  items: Item[];
  sections(run: number): Section[];
  /** What a layer is called in its section. */
  layerName(layer: number): string;
  ofLayer(layer: number): number[];
}

const KINDS: [string, string][] = [
  ["cross", "Cross-attention: output looks at input"],
  ["decoder", "Decoder: output looks at output"],
  ["encoder", "Encoder: input looks at input"],
];

/** The kind of a layer as Python's labels have it: names decide where one of them says "decoder", else the text read. */
function section(page: Page, layer: Layer): string {
  const own = page.layers.filter((each) => each.kind === "self");
  if (layer.kind !== "self" || !page.layers.some((each) => each.kind === "cross")) return layer.kind;
  const named = own.some((each) => /decoder/i.test(each.name));
  return (named ? /decoder/i.test(layer.name) : layer.queries === crossed(page)) ? "decoder" : "encoder";
}

function crossed(page: Page): number {
  return page.layers.find((each) => each.kind === "cross")!.queries;
}

export function contents(page: Page): Contents {
  const kinds = page.layers.map((each) => section(page, each));
  const names = page.layers.map((each, at) => {
    if (each.kind === "picture") return each.name;
    if (isStacked(each)) return each.kind;
    const mine = page.layers.filter((other, i) => other.run === each.run && kinds[i] === kinds[at]);
    const own = (of: Layer): string | undefined => /(?:^|\.)(\d+)(?=\.|$)/.exec(of.name)?.[1];
    const distinct = new Set(mine.map(own)).size === mine.length && mine.every((other) => own(other) !== undefined);
    return `layer ${distinct ? own(each) : mine.indexOf(each)}`;
  });
  const named = new Set(page.layers.flatMap((each, at) => (each.kind === "picture" || isStacked(each) ? [] : [kinds[at]]))).size > 1;
  const items: Item[] = page.heads.map(({ layer, head, summary }) => {
    const of = page.layers[layer];
    const alone = of.kind === "picture" || isStacked(of);
    const title = alone ? `${isStacked(of) ? which(layer) : ""}${names[layer]}` : `${title_(layer)}, head ${head}`;
    const short = alone ? names[layer] : `${kind_(layer)}${names[layer].replace("layer ", "")}·${head}`;
    return { layer, head, at: head, title, short, summary: summary ?? null };
  });
  function which(layer: number): string {
    const { record, run } = page.layers[layer];
    const one = page.runs.filter((each) => each.record === record).length === 1;
    const { sequence, name } = page.runs[run];
    return (page.records.length > 1 ? `${page.records[record]}: ` : "") + (one ? "" : `sequence ${sequence}${name && `, ${name}`}, `);
  }
  /** Layers of several kinds have the same numbers. */
  function kind_(layer: number): string {
    return named ? `${kinds[layer]} ` : "";
  }
  function title_(layer: number): string {
    const kind = named ? `${kinds[layer]}${kinds[layer] === "encoder" || kinds[layer] === "decoder" ? "" : "-attention"}, ` : "";
    return which(layer) + kind + names[layer];
  }
  page.layers.forEach((each, layer) => {
    if (!each.mean) return;
    const heads = page.heads.filter((head) => head.layer === layer).length;
    items.push({ layer, head: null, at: heads, title: `${title_(layer)}, mean of ${heads} heads`,
      short: `${kind_(layer)}${names[layer].replace("layer ", "")}·mean`, summary: null });
  });
  const byLayer = new Map<number, number[]>();
  items.forEach((item, at) => {
    const others = byLayer.get(item.layer) ?? [];
    byLayer.set(item.layer, item.head === null ? [at, ...others] : [...others, at]);
  });
  return {
    items,
    layerName: (layer) => names[layer],
    ofLayer: (layer) => byLayer.get(layer)!,
    sections(run) {
      const found = new Map<string, number[]>();
      page.layers.forEach((each, at) => {
        if (each.run !== run && each.kind !== "picture") return;
        const kind = isStacked(each) ? "stacked" : kinds[at];
        found.set(kind, [...(found.get(kind) ?? []), at]);
      });
      const rank = (kind: string): number =>
        kind === "stacked" ? 99 : KINDS.findIndex(([name]) => name === kind) + 1 || 50;
      return [...found].sort(([a], [b]) => rank(a) - rank(b)).map(([kind, layers]) => ({
        title: kind === "picture" ? "" : kind === "self" ? (found.size > 1 ? "Self-attention" : "") :
          kind === "stacked" ? "All layers together" :
          KINDS.find(([name]) => name === kind)?.[1] ?? kind, layers,
      }));
    },
  };
}

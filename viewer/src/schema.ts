// What a page is given: src/regard/inspect/page_data.py writes it.

/** A sequence of tokens, and the image whose patches some of them are. */
export interface Text {
  tokens: string[];
  /** Indices of special tokens, such as [CLS]. */
  special: number[];
  image: { source: string; rows: number; cols: number; first: number } | null;
}

/** A layer, or a picture of its own: what its heads have in common. */
export interface Layer {
  record: number;
  /** Its place in the model. */
  number: number;
  /** Its name in the model, or a picture's title. */
  name: string;
  kind: "self" | "cross" | "picture";
  /** Numbers of the texts that queries and keys are of. */
  queries: number;
  keys: number;
  shape: [number, number];
  /** Block of what is known of its heads: entropies (float32), sinks (int32, −1 for none), thumbnails (codes). */
  overview: number;
  /** Rows and columns of a thumbnail. */
  thumbnail: [number, number];
}

/** One head of a layer: the numbers of its blocks. */
export interface Head {
  layer: number;
  /** Its number among those of the layer. */
  head: number;
  /** Blocks of the largest weight of each row (float32), among all keys and among those that are no sinks. */
  rowMax: [number, number];
  weights: Products | Table | Largest;
  /** The largest weights of square blocks of cells, where the matrix is large, or all that there is from afar. */
  pooled: { size: number; blocks: number; sinks: number } | null;
}

/** Weights exp(score − lse), computed on demand. */
export interface Products {
  kind: "products";
  query: number;
  key: number;
  lse: number;
  /** First key that a query sees, and the one behind the last (int32). */
  start: number;
  stop: number;
  width: number;
  format: "float16" | "float32";
  scale: number;
  softcap: number | null;
}

/** Weights that have been written out, in float16; those of a difference have signs. */
export interface Table {
  kind: "table";
  signed: boolean;
  block: number;
}

/** The largest weights of each query and their keys (float32 and int32, −1 for none), where no more was kept. */
export interface Largest {
  kind: "largest";
  count: number;
  weights: number;
  keys: number;
}

export interface Page {
  version: 1;
  title: string;
  note: string;
  records: string[];
  texts: Text[];
  layers: Layer[];
  heads: Head[];
  /** Where blocks are: in the page, or at an address below it. */
  blocks: "inside" | "served";
}

// The page's data: src/regard/inspect/_view/page.py writes it.

/** A rectangle of an image, in its pixels, that a token stands for. */
export interface Place {
  image: number;
  x: number;
  y: number;
  width: number;
  height: number;
  /** Which size of patches of its image it has, where tiles lie on an overview: 0 by default. */
  grain?: number;
  /** The frame of a video, and its time. */
  frame?: number;
  seconds?: number;
}

export interface Picture {
  name: string;
  width: number;
  height: number;
  /** A data: address. */
  data: string;
}

/** A sequence of tokens, and the images or the sound that some of them stand for. */
export interface Text {
  tokens: string[];
  /** Tokens without their tokenizer's marks, if it has any. */
  labels?: string[];
  /** Words: their first token and the one behind the last, and what they read. */
  words?: [number, number][];
  wordTexts?: string[];
  /** Indices of special tokens, such as [CLS]. */
  special: number[];
  /** Images, and each token's place in them. */
  images?: Picture[];
  places?: (Place | null)[];
  /** When each token begins and ends in a recording, in seconds. */
  seconds?: ([number, number] | null)[];
}

/** One sequence of one run of a record. */
export interface Run {
  record: number;
  sequence: number;
  run: number;
  name: string;
}

/** What a head does, in words; where a good part of the rest of its weight goes. */
export interface Summary {
  label: string;
  score: number;
  text: string;
  second?: [label: string, score: number];
}

/** A layer in one run, or a picture of its own: what its heads have in common. */
export interface Layer {
  record: number;
  run: number;
  /** Its place in the model. */
  number: number;
  /** Its name in the model, or a picture's title. */
  name: string;
  kind: string;
  /** Numbers of the texts of queries and keys. */
  queries: number;
  keys: number;
  shape: [number, number];
  /** Block that the grid needs: see overview.ts. */
  overview: number;
  /** Rows and columns of a thumbnail, and how many of the matrix's each of them stands for. */
  thumbnail: [number, number];
  block: [number, number];
  /** The mean over heads, whose weights follow from theirs. */
  mean?: Facts | null;
}

export interface Facts {
  /** Block of each row's largest weight, the same without sinks, and its entropy (float16). */
  rows: number;
  /** The largest weights of blocks of cells, down and across, if the matrix is large or only these were recorded. */
  pooled: { size: [number, number]; blocks: number; sinks: number } | null;
}

/** One head of a layer: the numbers of its blocks. */
export interface Head extends Facts {
  layer: number;
  /** Its number among those of the layer. */
  head: number;
  weights: Products | Table | Largest;
  summary?: Summary;
}

/** Weights exp(score − lse), computed on demand. */
export interface Products {
  kind: "products";
  query: number;
  key: number;
  /** One block, or one for each 1,024 queries where computing all takes too long. */
  lse: number | number[];
  /** First key that a query sees, and the one behind the last (int32). */
  start: number;
  stop: number;
  width: number;
  format: "float16" | "float32";
  scale: number;
  softcap: number | null;
}

/** Weights that have been written out, in float16, −0 where masked; those of a difference have signs. */
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
  version: 2;
  title: string;
  note: string;
  records: string[];
  /** The class of each record's model, if it is known. */
  models: string[];
  runs: Run[];
  texts: Text[];
  layers: Layer[];
  heads: Head[];
  /** Where blocks are: in the page, or at an address below it. */
  blocks: "inside" | "served";
  /** Whether the server answers what the model says without a head. */
  without?: boolean;
}

/** What a model answers with and without a head: an answer and its probability, the most probable first. */
export interface Effect {
  before: [string, number][];
  after: [string, number][];
  change: number;
  text: string;
}

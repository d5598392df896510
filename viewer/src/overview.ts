// An overview of a layer's heads.

import { type Fetch, floats, integers } from "./blocks";
import type { Page } from "./schema";

export interface Overview {
  /** The mean entropy of each head's rows, in nats. */
  entropy: Float32Array;
  /** The key that takes most of the attention of most queries, of each head; −1 where there is none. */
  sinks: Int32Array;
  /** Codes of the heads' thumbnails, one behind the other. */
  thumbnails: Uint8Array;
}

/** Overviews of a page's layers, each of which is asked for once. */
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

  async #read(layer: number): Promise<Overview> {
    const bytes = await this.fetch(this.page.layers[layer].overview);
    const heads = this.page.heads.filter((each) => each.layer === layer).length;
    return {
      entropy: floats(bytes.slice(0, 4 * heads), "float32"),
      sinks: integers(bytes.slice(4 * heads, 8 * heads)),
      thumbnails: bytes.subarray(8 * heads),
    };
  }
}

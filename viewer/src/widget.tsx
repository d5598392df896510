// The page as a widget of a notebook (anywidget), whose blocks come with its model.

import { render } from "preact";
import { App } from "./app";
import type { Page } from "./schema";

interface Model {
  get(name: "page"): Page;
  get(name: "blocks"): DataView[];
}

export default {
  render({ model, el }: { model: Model; el: HTMLElement }): () => void {
    const blocks = model.get("blocks");
    const fetch = async (number: number): Promise<Uint8Array> => {
      const { buffer, byteOffset, byteLength } = blocks[number];
      return new Uint8Array(buffer, byteOffset, byteLength);
    };
    el.classList.add("regard-widget");
    render(<App page={model.get("page")} fetch={fetch} />, el);
    return () => render(null, el);
  },
};

// The page as a widget of a notebook (anywidget), which asks its Python half for the blocks that it needs.

import { render } from "preact";
import { none } from "./address";
import { App } from "./app";
import type { Page } from "./schema";

interface Model {
  get(name: "page"): Page;
  send(message: { block: number }): void;
  on(event: "msg:custom", listener: (message: { block: number }, buffers: DataView[]) => void): void;
  off(event: "msg:custom", listener: (message: { block: number }, buffers: DataView[]) => void): void;
}

export default {
  render({ model, el }: { model: Model; el: HTMLElement }): () => void {
    const waiting = new Map<number, ((bytes: Uint8Array) => void)[]>();
    const listener = (message: { block: number }, [buffer]: DataView[]): void => {
      const bytes = new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
      for (const resolve of waiting.get(message.block) ?? []) resolve(bytes);
      waiting.delete(message.block);
    };
    model.on("msg:custom", listener);
    const fetch = (block: number): Promise<Uint8Array> =>
      new Promise((resolve) => {
        const others = waiting.get(block);
        if (others) others.push(resolve);
        else {
          waiting.set(block, [resolve]);
          model.send({ block });
        }
      });
    el.classList.add("regard-widget");
    // JupyterLab's shortcuts of single letters would insert and delete cells; it looks at what has the focus.
    el.addEventListener("focusin", ({ target }) => void ((target as HTMLElement).dataset.lmSuppressShortcuts = "true"));
    render(<App page={model.get("page")} fetch={fetch} address={none} ask={null} />, el);
    return () => {
      model.off("msg:custom", listener);
      render(null, el);
    };
  },
};

// All heads as small pictures, to choose from.

import { useEffect, useRef, useState } from "preact/hooks";
import { DECODED } from "./blocks";
import { along, palette, shade, type Theme } from "./colors";
import type { Overview } from "./overview";
import type { Head, Page } from "./schema";

interface Props {
  page: Page;
  /** What is known of each layer, as far as it has come. */
  overviews: (Overview | null)[];
  theme: Theme;
  chosen: number;
  compared: number | null;
  onChoose(head: number): void;
  onCompare(head: number | null): void;
}

/** What a head is called. */
export function headTitle(page: Page, head: Head): string {
  const layer = page.layers[head.layer];
  const record = page.records.length > 1 ? `${page.records[layer.record]}: ` : "";
  return record + (layer.kind === "picture" ? layer.name : `layer ${layer.number}, head ${head.head}`);
}

export function Heads({ page, overviews, theme, chosen, compared, onChoose, onCompare }: Props) {
  const [order, setOrder] = useState<"entropy" | "layer">("layer");
  const entropy = (number: number): number => {
    const { layer, head } = page.heads[number];
    return overviews[layer]?.entropy[head] ?? Infinity;
  };
  const sorted = page.heads.map((_, number) => number);
  if (order === "entropy") sorted.sort((a, b) => entropy(a) - entropy(b) || a - b);
  const choose = (number: number) => (event: MouseEvent) =>
    event.shiftKey ? onCompare(number === chosen ? null : number) : onChoose(number);
  return (
    <aside class="heads">
      {page.heads.length > 1 && (
        <label>
          Order{" "}
          <select aria-label="Order of heads" value={order} onChange={(event) => setOrder(event.currentTarget.value as "entropy")}>
            <option value="layer">by layer</option>
            <option value="entropy">lowest entropy first</option>
          </select>
        </label>
      )}
      <div class={page.layers[0].kind === "picture" ? "list pictures" : "list"}>
        {sorted.map((number) => {
          const head = page.heads[number];
          const layer = page.layers[head.layer];
          const spread = Number.isFinite(entropy(number)) ? `; entropy ${entropy(number).toFixed(2)}` : "";
          const title = `${headTitle(page, head)}${layer.kind === "cross" ? ", cross" : ""}${spread}`;
          const kind = number === chosen ? "thumbnail chosen" : number === compared ? "thumbnail compared" : "thumbnail";
          return (
            <button type="button" key={number} class={kind} title={`${title} (shift-click to compare)`} aria-label={title}
              aria-pressed={number === chosen} data-head={number} onClick={choose(number)}>
              <Thumbnail size={layer.thumbnail} head={head.head} overview={overviews[head.layer]} theme={theme} />
              <span>{layer.kind === "picture" ? layer.name : `${layer.number}·${head.head}`}</span>
            </button>
          );
        })}
      </div>
    </aside>
  );
}

interface ThumbnailProps {
  size: [number, number];
  head: number;
  overview: Overview | null;
  theme: Theme;
}

function Thumbnail({ size, head, overview, theme }: ThumbnailProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [rows, cols] = size;
  useEffect(() => {
    if (!overview || !rows || !cols) return;
    const codes = overview.thumbnails.subarray(head * rows * cols, (head + 1) * rows * cols);
    const colors = new Uint32Array(palette(theme, false).buffer);
    const context = canvas.current!.getContext("2d")!;
    const image = context.createImageData(cols, rows);
    const pixels = new Uint32Array(image.data.buffer);
    codes.forEach((code, at) => (pixels[at] = colors[shade(along("log", DECODED[code], 1), false)]));
    context.putImageData(image, 0, 0);
  }, [rows, cols, head, overview, theme]);
  return <canvas ref={canvas} width={cols} height={rows} aria-hidden="true" />;
}

// All heads as small pictures: a row for each layer, a column for each head.

import { useEffect, useRef, useState } from "preact/hooks";
import { ARROWS, nearest } from "./arrows";
import { DECODED } from "./blocks";
import { along, palette, type Scale, shade, type Theme } from "./colors";
import { type Contents, isStacked, type Item, type Overview, type Section, spread, thumbnail } from "./overview";
import type { Layer, Page } from "./schema";

export type Order = "layer" | "entropy" | "offDiagonal" | "sink" | "like" | "label";
/** The name of each order, and a sentence about its numbers. */
export const ORDERS: Record<Order, [string, string]> = {
  layer: ["by layer", ""],
  entropy: ["sharpest first", "Entropy says how evenly a query spreads its weight: 0 nats if all of it is on one key; more nats mean a more even spread."],
  offDiagonal: ["furthest from the diagonal first", "The share of weight on keys that are more than one place away from the query."],
  sink: ["largest share on one key first", "A sink is a key that takes much of the weight of most queries, often the first token."],
  like: ["most like the chosen head first", "The correlation r of two pictures: 1 if they are alike, 0 if they have nothing in common."],
  label: ["by what heads do", "What a number means depends on the label: point at a head to read it."],
};

/** What the heads of a label do. */
const GROUPS: Record<string, string> = {
  self: "Self: to the token itself",
  previous: "Previous: to the token before",
  next: "Next: to the token after",
  first: "First: to the first token, often a sink",
  separator: "Separator: to special tokens and punctuation",
  duplicate: "Duplicate: to other occurrences of the token",
  induction: "Induction: to what came after an earlier occurrence of the token",
  positional: "Positional: to one distance from the token",
  uniform: "Uniform: evenly to all tokens",
  "": "No label: none of the definitions fits",
};

interface Props {
  page: Page;
  contents: Contents;
  run: number;
  /** What is known of each layer, as far as it has come. */
  overviews: (Overview | null)[];
  scale: Scale;
  theme: Theme;
  /** Whether sinks are hidden. */
  bare: boolean;
  order: Order;
  chosen: number;
  compared: number | null;
  /** Whether the chosen head was opened. */
  visited: boolean;
  onChoose(item: number): void;
  onCompare(item: number | null): void;
}

/** Return the number that heads are sorted by, and what it says; lower comes first. */
function score(order: Order, page: Page, item: Item, overview: Overview | null, chosen: Item, other: Overview | null): [number, string] {
  if (!overview) return [Infinity, ""];
  const { at } = item;
  if (order === "offDiagonal") return [overview.diagonal[at], `${(1 - overview.diagonal[at]).toFixed(2)} away`];
  if (order === "sink") return [-overview.received[at], `${overview.received[at].toFixed(2)} on one`];
  if (order === "like" && other) {
    const likeness = correlation(page, item, overview, chosen, other);
    return [-likeness, likeness > -1 ? `r ${likeness.toFixed(2)}` : "other size"];
  }
  return [overview.entropy[at], `${overview.entropy[at].toFixed(2)} nats`];
}

/** How alike two thumbnails are: the correlation of their codes, which are logarithms of weights. */
function correlation(page: Page, item: Item, overview: Overview, chosen: Item, other: Overview): number {
  const [first, second] = [page.layers[item.layer], page.layers[chosen.layer]];
  if (String(first.thumbnail) !== String(second.thumbnail) || String(first.shape) !== String(second.shape)) return -2;
  const [a, b] = [thumbnail(first, overview, item.at, false).codes, thumbnail(second, other, chosen.at, false).codes];
  const mean = (codes: Uint8Array): number => codes.reduce((sum, code) => sum + code, 0) / codes.length;
  const [meanA, meanB] = [mean(a), mean(b)];
  let [both, ofA, ofB] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    both += (a[i] - meanA) * (b[i] - meanB);
    ofA += (a[i] - meanA) ** 2;
    ofB += (b[i] - meanB) ** 2;
  }
  return ofA && ofB ? both / Math.sqrt(ofA * ofB) : 0;
}

/** Pixels that a thumbnail is wide: at least, at most, and of the columns and rows around them; and of the text about all layers together. */
const [SMALLEST, LARGEST, HEADING, ABOVE, GAP, ABOUT] = [22, 132, 92, 62, 28, 240];
/** Pixels of a label below a thumbnail, and of a second one; of the least thumbnail with a label, and with its number, too. */
const [LABEL, SECOND, LABELLED, SCORED] = [14, 12, 46, 66];
/** The widest grid that scrolls sideways before it leaves out labels. */
const SLIM = 560;

export function Grid(props: Props) {
  const { page, contents, run, overviews, order, chosen, compared } = props;
  const place = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState<[number, number]>([1000, 500]);
  useEffect(() => {
    const observer = new ResizeObserver(([{ contentRect: { width, height } }]) => setRoom([width, height]));
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  const sections = contents.sections(run);
  const shown = sections.flatMap((each) => each.layers);
  const ready = shown.every((layer) => overviews[layer]);
  // Sections lie one below the other, or side by side if that makes their pictures larger.
  const sizes = sections.map((each) => [each.layers.length, Math.max(...each.layers.map((layer) => contents.ofLayer(layer).length))]);
  const [down, across] = [0, 1].map((at) => sizes.map((each) => each[at]));
  const sum = (values: number[]): number => values.reduce((total, each) => total + each, 0);
  // Labels are worth more than to see all layers without scrolling.
  const labelled = shown.some((layer) => contents.ofLayer(layer).some((at) => contents.items[at].summary)) &&
    (room[0] < SLIM || (room[0] - HEADING) / Math.max(...across) - 4 >= LABELLED);
  const label = labelled ? LABEL : 0;
  /** Pixels of second labels in some layers. */
  const seconds = (layers: number[]): number =>
    labelled ? SECOND * layers.filter((layer) => contents.ofLayer(layer).some((at) => contents.items[at].summary?.second)).length : 0;
  const stacked = Math.min((room[0] - HEADING) / Math.max(...across), (room[1] - sections.length * ABOVE - seconds(shown)) / sum(down) - label);
  /** Pixels of sections side by side whose thumbnails have a size. */
  const width = (side: number): number => sum(sections.map((each, at) =>
    GAP + Math.max(HEADING + across[at] * side, isStacked(page.layers[each.layers[0]]) ? ABOUT : 0)));
  const beside = Math.min((room[0] - width(0)) / Math.max(sum(across.filter((_, at) => !isStacked(page.layers[sections[at].layers[0]]))), 1),
    (room[1] - ABOVE - Math.max(...sections.map((each) => seconds(each.layers)))) / Math.max(...down) - label);
  const side = Math.floor(Math.min(Math.max(Math.max(stacked, beside) - 4, labelled ? LABELLED : SMALLEST), LARGEST));
  const [cut, setCut] = useState(false);
  useEffect(() => setCut(place.current!.scrollWidth > place.current!.clientWidth + 1));
  const summarized = (at: number): string[] => {
    const { summary } = contents.items[at];
    const all = labelled && summary ? [[summary.label, summary.score] as const, ...(summary.second ? [summary.second] : [])] : [];
    return all.map(([name, score]) => name + (side < SCORED ? "" : ` ${String(+score.toFixed(2)).replace(/^0/, "")}`));
  };
  const groups = order === "layer" ? null : ranked(props, shown);
  const all = groups ? groups.flatMap(([, found]) => found.map(([at]) => at)) : shown.flatMap((layer) => contents.ofLayer(layer));
  const focus = all.includes(chosen) ? chosen : all[0];
  const cell = (at: number, labels: string[] = []) => (
    <Cell {...props} key={at} at={at} item={contents.items[at]} labels={labels} focused={at === focus} side={side}
      pressed={props.visited && at === chosen ? "chosen" : at === compared ? "compared" : ""} />
  );
  const move = (event: KeyboardEvent): void => {
    const delta = ARROWS[event.key];
    const from = (event.target as HTMLElement).closest<HTMLElement>("[data-head]");
    if (!delta || !from) return;
    event.preventDefault();
    event.stopPropagation();
    nearest(from, [...place.current!.querySelectorAll<HTMLElement>("[data-head]")], centre, delta).focus();
  };
  // What does not fit below the other lies at its side if it fits there.
  const wide = beside > stacked && order === "layer" && width(side + 4) <= room[0];
  const pictures = shown.every((layer) => page.layers[layer].kind === "picture");
  return (
    <div class={wide ? "grid wide" : "grid"} ref={place} onKeyDown={move} data-state={ready ? "complete" : "drawing"} style={{ "--side": `${side}px` }}>
      {cut && !wide && <p class="more">More heads at the right: scroll sideways →</p>}
      {pictures ? <div class="cards">{shown.map((layer) => cell(contents.ofLayer(layer)[0], [page.layers[layer].name]))}</div>
        : !groups ? sections.map((each) => <Layers key={each.title} section={each} {...props} cell={(at) => cell(at, summarized(at))} />)
        : groups.map(([title, found]) => (
          <section key={title}>
            <h2>{title}</h2>
            <div class="cards">{found.map(([at, labels]) => cell(at, labels))}</div>
          </section>
        ))}
    </div>
  );
}

/** What a head is called and what it is sorted by: on two lines where its name says which kind of layer it is in. */
function labels(short: string, says: string): string[] {
  return short.includes(" ") && says ? [short, says] : [`${short} ${says}`];
}

/** Return heads in the chosen order, under headings, each with its label. */
function ranked({ page, contents, overviews, order, chosen }: Props, shown: number[]): [string, [number, string[]][]][] {
  const of = contents.items[chosen];
  const layers = shown.filter((layer) => !isStacked(page.layers[layer]));
  const found = layers.flatMap((layer) => contents.ofLayer(layer).filter((at) => contents.items[at].head !== null)).map((at) => {
    const item = contents.items[at];
    const [value, says] = score(order, page, item, overviews[item.layer], of, overviews[of.layer]);
    return { at, value, says: labels(item.short, says), group: item.summary?.label ?? "" };
  });
  if (order === "label") {
    const groups = new Map<string, [number, string[]][]>();
    for (const { at, group } of found) {
      const { short, summary } = contents.items[at];
      groups.set(group, [...(groups.get(group) ?? []), [at, labels(short, summary ? summary.score.toFixed(2) : "")]]);
    }
    return [...groups].sort(([a], [b]) => Number(a === "") - Number(b === "") || a.localeCompare(b))
      .map(([group, heads]) => [`${GROUPS[group] ?? group} (${heads.length} ${heads.length === 1 ? "head" : "heads"}, layer·head)`, heads]);
  }
  found.sort((a, b) => (a.value < b.value ? -1 : a.value > b.value ? 1 : a.at - b.at));
  const title = order === "like" ? `Most like ${of.title} first` : `Heads, ${ORDERS[order][0]} (layer·head)`;
  return [[title, found.map(({ at, says }) => [at, says])]];
}

function Layers({ section, page, contents, cell }: Props & { section: Section; cell(at: number): preact.VNode }) {
  const heads = Math.max(...section.layers.map((layer) => contents.ofLayer(layer).filter((at) => contents.items[at].head !== null).length));
  const mean = section.layers.some((layer) => page.layers[layer].mean);
  const alone = section.layers.every((layer) => isStacked(page.layers[layer]));
  return (
    <section>
      {section.title && <h2>{section.title}</h2>}
      {alone && section.layers.map((layer) => <p class="about" key={layer}>{page.layers[layer].name}.</p>)}
      <table>
        {!alone && (
          <thead>
            <tr>
              <td class="corner"><span>layer ↓</span> <span>head →</span></td>
              {mean && <th scope="col">mean</th>}
              {Array.from({ length: heads }, (_, head) => (
                <th scope="col" key={head}><span class="hidden">head </span>{head}</th>
              ))}
            </tr>
          </thead>
        )}
        <tbody>
          {section.layers.map((layer) => {
            const items = contents.ofLayer(layer).map((at) => ({ at, head: contents.items[at].head }));
            const average = items.find((each) => each.head === null);
            return (
              <tr key={layer}>
                <th scope="row" title={page.layers[layer].name}>{contents.layerName(layer)}</th>
                {mean && (average ? <td class="mean">{cell(average.at)}</td> : <td />)}
                {items.filter((each) => each.head !== null).map((each) => <td key={each.at}>{cell(each.at)}</td>)}
              </tr>
            );
          })}
        </tbody>
      </table>
    </section>
  );
}

interface CellProps extends Props {
  at: number;
  item: Item;
  /** What is written below the thumbnail, line by line. */
  labels: string[];
  focused: boolean;
  side: number;
  pressed: string;
}

export function Cell({ page, overviews, scale, theme, bare, at, item, labels, focused, pressed, onChoose, onCompare, chosen }: CellProps) {
  const overview = overviews[item.layer];
  const layer = page.layers[item.layer];
  const even = overview ? spread(overview, item.at) : "";
  const hidden = overview && bare ? `; ${overview.hidden[item.at].toFixed(2)} of the weight is hidden` : "";
  const name = `${item.title}${item.summary ? `: ${item.summary.text}` : ""}${even && `; ${even}`}${hidden}`;
  return (
    <button type="button" class={`thumbnail ${pressed}`} title={`${name}${layer.kind === "picture" ? "" : `\n${layer.name}`}\nShift-click to compare`}
      aria-label={labels.length ? `${name} (${labels.join(", ")})` : name} aria-current={pressed === "chosen"} data-head={at} tabIndex={focused ? 0 : -1}
      onClick={(event) => (event.shiftKey ? onCompare(at === chosen ? null : at) : onChoose(at))}>
      <Thumbnail layer={layer} at={item.at} overview={overview} scale={scale} theme={theme} bare={bare} />
      {labels.map((label, line) => <span key={label} class={line ? "second" : ""}>{label}</span>)}
    </button>
  );
}

interface ThumbnailProps {
  layer: Layer;
  at: number;
  overview: Overview | null;
  scale: Scale;
  theme: Theme;
  bare: boolean;
}

export function Thumbnail({ layer, at, overview, scale, theme, bare }: ThumbnailProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [rows, cols] = layer.thumbnail;
  useEffect(() => {
    if (!overview || !rows || !cols) return;
    const { codes, facts } = thumbnail(layer, overview, at, bare);
    const colors = new Uint32Array(palette(theme, false).buffer);
    const context = canvas.current!.getContext("2d")!;
    const image = context.createImageData(cols, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const size = layer.block[1];
    for (let row = 0; row < rows; row++) {
      // What is masked or hidden stays transparent: there the style has stripes.
      const last = Math.min(Math.ceil(overview.stops[row] / size), cols);
      for (let col = Math.floor(overview.starts[row] / size), i = row * cols + col; col < last; col++, i++)
        if (codes[i]) pixels[i] = colors[shade(along(scale, DECODED[codes[i]], facts[row]), false)];
    }
    context.putImageData(image, 0, 0);
  }, [layer, at, overview, scale, theme, bare]);
  return <canvas ref={canvas} width={cols} height={rows} aria-hidden="true" />;
}

function centre(element: HTMLElement): [number, number] {
  const box = element.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
}

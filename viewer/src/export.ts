// What is shown as a file: matrices or the grid of heads, with the title, the head and the colour bar.

import { css, MASKED, palette, type RowFacts, type Scale, SCALES, shade, type Theme } from "./colors";
import { edge, marks, steps } from "./legend";
import { stripes, written } from "./view";

/** What has a place in a figure. */
export interface Drawing {
  size: { width: number; height: number };
  draw(context: CanvasRenderingContext2D, paper: string): void;
  svg(paper: string): string;
}

export interface Figure {
  title: string;
  /** What each drawing shows: model, layer and head. */
  captions: string[];
  /** Colours of the page: paper, ink and soft ink. */
  colors: string[];
  scale: Scale;
  signed: boolean;
  theme: Theme;
  /** The row whose numbers the colour bar has, or null for words instead. */
  facts: RowFacts | null;
  /** What has stripes, if anything has, and sentences about the rest: the scale, the row of its numbers, what is hidden and pinned. */
  striped: string;
  notes: string[];
  /** Images with what is laid over them, and what that is. */
  images: { image: HTMLImageElement; over: HTMLCanvasElement; caption: string }[];
}

/** Pixels above the drawings, of lines of the title and of text, of the colour bar, and of a pixel of the screen in a PNG. */
const [ABOVE, TITLE, LINE, BAR, SHARPNESS] = [58, 20, 16, 220, 2];
/** Pixels of the longer side of an image, around it, and of its caption; and of a letter of a note, about. */
const [IMAGE, MARGIN, CAPTION] = [300, 14, 40];
export const LETTER = 5.8;
/** The least width of a figure whose notes can be read. */
const NARROW = 420;

/** What lies behind a figure: white, which documents have, unless it is dark. */
function paperOf({ theme, colors }: Figure): string {
  return theme === "light" ? "#ffffff" : colors[0];
}

interface Placed {
  x: number;
  y: number;
  width: number;
  height: number;
}

interface Layout {
  width: number;
  height: number;
  /** Lines of the title, and of each drawing's caption; and where drawings begin. */
  title: string[];
  captions: string[][];
  above: number;
  lefts: number[];
  bottom: number;
  images: Placed[];
  notes: string[];
}

/** Cut a text into lines of about as many letters as a width has room for. */
export function lines(text: string, room: number): string[] {
  const found = [""];
  for (const word of text.split(" ")) {
    const last = found.length - 1;
    if (!found[last] || found[last].length + word.length < room) found[last] += (found[last] && " ") + word;
    else found.push(word);
  }
  return found;
}

/** Drawings side by side, then images in columns that are as high; below them the colour bar and the notes. */
function arranged(drawings: Drawing[], figure: Figure): Layout {
  const widths = drawings.map(({ size }) => size.width);
  const lefts = widths.map((_, at) => widths.slice(0, at).reduce((sum, each) => sum + each, 0));
  const tall = Math.max(...drawings.map(({ size }) => size.height));
  let [x, y, column, low] = [widths.reduce((sum, each) => sum + each, 0) + MARGIN, 0, 0, 0];
  const placed = figure.images.map(({ image }) => {
    const scale = IMAGE / Math.max(image.naturalWidth, image.naturalHeight, 1);
    const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
    if (y && y + height + CAPTION > tall) [x, y, column] = [x + column + MARGIN, 0, 0];
    const at = { x, y, width, height };
    [y, column] = [y + height + CAPTION, Math.max(column, width)];
    low = Math.max(low, y);
    return at;
  });
  const width = Math.max(placed.length ? x + column + MARGIN : x - MARGIN, NARROW);
  const title = lines(figure.title, (width - 24) / (LETTER * 1.45));
  const captions = figure.captions.map((each, at) => lines(each, ((lefts[at + 1] ?? width) - lefts[at] - 20) / (LETTER * 1.15)));
  const above = ABOVE + TITLE * (title.length - 1) + LINE * (Math.max(...captions.map((each) => each.length)) - 1);
  const images = placed.map((each) => ({ ...each, y: each.y + above }));
  const notes = figure.notes.flatMap((each) => lines(each, (width - 24) / LETTER));
  const bottom = above + Math.max(tall, low);
  return { lefts, width, title, captions, above, bottom, images, notes, height: bottom + 66 + LINE * notes.length };
}

/** Texts around the matrices, with their places. */
function texts(figure: Figure, { title, captions, lefts, bottom, images, notes }: Layout): { text: string; x: number; y: number; size: number; anchor: "start" | "middle" | "end"; strong?: boolean }[] {
  const anchors = { first: "start", last: "end", "": "middle" } as const;
  const swatch = figure.signed || figure.scale === "entropy" ? BAR + 50 : BAR + 114;
  return [
    ...title.map((text, line) => ({ text, x: 12, y: 20 + TITLE * line, size: 15, anchor: "start" as const, strong: true })),
    ...captions.flatMap((each, at) => each.map((text, line) => ({
      text, x: lefts[at] + 12, y: 24 + TITLE * title.length + LINE * line, size: 12, anchor: "start" as const }))),
    ...images.flatMap((each, at) => lines(figure.images[at].caption, each.width / LETTER).slice(0, 2).map((text, line) => ({
      text, x: each.x, y: each.y + each.height + 10 + 14 * line, size: 11, anchor: "start" as const }))),
    { text: figure.signed ? "difference of weights" : `colour: ${SCALES[figure.scale][0]}`, x: 12, y: bottom + 12, size: 11, anchor: "start" },
    ...marks(figure.scale, figure.signed, figure.facts).map(({ at, text }) => ({
      text, x: 12 + BAR * at, y: bottom + 48, size: 11, anchor: anchors[edge(at)],
    })),
    ...(swatch > BAR + 50 ? [{ text: "zero", x: BAR + 50, y: bottom + 30, size: 11, anchor: "start" as const }] : []),
    { text: figure.striped, x: swatch, y: bottom + 30, size: 11, anchor: "start" },
    ...notes.map((text, at) => ({ text, x: 12, y: bottom + 68 + LINE * at, size: 11, anchor: "start" as const })),
  ];
}

/** The squares beside the colour bar: where, and of which colour; null has stripes. */
function swatches(figure: Figure): [number, string | null][] {
  const plain = figure.signed || figure.scale === "entropy";
  const zero: [number, string | null][] = plain ? [] : [[BAR + 28, css(palette(figure.theme, false), shade(0, false))]];
  return figure.striped ? [...zero, [plain ? BAR + 28 : BAR + 92, null]] : zero;
}

/** Save the drawings, side by side, as one PNG file, with twice the detail of the screen. */
export async function savePng(drawings: Drawing[], figure: Figure): Promise<Saved> {
  const layout = arranged(drawings, figure);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [layout.width * SHARPNESS, layout.height * SHARPNESS];
  const context = canvas.getContext("2d")!;
  context.scale(SHARPNESS, SHARPNESS);
  const [, ink, border] = figure.colors;
  const paper = paperOf(figure);
  context.fillStyle = paper;
  context.fillRect(0, 0, layout.width, layout.height);
  drawings.forEach((drawing, at) => {
    context.save();
    context.translate(layout.lefts[at], layout.above);
    drawing.draw(context, paper);
    context.restore();
  });
  layout.images.forEach(({ x, y, width, height }, at) => {
    context.imageSmoothingEnabled = true;
    context.drawImage(figure.images[at].image, x, y, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(figure.images[at].over, x, y, width, height);
  });
  const colors = steps(figure.theme, figure.signed, BAR / 4);
  const top = layout.bottom + 22;
  colors.forEach((color, at) => {
    context.fillStyle = color;
    context.fillRect(12 + (at * BAR) / colors.length, top, BAR / colors.length + 0.5, 16);
  });
  context.strokeStyle = border;
  for (const [x, color] of swatches(figure)) {
    context.fillStyle = color ?? context.createPattern(stripes(figure.theme), "repeat")!;
    context.fillRect(x, top, 16, 16);
    context.strokeRect(x, top, 16, 16);
  }
  context.fillStyle = ink;
  context.textBaseline = "middle";
  for (const { text, x, y, size, anchor, strong } of texts(figure, layout)) {
    context.font = `${strong ? "600 " : ""}${size}px system-ui, sans-serif`;
    context.textAlign = anchor === "middle" ? "center" : anchor;
    context.fillText(text, x, y, layout.width - 12);
  }
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done));
  if (!blob) throw new Error(`a picture of ${canvas.width} × ${canvas.height} pixels is too large for this browser: save an SVG`);
  return save(blob, figure, "png");
}

/** Save the drawings as an SVG file, whose text can be searched and edited. */
export async function saveSvg(drawings: Drawing[], figure: Figure): Promise<Saved> {
  const layout = arranged(drawings, figure);
  const [, ink, border] = figure.colors;
  const paper = paperOf(figure);
  const colors = steps(figure.theme, figure.signed, BAR / 4);
  const top = layout.bottom + 22;
  const bar = colors.map((color, at) =>
    `<rect x="${12 + (at * BAR) / colors.length}" y="${top}" width="${BAR / colors.length + 1}" height="16" fill="${color}"/>`);
  const squares = swatches(figure).map(([x, color]) =>
    `<rect x="${x}" y="${top}" width="16" height="16" fill="${color ?? "url(#striped)"}" stroke="${border}"/>`);
  const around = texts(figure, layout).map(({ text, x, y, size, anchor, strong }) => written(text, {
    x: String(x), y: String(y), "font-size": String(size), "text-anchor": anchor, "dominant-baseline": "central",
    ...(strong ? { "font-weight": "600" } : {}),
  }));
  const inside = drawings.map((each, at) => `<g transform="translate(${layout.lefts[at]} ${layout.above})">${each.svg(paper)}</g>`);
  const images = layout.images.map(({ x, y, width, height }, at) => {
    const place = `x="${x}" y="${y}" width="${width}" height="${height}"`;
    const { image, over } = figure.images[at];
    return `<image ${place} href="${image.src}"/><image ${place} style="image-rendering:pixelated" href="${over.toDataURL()}"/>`;
  });
  const [light, dark] = MASKED[figure.theme];
  const drawn =
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${layout.width} ${layout.height}" width="${layout.width}" ` +
    `height="${layout.height}" font-family="system-ui, sans-serif" font-size="12" fill="${ink}">` +
    `<defs><pattern id="striped" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="${light}"/>` +
    `<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" stroke="${dark}" stroke-width="1.5"/></pattern></defs>` +
    `<rect width="100%" height="100%" fill="${paper}"/>${inside.join("")}${images.join("")}` +
    `<g class="bar">${bar.join("")}${squares.join("")}</g>${around.join("")}</svg>`;
  return save(new Blob([drawn], { type: "image/svg+xml" }), figure, "svg");
}

/** A file, and where it is until it is forgotten. */
export interface Saved {
  name: string;
  address: string;
}

function save(blob: Blob, { title, captions }: Figure, ending: string): Saved {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${[title, ...captions].map((each) => each.slice(0, 60)).join(" ").replace(/[^\p{L}\p{N}.]+/gu, "-").slice(0, 150)}.${ending}`;
  link.click();
  return { name: link.download, address: link.href };
}

// The view as a file: the matrices as they are shown, with the title, the head and the colour bar.

import { type RowFacts, type Scale, SCALES, type Theme } from "./colors";
import { marks, steps } from "./legend";
import { stripes, type View, written } from "./view";

export interface Figure {
  title: string;
  /** What each view shows. */
  captions: string[];
  scale: Scale;
  signed: boolean;
  theme: Theme;
  facts: RowFacts;
  striped: string;
}

/** Pixels above and below the matrices, of the colour bar, and of a pixel of the screen in a PNG. */
const [ABOVE, BELOW, BAR, SHARPNESS] = [58, 64, 220, 2];

interface Layout {
  width: number;
  height: number;
  lefts: number[];
  widths: number[];
  bottom: number;
}

function arranged(views: View[]): Layout {
  const ratio = devicePixelRatio || 1;
  const widths = views.map((view) => view.canvas.width / ratio);
  const lefts = widths.map((_, at) => widths.slice(0, at).reduce((sum, each) => sum + each, 0));
  const bottom = ABOVE + Math.max(...views.map((view) => view.canvas.height / ratio));
  return { widths, lefts, bottom, width: widths.reduce((sum, each) => sum + each, 0), height: bottom + BELOW };
}

/** Texts around the matrices, with their places. */
function texts(figure: Figure, { lefts, bottom }: Layout): { text: string; x: number; y: number; size: number; anchor: "start" | "middle" | "end"; strong?: boolean }[] {
  return [
    { text: figure.title, x: 12, y: 20, size: 15, anchor: "start", strong: true },
    ...figure.captions.map((text, at) => ({ text, x: lefts[at] + 12, y: 44, size: 12, anchor: "start" as const })),
    ...marks(figure.scale, figure.signed, figure.facts).map(({ at, text }) => ({
      text, x: 12 + BAR * at, y: bottom + 52, size: 11, anchor: at < 0.05 ? "start" as const : at > 0.95 ? "end" as const : "middle" as const,
    })),
    { text: figure.signed ? "difference of weights" : SCALES[figure.scale][0], x: 12, y: bottom + 12, size: 11, anchor: "start" },
    { text: figure.striped, x: BAR + 50, y: bottom + 30, size: 11, anchor: "start" },
  ];
}

/** Save the views, side by side, as one PNG file, with twice the detail of the screen. */
export function savePng(views: View[], figure: Figure): void {
  const layout = arranged(views);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [layout.width * SHARPNESS, layout.height * SHARPNESS];
  const context = canvas.getContext("2d")!;
  context.scale(SHARPNESS, SHARPNESS);
  const [paper, ink] = views[0].colors();
  context.fillStyle = paper;
  context.fillRect(0, 0, layout.width, layout.height);
  views.forEach((view, at) => {
    context.save();
    context.translate(layout.lefts[at], ABOVE);
    view.draw(context);
    context.restore();
  });
  const colors = steps(figure.theme, figure.signed, BAR / 4);
  colors.forEach((color, at) => {
    context.fillStyle = color;
    context.fillRect(12 + (at * BAR) / colors.length, layout.bottom + 22, BAR / colors.length + 0.5, 16);
  });
  context.fillStyle = context.createPattern(stripes(figure.theme), "repeat")!;
  context.fillRect(BAR + 28, layout.bottom + 22, 16, 16);
  context.fillStyle = ink;
  context.textBaseline = "middle";
  for (const { text, x, y, size, anchor, strong } of texts(figure, layout)) {
    context.font = `${strong ? "600 " : ""}${size}px system-ui, sans-serif`;
    context.textAlign = anchor === "middle" ? "center" : anchor;
    context.fillText(text, x, y, layout.width);
  }
  canvas.toBlob((blob) => blob && save(blob, `${figure.title} ${figure.captions.join(" ")}.png`));
}

/** Save the views as an SVG file, whose text can be searched and edited. */
export function saveSvg(views: View[], figure: Figure): void {
  const layout = arranged(views);
  const [paper, ink] = views[0].colors();
  const colors = steps(figure.theme, figure.signed, BAR / 4);
  const bar = colors.map((color, at) =>
    `<rect x="${12 + (at * BAR) / colors.length}" y="${layout.bottom + 22}" width="${BAR / colors.length + 0.5}" height="16" fill="${color}"/>`);
  const around = texts(figure, layout).map(({ text, x, y, size, anchor, strong }) => written(text, {
    x: String(x), y: String(y), "font-size": String(size), "text-anchor": anchor, "dominant-baseline": "central",
    ...(strong ? { "font-weight": "600" } : {}),
  }));
  const inside = views.map((view, at) => `<g transform="translate(${layout.lefts[at]} ${ABOVE})">${view.svg()}</g>`);
  const drawn =
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${layout.width} ${layout.height}" width="${layout.width}" ` +
    `height="${layout.height}" font-family="system-ui, sans-serif" font-size="12" fill="${ink}">` +
    `<rect width="100%" height="100%" fill="${paper}"/>${inside.join("")}` +
    `<g class="bar">${bar.join("")}</g>` +
    `<image x="${BAR + 28}" y="${layout.bottom + 22}" width="16" height="16" href="${stripes(figure.theme).toDataURL()}"/>` +
    `${around.join("")}</svg>`;
  save(new Blob([drawn], { type: "image/svg+xml" }), `${figure.title} ${figure.captions.join(" ")}.svg`);
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\p{L}\p{N}.]+/gu, "-").slice(-120);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

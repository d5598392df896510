// The grid of heads as a drawing, laid out as it is on the screen.

import type { Theme } from "./colors";
import { type Drawing, LETTER, lines } from "./export";
import { clip, colorsOf, FONT, stripes, written } from "./view";

interface Placed {
  text: string;
  x: number;
  y: number;
  size: number;
  anchor: "start" | "middle" | "end";
  strong: boolean;
  soft: boolean;
}

/** Return the grid as a drawing: all of it, wherever it is scrolled. */
export function drawn(grid: HTMLElement, theme: Theme): Drawing {
  const scrolled = [grid.scrollLeft, grid.scrollTop];
  grid.scrollTo(0, 0);
  const from = grid.getBoundingClientRect();
  const boxOf = (element: Element): [number, number, number, number] => {
    const { left, top, width, height } = element.getBoundingClientRect();
    return [left - from.left + MARGIN, top - from.top, width, height];
  };
  const measuring = document.createElement("canvas").getContext("2d")!;
  const texts = [...grid.querySelectorAll<HTMLElement>("h2, th, .corner span, .thumbnail span, .about")].flatMap((element): Placed[] => {
    const [x, y, width, height] = boxOf(element);
    const { fontSize, fontWeight, textAlign, color } = getComputedStyle(element);
    const anchor = textAlign === "center" ? "middle" : textAlign === "right" ? "end" : "start";
    const size = parseFloat(fontSize);
    const text = [...element.childNodes].map((node) => (node instanceof Element ? "" : node.textContent)).join("");
    measuring.font = FONT(size);
    const all = element.matches(".about") ? lines(text, (width * 12) / size / LETTER) : [element.matches("h2") ? text : clip(measuring, text, width + 1)];
    const middle = anchor === "middle" ? x + width / 2 : anchor === "end" ? x + width - 4 : x;
    return all.map((line, at) => ({
      text: line, x: middle, y: y + (height * (at + 0.5)) / all.length, size, anchor, strong: Number(fontWeight) >= 600, soft: color !== getComputedStyle(grid).color,
    }));
  });
  const pictures = [...grid.querySelectorAll<HTMLCanvasElement>(".thumbnail canvas")].map((canvas) => ({ canvas, box: boxOf(canvas) }));
  const [, ink, soft, , border] = colorsOf(grid);
  grid.scrollTo(scrolled[0], scrolled[1]);
  const reach = (ends: number[]): number => Math.ceil(Math.max(0, ...ends)) + MARGIN;
  return {
    size: {
      width: reach(pictures.map(({ box: [x, , width] }) => x + width).concat(texts.map(({ text, x, size, anchor }) => {
        measuring.font = FONT(size);
        return x + measuring.measureText(text).width * (anchor === "start" ? 1.05 : anchor === "middle" ? 0.5 : 0);
      }))),
      height: reach(pictures.map(({ box: [, y, , height] }) => y + height).concat(texts.map(({ y, size }) => y + size / 2))),
    },
    draw(context) {
      context.imageSmoothingEnabled = false;
      context.lineWidth = 1;
      for (const { canvas, box } of pictures) {
        context.fillStyle = context.createPattern(stripes(theme), "repeat")!;
        context.fillRect(...box);
        context.drawImage(canvas, ...box);
        context.strokeStyle = border;
        context.strokeRect(box[0] - 0.5, box[1] - 0.5, box[2] + 1, box[3] + 1);
      }
      context.textBaseline = "middle";
      for (const { text, x, y, size, anchor, strong, soft: isSoft } of texts) {
        context.font = `${strong ? "600 " : ""}${FONT(size)}`;
        context.textAlign = anchor === "middle" ? "center" : anchor;
        context.fillStyle = isSoft ? soft : ink;
        context.fillText(text, x, y);
      }
    },
    svg() {
      const images = pictures.map(({ canvas, box: [x, y, width, height] }) => {
        const place = `x="${x}" y="${y}" width="${width}" height="${height}"`;
        return `<rect ${place} fill="url(#striped)" stroke="${border}"/><image ${place} preserveAspectRatio="none" style="image-rendering:pixelated" href="${canvas.toDataURL()}"/>`;
      });
      return images.join("") + texts.map(({ text, x, y, size, anchor, strong, soft: isSoft }) => written(text, {
        x: x.toFixed(1), y: y.toFixed(1), "font-size": String(size), "text-anchor": anchor, "dominant-baseline": "central", fill: isSoft ? soft : ink,
        ...(strong ? { "font-weight": "600" } : {}),
      })).join("");
    },
  };
}

/** Pixels around the drawing. */
const MARGIN = 12;

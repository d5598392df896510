// Colours of weights: palettes with monotonic lightness for every kind of colour vision.

export type Scale = "absolute" | "row" | "log";
export const SCALES: Record<Scale, string> = {
  absolute: "weight, 0 to 1",
  row: "relative to row maximum",
  log: "logarithm, 0.0001 to 1",
};
/** Decades that the logarithmic scale shows. */
const DECADES = 4;

const SEQUENTIAL = {
  light: ["#f6f8fb", "#cfdfef", "#94bbdf", "#5490c8", "#2463a3", "#0a2f5f"],
  dark: ["#15191f", "#17395c", "#1e6294", "#3b95c0", "#8ecfdf", "#f3fbe8"],
};
const DIVERGING = {
  light: ["#7c3a04", "#d8822f", "#f5d2a6", "#f5f5f5", "#cbc5e4", "#7e6db9", "#391a73"],
  dark: ["#ffbd70", "#bb6d1f", "#4b341c", "#1a1d21", "#3a3362", "#8172cb", "#d4caff"],
};

export type Theme = "light" | "dark";

/** Return 256 colours (RGBA) of a palette. */
export function palette(theme: Theme, signed: boolean): Uint8ClampedArray {
  const stops = (signed ? DIVERGING : SEQUENTIAL)[theme].map((hex) =>
    [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)),
  );
  const colors = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    for (let part = 0; part < 3; part++)
      colors[4 * i + part] = stops[left][part] + (at - left) * (stops[left + 1][part] - stops[left][part]);
    colors[4 * i + 3] = 255;
  }
  return colors;
}

/** Return how far along the scale a weight is, from 0 to 1, or from −1 where it has a sign. */
export function along(scale: Scale, value: number, rowMax: number): number {
  if (value < 0) return -along(scale, -value, rowMax);
  if (scale === "row") return rowMax > 0 ? Math.min(value / rowMax, 1) : 0;
  if (scale === "log") return value > 0 ? Math.min(Math.max(1 + Math.log10(value) / DECADES, 0), 1) : 0;
  return Math.min(value, 1);
}

/** Return which of 256 colours that is. */
export function shade(t: number, signed: boolean): number {
  return Math.round(signed ? 127.5 + 127.5 * t : 255 * t);
}

export function css(colors: Uint8ClampedArray, index: number): string {
  return `rgb(${colors[4 * index]} ${colors[4 * index + 1]} ${colors[4 * index + 2]})`;
}

/** Return whether black or white is read more easily on a colour. */
export function ink(colors: Uint8ClampedArray, index: number): string {
  const [r, g, b] = colors.subarray(4 * index, 4 * index + 3);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151b" : "#fff";
}

// Colours of weights: palettes with monotonic lightness for every kind of colour vision, and the scales that use them.

export type Scale = "even" | "row" | "absolute" | "log" | "entropy";

/** The name of each scale, and a sentence about it. */
export const SCALES: Record<Scale, [string, string]> = {
  even: ["compared with an even split", "Faint: a query's weight is spread evenly over the keys it sees. Strong: all of it is on one key."],
  row: ["relative to the row's largest", "The largest weight of each row has the strongest colour, even if it is small: do not compare rows."],
  absolute: ["weight, 0 to 1", "The weight itself: comparable everywhere, but rows with many keys look empty."],
  log: ["logarithm, 0.0001 to 1", "Shows small weights next to large ones: each step of the bar is ten times the one before."],
  entropy: ["concentration of the row", "One colour per query. Strong: its weight is on one key (entropy 0). Faint: it is spread evenly (the highest entropy)."],
};
/** What colours of a difference show. */
export const SIGNED = "Purple: more weight in the first. Orange: more in the second. Neither: the same.";

/** Decades that the logarithmic scale shows. */
const DECADES = 4;
/** Where an even share is on its scale, and the least that is drawn of any weight but zero. */
const EVEN = 0.1;
const LEAST = 0.035;
/** Below it a weight has the colour of zero, as in the grid, whose codes begin there. */
const TINY = 2 ** -24;

const SEQUENTIAL = {
  light: ["#ffffff", "#cfdfef", "#94bbdf", "#5490c8", "#2463a3", "#0a2f5f"],
  dark: ["#101318", "#17395c", "#1e6294", "#3b95c0", "#8ecfdf", "#f3fbe8"],
};
const DIVERGING = {
  light: ["#7c3a04", "#d8822f", "#f5d2a6", "#f5f5f5", "#cbc5e4", "#7e6db9", "#391a73"],
  dark: ["#ffbd70", "#bb6d1f", "#4b341c", "#1a1d21", "#3a3362", "#8172cb", "#d4caff"],
};
/** Two colours of stripes where there is no weight to show. */
export const MASKED = { light: ["#efece5", "#c9c2b3"], dark: ["#20252b", "#454d57"] };

export type Theme = "light" | "dark";

/** Return 256 colours (RGBA) of a palette. */
export function palette(theme: Theme, signed: boolean): Uint8ClampedArray {
  const key = `${theme}${signed}`;
  const known = palettes.get(key);
  if (known) return known;
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
  palettes.set(key, colors);
  return colors;
}
const palettes = new Map<string, Uint8ClampedArray>();

/** What the colours of a row follow from: how many keys it sees, its largest weight, and its entropy in nats. */
export interface RowFacts {
  count: number;
  max: number;
  entropy: number;
}

/** Return how far along the scale a weight is, from 0 (zero alone) to 1, or from −1 where it has a sign. */
export function along(scale: Scale, value: number, facts: RowFacts, signed = false): number {
  if (value < 0) return -along(scale, -value, facts, true);
  if (!(value >= TINY) && scale !== "entropy") return 0;
  return Math.max(position(scale, value, facts, signed), signed ? 0 : LEAST);
}

function position(scale: Scale, value: number, { count, max, entropy }: RowFacts, signed: boolean): number {
  if (signed && (scale === "even" || scale === "entropy")) return Math.min(Math.sqrt(value), 1);
  if (scale === "row") return max > 0 ? Math.min(value / max, 1) : 0;
  if (scale === "log") return Math.min(Math.max(1 + Math.log10(value) / DECADES, 0), 1);
  if (scale === "absolute") return Math.min(value, 1);
  if (scale === "entropy") return count > 1 ? 1 - Math.min(entropy / Math.log(count), 1) : 0;
  const times = value * count;
  if (count <= 1 || times <= 1) return EVEN * Math.sqrt(Math.min(times, 1));
  return Math.min(EVEN + ((1 - EVEN) * Math.log(times)) / Math.log(count), 1);
}

/** A mark of a colour bar: where it is, from 0 to 1, and what it says. */
export interface Tick {
  at: number;
  text: string;
}

/** Return the marks of a scale's colour bar, with the numbers of a row. */
export function ticks(scale: Scale, signed: boolean, facts: RowFacts): Tick[] {
  if (signed) {
    const values = scale === "row" ? [-facts.max, 0, facts.max] : scale === "log" ? [-1, -0.01, 0, 0.01, 1] : [-1, -0.25, 0, 0.25, 1];
    return values.map((value) => ({ at: (along(scale, value, facts, true) + 1) / 2, text: short(value).replace("-", "−") }));
  }
  if (scale === "entropy") {
    const nats = Math.log(Math.max(facts.count, 2));
    return [{ at: 0, text: `even: ${nats.toFixed(1)} nats` }, { at: 1, text: "on one key: 0 nats" }];
  }
  const { count, max } = facts;
  const values = scale === "row" ? [0, max / 2, max] : scale === "absolute" ? [0, 0.25, 0.5, 0.75, 1]
    : scale === "log" ? [1e-4, 0.01, 0.1, 1] : count > 1 ? [1 / count, ...(count > 2 ? [count ** -0.5] : []), 1] : [1];
  return values.map((value) => ({
    at: scale === "even" && count > 1 && value === 1 ? 1 : along(scale, value, facts),
    text: scale === "row" && max === 1 ? ["0", "half", "row's largest"][values.indexOf(value)]
      : (scale === "even" && count > 1 && value === values[0] ? "even " : "") + short(value),
  }));
}

/** Below it nothing is left of a weight with four decimals. */
export const NIL = 5e-5;

/** Return a weight with four decimals, as lists have it. */
export function decimal(value: number): string {
  if (value === 0 || Math.abs(value) >= NIL) return value.toFixed(4);
  return value > 0 ? "<0.0001" : ">−0.0001";
}

/** Return a weight in few letters. */
export function short(value: number): string {
  const size = Math.abs(value);
  if (value === 0 || size === 1) return String(value);
  return size >= 0.0001 ? String(+value.toPrecision(2)) : value.toExponential(0);
}

/** Return which of 256 colours that is. */
export function shade(t: number, signed: boolean): number {
  return Math.round(signed ? 127.5 + 127.5 * t : 255 * t);
}

export function css(colors: Uint8ClampedArray, index: number): string {
  return `rgb(${colors[4 * index]} ${colors[4 * index + 1]} ${colors[4 * index + 2]})`;
}

/** Return black or white, whichever contrasts more with a colour: 4.5 : 1 at least. */
export function ink(colors: Uint8ClampedArray, index: number): string {
  const [r, g, b] = [...colors.subarray(4 * index, 4 * index + 3)].map((each) => {
    const part = each / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// What is written along the sides of a matrix: words without a tokenizer's marks, patches and times.

import type { Picture, Place, Text } from "./schema";

/** Letters of a token that a label shows, at most: a token may be as long as a page, and labels are drawn in each frame. */
const LONGEST = 100;

/** One side of a matrix: tokens, or the words that they form. */
export interface Side {
  text: Text;
  labels: string[];
  /** Whether a blank comes before each label in running text. */
  spaced: boolean[];
  special: Set<number>;
  images: Picture[];
  places: (Place | null)[];
  times: ([number, number] | null)[] | null;
  /** The tokens of each word, if these are words. */
  groups: [number, number][] | null;
}

/** Patches of an image that count together: those that a rectangle touches, in the image's pixels, or those of one size. */
export interface Region {
  side: "query" | "key";
  image: number;
  box: [x: number, y: number, width: number, height: number];
  grain?: number;
}

/** Return the items of a side that a region has; where it is smaller than a patch, the patch around it. */
export function patchesIn({ places }: Side, { image, box: [x, y, width, height], grain }: Region): number[] {
  const found = (test: (place: Place) => boolean): number[] =>
    places.flatMap((place, at) => (place?.image === image && (grain ?? place.grain ?? 0) === (place.grain ?? 0) && test(place) ? [at] : []));
  // A rectangle that ends where a patch begins does not touch it, though addresses round to tenths of a pixel.
  const meets = (from: number, room: number, at: number, size: number): boolean => {
    const slack = Math.min(0.11, size / 4);
    return at + size > from + slack && at < from + room - slack;
  };
  const touched = found((each) => meets(x, width, each.x, each.width) && meets(y, height, each.y, each.height));
  const [middle, centre] = [x + width / 2, y + height / 2];
  return touched.length ? touched
    : found((each) => middle >= each.x && middle < each.x + each.width && centre >= each.y && centre < each.y + each.height);
}

/** Return a side with its tokens, or with whole words. */
export function sideOf(text: Text, merged: boolean): Side {
  const groups = merged && text.words ? text.words : null;
  const images = text.images ?? [];
  const places: (Place | null)[] = text.places ?? text.tokens.map(() => null);
  const of = <T>(each: T[]): T[] => (groups ? groups.map(([first]) => each[first]) : each);
  const special = new Set(text.special);
  const labels = groups ? text.wordTexts! : patchNames(text.labels ?? text.tokens, places, images);
  const begins = text.words && new Set(text.words.map(([first]) => first));
  const isSpecial = groups ? groups.flatMap(([first, last], at) => (last === first + 1 && special.has(first) ? [at] : [])) : special;
  const times = text.seconds ? of(text.seconds) : null;
  return {
    text, labels, groups, images, times, places: of(places), special: new Set(isSpecial),
    spaced: labels.map((_, at) => at > 0 && (groups !== null || !begins || begins.has(at))),
  };
}

/** Give patches that are all called the same a number. */
function patchNames(labels: string[], places: (Place | null)[], images: Picture[]): string[] {
  const mine = labels.filter((_, at) => places[at]);
  if (mine.length < 2 || new Set(mine).size > 1) return labels;
  let count = 0;
  return labels.map((label, at) => {
    const place = places[at];
    if (!place) return label;
    const of = place.seconds !== undefined ? `${+place.seconds.toFixed(2)} s, ` : place.frame !== undefined ? `frame ${place.frame}, `
      : images.length > 1 ? `${images[place.image].name}, ` : "";
    return `${of}patch ${count++}`;
  });
}

/** Return what an item of a side is called: its label, or when it was heard. */
export function named(side: Side, at: number): string {
  const time = side.times?.[at];
  const label = side.labels[at];
  return time ? `${time[0].toFixed(2)} s` : label === undefined ? String(at) : displayed(label);
}

/** Return a token by itself, as labels and lists show it: without blanks around it. */
export function displayed(token: string): string {
  const found = shown(token.trim().slice(0, 4 * LONGEST)).trim() || (token.includes("\n") ? "⏎" : "␣");
  const letters = [...found];
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : found;
}

const NAMES: Record<string, string> = {
  "\n": "⏎", "\t": "⇥", "\u007f": "␡", "\u00ad": "⟨SHY⟩", "\u200b": "⟨ZWSP⟩", "\u200e": "⟨LRM⟩", "\u200f": "⟨RLM⟩",
  "\u202a": "⟨LRE⟩", "\u202b": "⟨RLE⟩", "\u202c": "⟨PDF⟩", "\u202d": "⟨LRO⟩", "\u202e": "⟨RLO⟩", "\u2060": "⟨WJ⟩",
  "\u2066": "⟨LRI⟩", "\u2067": "⟨RLI⟩", "\u2068": "⟨FSI⟩", "\u2069": "⟨PDI⟩", "\ufeff": "⟨BOM⟩",
};

/** Return a token with visible signs for what would not be seen, or would change the order of letters. */
export function shown(token: string): string {
  const alone = /^[\u200c\u200d\ufe0f]+$/.test(token) ? /[\u200c\u200d\ufe0f]/g : /[^\s\S]/g;
  return token
    .replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (each) => {
      const code = each.charCodeAt(0);
      return NAMES[each] ?? (code < 0x20 ? String.fromCharCode(0x2400 + code) : hex(code));
    })
    .replace(alone, (each) => (each === "\u200c" ? "⟨ZWNJ⟩" : each === "\u200d" ? "⟨ZWJ⟩" : hex(each.charCodeAt(0))));
}

function hex(code: number): string {
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// Bytes that a page was given, and numbers in them.

import type { Page } from "./schema";

/** Where the bytes of a block come from. */
export type Fetch = (block: number) => Promise<Uint8Array>;

/** Return what reads blocks out of the page itself, or from the server that it came from. */
export function fetcher(page: Page, root: ParentNode): Fetch {
  if (page.blocks === "inside")
    return async (block) => bytesOf(root.querySelector(`#block-${block}`)?.textContent ?? "");
  return async (block) => {
    const answer = await fetch(`blocks/${block}`);
    if (!answer.ok) throw new Error(`block ${block}: the server answered ${answer.status}`);
    return new Uint8Array(await answer.arrayBuffer());
  };
}

export function bytesOf(base64: string): Uint8Array {
  const native = (Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array }).fromBase64;
  if (native) return native(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Every float16, by its bits. */
let halves: Float32Array | null = null;

function table(): Float32Array {
  if (halves) return halves;
  halves = new Float32Array(1 << 16);
  for (let bits = 0; bits < 1 << 16; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) halves[bits] = fraction ? NaN : sign * Infinity;
    else halves[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return halves;
}

export function floats(bytes: Uint8Array, format: "float16" | "float32"): Float32Array {
  const whole = bytes.byteOffset % 4 ? bytes.slice() : bytes;
  if (format === "float32") return new Float32Array(whole.buffer, whole.byteOffset, whole.byteLength >> 2);
  const codes = new Uint16Array(whole.buffer, whole.byteOffset, whole.byteLength >> 1);
  const values = new Float32Array(codes.length);
  const known = table();
  for (let i = 0; i < codes.length; i++) values[i] = known[codes[i]];
  return values;
}

export function integers(bytes: Uint8Array): Int32Array {
  const whole = bytes.byteOffset % 4 ? bytes.slice() : bytes;
  return new Int32Array(whole.buffer, whole.byteOffset, whole.byteLength >> 2);
}

/** Weights by their codes: 0 is masked, 1 is zero, others are even steps of the logarithm from 2⁻²⁴ to 1. */
export const DECODED = Float32Array.from({ length: 256 }, (_, code) => (code > 1 ? 2 ** (((code - 2) / 253) * 24 - 24) : 0));

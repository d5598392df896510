// The text itself, and its images: weights as colours behind the tokens.

import { useEffect, useRef } from "preact/hooks";
import { css, ink, palette, shade, type Theme } from "./colors";
import type { Picture, Place } from "./schema";
import { shown, type Side } from "./text";

interface Props {
  heading: string;
  side: Side;
  /** How far along the scale each item is; null where nothing is shown. */
  tones: Float32Array | null;
  signed: boolean;
  theme: Theme;
  pinned: number | null;
  marked: Set<number>;
  onPin(item: number): void;
}

/** Items that are laid out at once: around the pinned one, where there are more. */
const LAID_OUT = 20_000;
/** Colours below this share of the scale are not drawn. */
const FAINT = 0.004;

export function Reading({ heading, side, tones, signed, theme, pinned, marked, onPin }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const spans = useRef<HTMLElement[]>([]);
  const painted = useRef<Set<number>>(new Set());
  const count = side.labels.length;
  const half = LAID_OUT / 2;
  const first = count <= LAID_OUT ? 0 : Math.max(Math.min(Math.round(((pinned ?? 0) - half) / half) * half, count - LAID_OUT), 0);
  const last = Math.min(first + LAID_OUT, count);
  useEffect(() => {
    const made: HTMLElement[] = [];
    const parts = document.createDocumentFragment();
    for (let at = first; at < last; at++) {
      const span = document.createElement("span");
      span.textContent = shown(side.labels[at]) || " ";
      span.dataset.token = String(at);
      if (side.places[at]) span.hidden = true;
      if (side.spaced[at] && !span.hidden && at > first) parts.append(" ");
      parts.append(span);
      if (span.textContent === "⏎") parts.append(document.createElement("br"));
      made[at] = span;
    }
    place.current!.replaceChildren(parts);
    spans.current = made;
    painted.current = new Set();
  }, [side, first]);
  useEffect(() => {
    const colors = palette(theme, signed);
    for (const at of painted.current) spans.current[at]?.removeAttribute("style");
    painted.current = new Set();
    if (!tones) return;
    for (let at = first; at < last; at++) {
      if (!(Math.abs(tones[at]) >= FAINT)) continue;
      const index = shade(tones[at], signed);
      spans.current[at].style.background = css(colors, index);
      spans.current[at].style.color = ink(colors, index);
      painted.current.add(at);
    }
  }, [side, first, tones, signed, theme]);
  useEffect(() => {
    const span = pinned === null ? null : spans.current[pinned];
    span?.classList.add("pinned");
    const box = place.current!;
    if (span && (span.offsetTop < box.scrollTop || span.offsetTop > box.scrollTop + box.clientHeight - 24))
      box.scrollTop = span.offsetTop - box.clientHeight / 2;
    return () => span?.classList.remove("pinned");
  }, [side, first, pinned]);
  useEffect(() => {
    for (const at of marked) spans.current[at]?.classList.add("found");
    return () => {
      for (const at of marked) spans.current[at]?.classList.remove("found");
    };
  }, [side, first, marked]);
  const click = (event: MouseEvent): void => {
    const at = (event.target as HTMLElement).dataset.token;
    if (at !== undefined) onPin(Number(at));
  };
  return (
    <section class={side.images.length ? "reading shown" : "reading"}>
      <h2>{heading}{count > LAID_OUT && `: ${first.toLocaleString("en")} to ${(last - 1).toLocaleString("en")} of ${count.toLocaleString("en")} tokens`}</h2>
      {side.images.length > 0 && (
        <div class="images">
          {side.images.map((image, number) => (
            <Patches key={number} image={image} number={number} places={side.places} tones={tones} signed={signed} theme={theme}
              pinned={pinned} onPin={onPin} />
          ))}
        </div>
      )}
      <div class="tokens live" ref={place} onClick={click} tabIndex={0} role="group" aria-label={heading} />
    </section>
  );
}

interface PatchesProps {
  image: Picture;
  number: number;
  places: (Place | null)[];
  tones: Float32Array | null;
  signed: boolean;
  theme: Theme;
  pinned: number | null;
  onPin(item: number): void;
}

/** Pixels along the longer side of what is laid over an image. */
const DETAIL = 512;

/** An image, with what its patches are given laid over it. */
function Patches({ image, number, places, tones, signed, theme, pinned, onPin }: PatchesProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scale = DETAIL / Math.max(image.width, image.height);
  const patches = places.flatMap((place, at) => (place?.image === number ? [{ at, ...place }] : []));
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.clearRect(0, 0, DETAIL, DETAIL);
    const colors = palette(theme, signed);
    // The brightest patch of all images is the one with the largest weight; where patches overlap, that is on top.
    const most = places.reduce((max, place, at) => (place && tones ? Math.max(max, Math.abs(tones[at] || 0)) : max), 0) || 1;
    const sorted = tones ? [...patches].sort((a, b) => Math.abs(tones[a.at] || 0) - Math.abs(tones[b.at] || 0)) : [];
    for (const { at, x, y, width, height } of sorted) {
      const box = [x, y, width, height].map((each) => each * scale) as [number, number, number, number];
      const tone = (tones![at] || 0) / most;
      context.globalAlpha = 1;
      context.clearRect(...box);
      // What gets no attention lies in the dark; a difference has colours.
      context.fillStyle = signed ? css(colors, shade(tone, true)) : "#000";
      context.globalAlpha = signed ? 0.15 + 0.7 * Math.abs(tone) : 0.8 * (1 - tone);
      context.fillRect(...box);
    }
    const mine = patches.find((each) => each.at === pinned);
    if (mine) {
      context.globalAlpha = 1;
      context.strokeStyle = getComputedStyle(canvas.current!).getPropertyValue("--mark");
      context.lineWidth = DETAIL / 128;
      context.strokeRect(mine.x * scale, mine.y * scale, mine.width * scale, mine.height * scale);
    }
  }, [image, places, tones, signed, theme, pinned]);
  const click = (event: MouseEvent): void => {
    const box = canvas.current!.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * image.width;
    const y = ((event.clientY - box.top) / box.height) * image.height;
    const under = patches.filter((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + each.height);
    under.sort((a, b) => a.width * a.height - b.width * b.height);
    if (under.length) onPin(under[0].at);
  };
  const name = image.name || (number ? `image ${number + 1}` : "image");
  return (
    <figure class="image live">
      <div>
        <img src={image.data} alt={`The ${name} that was read`} />
        <canvas ref={canvas} width={image.width * scale} height={image.height * scale} onClick={click} role="img"
          aria-label={`Weights of ${patches.length} patches of ${name}`} />
      </div>
      {image.name && <figcaption>{image.name}</figcaption>}
    </figure>
  );
}

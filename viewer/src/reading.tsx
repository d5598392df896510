// The text itself, and its images: weights as colours behind the tokens.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ARROWS, nearest } from "./arrows";
import { css, ink, palette, shade, type Theme } from "./colors";
import type { Picture } from "./schema";
import { patchesIn, type Region, shown, type Side } from "./text";
import { stripes } from "./view";

interface Props {
  heading: string;
  side: Side;
  /** How far along the scale each item is, NaN where it is masked or hidden; null where nothing is shown. */
  tones: Float32Array | null;
  signed: boolean;
  theme: Theme;
  /** What the colours are. */
  toned: string;
  pinned: number | null;
  marked: Set<number>;
  region: Region | null;
  onPin(item: number): void;
  /** Gets a rectangle of an image, in its pixels, and the size of the patches that count, or null. */
  onRegion(image: number, box: Region["box"] | null, grain?: number): void;
}

/** Items that are there at once, around the pinned one, where there are more; and those of a block, which is laid out once it is in view, of a long text. */
const LAID_OUT = 20_000;
const [LONG, BLOCK] = [2000, 250];
/** Colours below this share of the scale are not drawn. */
const FAINT = 0.004;

export function Reading({ heading, side, tones, toned, signed, theme, pinned, marked, region, onPin, onRegion }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const spans = useRef<HTMLElement[]>([]);
  const painted = useRef<Set<number>>(new Set());
  const count = side.labels.length;
  const [current, setCurrent] = useState<number | null>(null);
  const half = LAID_OUT / 2;
  const first = count <= LAID_OUT ? 0 : Math.max(Math.min(Math.round(((pinned ?? 0) - half) / half) * half, count - LAID_OUT), 0);
  const last = Math.min(first + LAID_OUT, count);
  useEffect(() => {
    const made: HTMLElement[] = [];
    const parts: HTMLElement[] = [];
    let part = place.current!;
    part.replaceChildren();
    for (let at = first; at < last; at++) {
      if (last - first > LONG && (at - first) % BLOCK === 0) {
        part = document.createElement("div");
        parts.push(part);
      }
      const span = document.createElement("span");
      span.textContent = shown(side.labels[at]) || " ";
      span.dataset.token = String(at);
      if (side.places[at]) span.hidden = true;
      if (side.spaced[at] && !span.hidden && at > first) part.append(" ");
      part.append(span);
      if (span.textContent === "⏎") part.append(document.createElement("br"));
      made[at] = span;
    }
    place.current!.append(...parts);
    spans.current = made;
    painted.current = new Set();
  }, [side, first]);
  useEffect(() => {
    const colors = palette(theme, signed);
    for (const at of painted.current) {
      spans.current[at]?.removeAttribute("style");
      spans.current[at]?.classList.remove("striped");
    }
    painted.current = new Set();
    if (!tones) return;
    for (let at = first; at < last; at++) {
      if (tones[at] !== tones[at]) {
        spans.current[at].classList.add("striped");
        painted.current.add(at);
      }
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
    if (span) reveal(span, place.current!);
    return () => span?.classList.remove("pinned");
  }, [side, first, pinned]);
  useEffect(() => {
    for (const at of marked) spans.current[at]?.classList.add("found");
    return () => {
      for (const at of marked) spans.current[at]?.classList.remove("found");
    };
  }, [side, first, marked]);
  useEffect(() => setCurrent(null), [side]);
  useEffect(() => {
    const span = current === null ? null : spans.current[current];
    span?.classList.add("current");
    span?.scrollIntoView({ block: "nearest" });
    return () => span?.classList.remove("current");
  }, [side, first, current]);
  const click = (event: MouseEvent): void => {
    const at = (event.target as HTMLElement).dataset.token;
    if (at === undefined) return;
    setCurrent(null);
    onPin(Number(at));
  };
  /** Arrows move among words: to the one before or after, or to the nearest of the line above or below. */
  const key = (event: KeyboardEvent): void => {
    const move = ARROWS[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(move || event.key === "Enter" || event.key === " ")) return;
    event.preventDefault();
    event.stopPropagation();
    const from = current ?? pinned;
    if (!move) return void (from !== null && spans.current[from] && onPin(from));
    const words = spans.current.flatMap((span, at) => (span.hidden ? [] : [at]));
    if (from === null || !words.includes(from)) return setCurrent(words[0] ?? null);
    if (move[0]) return setCurrent(words[Math.min(Math.max(words.indexOf(from) + move[0], 0), words.length - 1)]);
    // Lines count before places on them.
    const middle = (at: number): [number, number] => {
      const { left, top, width } = spans.current[at].getBoundingClientRect();
      return [(left + width / 2) / 1e5, top];
    };
    const place = words.indexOf(from);
    setCurrent(nearest(from, words.slice(Math.max(place - LONG, 0), place + LONG), middle, move));
  };
  return (
    <section class={side.images.length ? "reading shown" : "reading"}>
      <h2>{heading}{count > LAID_OUT && `: ${first.toLocaleString("en")} to ${(last - 1).toLocaleString("en")} of ${count.toLocaleString("en")} tokens`}</h2>
      {side.images.length > 0 && <p class="toned">{tones && toned ? `Bright: ${toned}` : ""}&nbsp;</p>}
      {side.images.length > 0 && (
        <div class="images">
          {side.images.map((image, number) => (
            <Patches key={number} image={image} number={number} side={side} tones={tones} signed={signed} theme={theme}
              pinned={pinned} region={region?.image === number ? region : null} onPin={onPin} onRegion={onRegion} />
          ))}
        </div>
      )}
      <div class="tokens live" ref={place} onClick={click} onKeyDown={key} onBlur={() => setCurrent(null)} tabIndex={0} role="group"
        aria-label={`${heading}. Arrow keys move among words; Enter pins one.`} />
      <p class="hidden" aria-live="polite">{current === null ? "" : shown(side.labels[current])}</p>
    </section>
  );
}

/** Scroll a box to one of its words; once more where what came into view was laid out and moved it. */
function reveal(span: HTMLElement, box: HTMLElement, times = 3): void {
  const from = span.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (!times || (from >= 0 && from <= box.clientHeight - 24)) return;
  box.scrollTop += from - box.clientHeight / 2;
  requestAnimationFrame(() => reveal(span, box, times - 1));
}

interface PatchesProps {
  image: Picture;
  number: number;
  side: Side;
  tones: Float32Array | null;
  signed: boolean;
  theme: Theme;
  pinned: number | null;
  region: Region | null;
  onPin(item: number): void;
  onRegion(image: number, box: Region["box"] | null, grain?: number): void;
}

/** Pixels along the longer side of what is laid over an image; and those of a drag that is no click. */
const DETAIL = 512;
const DRAGGED = 5;

/** An image, with what its patches are given laid over it. */
function Patches({ image, number, side, tones, signed, theme, pinned, region, onPin, onRegion }: PatchesProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [dragged, setDragged] = useState<Region["box"] | null>(null);
  const start = useRef<[number, number] | null>(null);
  /** The patch where a region begins that the keyboard extends, and the one where it ends. */
  const ends = useRef<[number, number] | null>(null);
  const { places } = side;
  const scale = DETAIL / Math.max(image.width, image.height);
  const patches = useMemo(() => places.flatMap((place, at) => (place?.image === number ? [{ at, ...place }] : [])), [places, number]);
  /** Numbers of the sizes of patches, from the largest. */
  const sizes = useMemo(() => {
    const area = (grain: number): number => Math.max(...patches.map((each) => ((each.grain ?? 0) === grain ? each.width * each.height : 0)));
    return [...new Set(patches.map((each) => each.grain ?? 0))].sort((a, b) => area(b) - area(a));
  }, [patches]);
  const inside = useMemo(() => new Set(region ? patchesIn(side, region) : []), [side, region]);
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
      // What gets no attention lies in the dark; a difference has colours; what is masked has stripes.
      context.fillStyle = tones![at] !== tones![at] ? context.createPattern(stripes(theme), "repeat")!
        : signed ? css(colors, shade(tone, true)) : "#000";
      context.globalAlpha = tones![at] !== tones![at] ? 0.85 : signed ? 0.15 + 0.7 * Math.abs(tone) : 0.8 * (1 - tone);
      context.fillRect(...box);
    }
    context.globalAlpha = 1;
    const mark = getComputedStyle(canvas.current!).getPropertyValue("--mark");
    const outline = (boxes: Region["box"][], color: string, wide: number): void => {
      context.strokeStyle = color;
      context.lineWidth = (wide * DETAIL) / 128;
      for (const box of boxes) context.strokeRect(...(box.map((each) => each * scale) as Region["box"]));
    };
    const mine = patches.find((each) => each.at === pinned);
    if (mine) outline([boxOf(mine)], mark, 1);
    const chosen = patches.filter((each) => inside.has(each.at));
    const frame = dragged ?? (chosen.length ? around(chosen) : null);
    if (!frame) return;
    outline([frame], "#fff", 1.6);
    outline([frame], mark, 0.9);
  }, [image, patches, tones, signed, theme, pinned, inside, dragged]);
  const place = (event: MouseEvent): [number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    const within = (at: number, room: number): number => Math.min(Math.max(at, 0), room);
    return [within(((event.clientX - box.left) / box.width) * image.width, image.width),
      within(((event.clientY - box.top) / box.height) * image.height, image.height)];
  };
  const between = ([x, y]: [number, number], [toX, toY]: [number, number]): Region["box"] =>
    [Math.min(x, toX), Math.min(y, toY), Math.abs(toX - x), Math.abs(toY - y)];
  const isDrag = ([, , width, height]: Region["box"]): boolean => Math.max(width, height) * (canvas.current!.clientWidth / image.width) > DRAGGED;
  const down = (event: PointerEvent): void => {
    start.current = place(event);
    canvas.current!.setPointerCapture(event.pointerId);
  };
  const moved = (event: PointerEvent): void => {
    if (!start.current) return;
    const box = between(start.current, place(event));
    if (dragged || isDrag(box)) setDragged(box);
  };
  const up = (event: PointerEvent): void => {
    if (!start.current) return;
    const [x, y] = place(event);
    const box = between(start.current, [x, y]);
    stop();
    if (dragged || isDrag(box)) {
      ends.current = null;
      return onRegion(number, box);
    }
    const under = patches.filter((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + each.height);
    under.sort((a, b) => a.width * a.height - b.width * b.height);
    if (under.length) pin(under[0].at);
  };
  /** A patch takes the place of a region. */
  const pin = (at: number): void => {
    ends.current = null;
    onRegion(number, null);
    onPin(at);
  };
  const stop = (): void => {
    start.current = null;
    setDragged(null);
  };
  /** Arrows move among patches of one size; Page Up and Page Down change to larger and smaller ones, where tiles lie on an overview. */
  const key = (event: KeyboardEvent): void => {
    const move = ARROWS[event.key];
    const turn = Number(event.key === "PageDown") - Number(event.key === "PageUp");
    const chosen = patches.filter((each) => inside.has(each.at));
    if (event.key === "Enter" && chosen.length) pin((ends.current ?? [0, chosen[0].at])[1]);
    else if (!(move || turn) || !patches.length) return;
    else {
      const mine = patches.find((each) => each.at === pinned)?.at;
      const [from, to] = chosen.length ? ends.current ?? [chosen[0].at, chosen[chosen.length - 1].at]
        : mine !== undefined ? [mine, mine] : [null, patches[patches.length >> 1].at];
      const last = patches.find((each) => each.at === to)!;
      const centre = ({ x, y, width, height }: Box): [number, number] => [x + width / 2, y + height / 2];
      const away = (each: Box): number => Math.hypot(centre(each)[0] - centre(last)[0], centre(each)[1] - centre(last)[1]);
      const size = ({ grain = 0 }): number => sizes.indexOf(grain);
      const alike = patches.filter((each) => size(each) === Math.min(Math.max(size(last) + turn, 0), sizes.length - 1));
      const at = turn ? alike.reduce((a, b) => (away(b) < away(a) ? b : a)) : from === null ? last : nearest(last, alike, centre, move!);
      ends.current = [event.shiftKey && from !== null && !turn ? from : at.at, at.at];
      onRegion(number, around(patches.filter((each) => ends.current!.includes(each.at))), at.grain ?? 0);
    }
    event.preventDefault();
    event.stopPropagation();
  };
  const name = image.name || (number ? `image ${number + 1}` : "image");
  return (
    <figure class="image live">
      <div>
        <img src={image.data} alt={`The ${name} that was read`} />
        <canvas ref={canvas} width={image.width * scale} height={image.height * scale} role="application" tabIndex={0}
          onPointerDown={down} onPointerMove={moved} onPointerUp={up} onPointerCancel={stop} onKeyDown={key}
          aria-label={`Weights of ${patches.length} patches of ${name}. Arrow keys choose a patch, with Shift a region; ${sizes.length > 1 ? "Page Up and Page Down change to larger and smaller patches; " : ""}Enter pins the patch.`} />
      </div>
      {image.name && <figcaption>{image.name}</figcaption>}
    </figure>
  );
}

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

function boxOf({ x, y, width, height }: Box): Region["box"] {
  return [x, y, width, height];
}

/** Return the rectangle around others. */
function around(boxes: Box[]): Region["box"] {
  const [left, top] = [Math.min(...boxes.map((each) => each.x)), Math.min(...boxes.map((each) => each.y))];
  const right = Math.max(...boxes.map((each) => each.x + each.width));
  return [left, top, right - left, Math.max(...boxes.map((each) => each.y + each.height)) - top];
}

// The text itself, and the image: what the query in question attends to, as colours behind the tokens.

import { useEffect, useRef } from "preact/hooks";
import { along, css, ink, palette, type Scale, shade, type Theme } from "./colors";
import type { Text } from "./schema";
import { shown } from "./tokens";

interface Props {
  heading: string;
  text: Text;
  /** Weights of its tokens, if it is what is read. */
  values: Float32Array | null;
  hidden: Set<number> | null;
  signed: boolean;
  scale: Scale;
  theme: Theme;
  pinned: number | null;
  marked: Set<number>;
  /** What a click on a token does, if it is a query. */
  onPin: ((token: number) => void) | null;
}

/** Colours below this share of the scale are not drawn. */
const FAINT = 0.004;

export function Reading(props: Props) {
  const { text, values, hidden, signed, scale, theme, pinned, marked, onPin } = props;
  const place = useRef<HTMLDivElement>(null);
  const spans = useRef<HTMLElement[]>([]);
  const painted = useRef<Set<number>>(new Set());
  const image = text.image;
  const spaced = !text.tokens.some((token) => /^\s/.test(token));
  const patches = image ? [image.first, image.first + image.rows * image.cols] : [0, 0];
  useEffect(() => {
    const made = text.tokens.map((token, at) => {
      const span = document.createElement("span");
      span.textContent = shown(spaced ? token.replace(/^##(?=.)/, "") : token) || " ";
      span.dataset.token = String(at);
      if (at >= patches[0] && at < patches[1]) span.hidden = true;
      return span;
    });
    const before = (at: number): string[] => (spaced && at > 0 && !text.tokens[at].startsWith("##") ? [" "] : []);
    const parts = made.flatMap((span, at) => [
      ...before(at), span, ...(span.textContent === "⏎" ? [document.createElement("br")] : []),
    ]);
    place.current!.replaceChildren(...parts);
    spans.current = made;
    painted.current = new Set();
  }, [text]);
  const most = values ? values.reduce((m, value, at) => Math.max(m, hidden?.has(at) ? 0 : Math.abs(value)), 0) : 0;
  const colored = (at: number): number =>
    !values || hidden?.has(at) ? 0 : along(scale === "absolute" ? "absolute" : scale, values[at], most);
  useEffect(() => {
    const colors = palette(theme, signed);
    for (const at of painted.current) spans.current[at]?.removeAttribute("style");
    painted.current = new Set();
    if (!values) return;
    for (let at = 0; at < spans.current.length; at++) {
      const t = colored(at);
      if (Math.abs(t) < FAINT) continue;
      const index = shade(t, signed);
      spans.current[at].style.background = css(colors, index);
      spans.current[at].style.color = ink(colors, index);
      painted.current.add(at);
    }
  }, [text, values, hidden, signed, scale, theme]);
  useEffect(() => {
    const span = pinned === null ? null : spans.current[pinned];
    span?.classList.add("pinned");
    const box = place.current!;
    if (span && (span.offsetTop < box.scrollTop || span.offsetTop > box.scrollTop + box.clientHeight - 24))
      box.scrollTop = span.offsetTop - box.clientHeight / 2;
    return () => span?.classList.remove("pinned");
  }, [text, pinned]);
  useEffect(() => {
    for (const at of marked) spans.current[at]?.classList.add("found");
    return () => {
      for (const at of marked) spans.current[at]?.classList.remove("found");
    };
  }, [text, marked]);
  const click = (event: MouseEvent): void => {
    const at = (event.target as HTMLElement).dataset.token;
    if (at !== undefined) onPin?.(Number(at));
  };
  return (
    <section class="reading">
      <h2>{props.heading}</h2>
      {image && (
        <Patches image={image} values={values && Float32Array.from({ length: patches[1] - patches[0] }, (_, i) => colored(patches[0] + i))}
          signed={signed} theme={theme} pinned={pinned} onPin={onPin} />
      )}
      <div class={onPin ? "tokens live" : "tokens"} ref={place} onClick={click} />
    </section>
  );
}

interface PatchesProps {
  image: NonNullable<Text["image"]>;
  /** How far along the scale each patch is. */
  values: Float32Array | null;
  signed: boolean;
  theme: Theme;
  pinned: number | null;
  onPin: ((token: number) => void) | null;
}

/** An image, with what its patches are given laid over it. */
function Patches({ image, values, signed, theme, pinned, onPin }: PatchesProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { rows, cols, first } = image;
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    const side = 16;
    [canvas.current!.width, canvas.current!.height] = [cols * side, rows * side];
    const colors = palette(theme, signed);
    for (let at = 0; values && at < rows * cols; at++) {
      // What is not attended to lies in the dark; a difference has colours.
      context.fillStyle = signed ? css(colors, shade(values[at], true)) : "#000";
      context.globalAlpha = signed ? 0.15 + 0.7 * Math.abs(values[at]) : 0.8 * (1 - values[at]);
      context.fillRect((at % cols) * side, Math.floor(at / cols) * side, side, side);
    }
    const mine = pinned === null ? -1 : pinned - first;
    if (mine >= 0 && mine < rows * cols) {
      context.globalAlpha = 1;
      context.strokeStyle = getComputedStyle(canvas.current!).getPropertyValue("--mark");
      context.lineWidth = 3;
      context.strokeRect((mine % cols) * side + 1.5, Math.floor(mine / cols) * side + 1.5, side - 3, side - 3);
    }
  }, [image, values, signed, theme, pinned]);
  const click = (event: MouseEvent): void => {
    const box = canvas.current!.getBoundingClientRect();
    const col = Math.min(Math.floor(((event.clientX - box.left) / box.width) * cols), cols - 1);
    const row = Math.min(Math.floor(((event.clientY - box.top) / box.height) * rows), rows - 1);
    onPin?.(first + row * cols + col);
  };
  return (
    <div class={onPin ? "image live" : "image"}>
      <img src={image.source} alt="What was read" />
      <canvas ref={canvas} onClick={click} aria-label={`${rows} × ${cols} patches`} />
    </div>
  );
}

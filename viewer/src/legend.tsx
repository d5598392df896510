// The scale: its choice, a colour bar with numbers, and what it means.

import { css, MASKED, palette, type RowFacts, type Scale, SCALES, shade, SIGNED, type Theme, ticks, type Tick } from "./colors";

interface Props {
  scale: Scale;
  theme: Theme;
  signed: boolean;
  /** The row whose numbers the bar has, or null for words instead. */
  facts: RowFacts | null;
  /** A sentence that says whose numbers these are. */
  whose: string;
  /** What has stripes, if anything has. */
  striped: string;
  onScale(scale: Scale): void;
}

/** Return the bar's marks: numbers, or words where rows differ. */
export function marks(scale: Scale, signed: boolean, facts: RowFacts | null): Tick[] {
  if (facts) return ticks(scale, signed, facts);
  if (scale === "even") return [{ at: 0.1, text: "even share" }, { at: 1, text: "all of it" }];
  if (scale === "entropy") return [{ at: 0, text: "even" }, { at: 1, text: "on one key" }];
  return ticks(scale, signed, { count: 2, max: 1, entropy: 0 });
}

/** Return whether a mark's text begins or ends at the mark, so that it stays within the bar. */
export function edge(at: number): "first" | "last" | "" {
  return at < 0.15 ? "first" : at > 0.95 ? "last" : "";
}

/** Return the colours of a bar, at even steps. */
export function steps(theme: Theme, signed: boolean, count = 24): string[] {
  const colors = palette(theme, signed);
  return Array.from({ length: count + 1 }, (_, at) => css(colors, Math.max(Math.round((255 * at) / count), signed ? 0 : 9)));
}

export function says(scale: Scale, signed: boolean): string {
  return signed ? SIGNED : SCALES[scale][1];
}

export function Legend({ scale, theme, signed, facts, whose, striped, onScale }: Props) {
  const [light, dark] = MASKED[theme];
  return (
    <section class="legend" aria-label="Colour scale">
      <label>
        Colour{" "}
        <select aria-label="Scale" value={scale} onChange={(event) => onScale(event.currentTarget.value as Scale)}>
          {Object.entries(SCALES).map(([value, [name]]) => <option key={value} value={value}>{name}</option>)}
        </select>
      </label>
      <div class="bar" role="img" aria-label={`Colour bar: ${marks(scale, signed, facts).map((each) => each.text).join(", ")}`}>
        <div style={{ background: `linear-gradient(90deg, ${steps(theme, signed).join()})` }} />
        {marks(scale, signed, facts).map(({ at, text }) => (
          <span key={at} style={{ left: `${100 * at}%` }} class={edge(at)}>{text}</span>
        ))}
      </div>
      {!signed && scale !== "entropy" && <span class="key"><i style={{ background: css(palette(theme, false), shade(0, false)) }} />zero</span>}
      {striped && <span class="key"><i style={{ background: `repeating-linear-gradient(135deg, ${light} 0 2px, ${dark} 2px 4px)` }} />{striped}</span>}
      <span class="says">{says(scale, signed)}{whose && ` ${whose}`}</span>
    </section>
  );
}

// The page: a grid of heads to choose from, one or two matrices, and the text.

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Address, State } from "./address";
import { ARROWS } from "./arrows";
import type { Fetch } from "./blocks";
import { Camera } from "./camera";
import { along, decimal, NIL, type RowFacts, type Scale, SCALES, type Theme } from "./colors";
import { Explained } from "./explained";
import { drawn } from "./drawn";
import { type Figure, type Saved, savePng, saveSvg } from "./export";
import { Cell as HeadCell, Grid, type Order, ORDERS } from "./grid";
import { Legend, says } from "./legend";
import { Difference, load, loadMean, type Matrix, Merged, MERGED, type Weights } from "./matrix";
import { contents as contentsOf, isStacked, type Overview, Overviews, spread } from "./overview";
import { Plot } from "./plot";
import { Reading } from "./reading";
import type { Page } from "./schema";
import { named, patchesIn, type Region, type Side, sideOf } from "./text";
import { type Cell, colorsOf, type Pin, type View } from "./view";
import { type Ask, Without } from "./without";

/** How many of the largest weights are listed, and at most where more are requested. */
const [LISTED, MOST] = [8, 1000];

const KEYS: [string, string][] = [
  ["arrows", "among heads: move, Enter opens one; in a matrix: move the pinned query or key, or the view; among words: move, Enter pins one; on an image: choose a patch, with Shift a region; Page Up and Page Down: larger and smaller patches, where tiles lie on an overview"],
  ["Escape", "clear the region; unpin; then back to all heads"],
  ["k", "pin queries (what a word attends to) or keys (what attends to a word)"],
  ["+ −", "zoom, as Ctrl or ⌘ and the wheel do; 0 fits the whole matrix"],
  ["[ ]", "previous or next head"],
  ["{ }", "previous or next layer"],
  ["/", "search for a token; Enter finds the next match, Escape returns"],
  ["s", "next colour scale"],
  ["h", "hide special tokens and sinks"],
  ["w", "whole words or tokens"],
  ["d", "dark mode on or off"],
  ["e E", "save what is shown as PNG or SVG"],
];

/** What "Hide sinks" hides. */
const SINKS = "A sink is a key that takes much of the weight of most queries, often the first token. Special tokens are those that the tokenizer adds, such as [CLS].";

interface Props {
  page: Page;
  fetch: Fetch;
  address: Address;
  /** Asks what the model answers without a head; null where there is no model. */
  ask: Ask | null;
}

export function App({ page, fetch, address, ask }: Props) {
  const contents = useMemo(() => contentsOf(page), [page]);
  const { items } = contents;
  const runs = page.runs;
  const alone = items.length === 1;
  const initial = useMemo(() => readState(address.read(), page, contents), []);
  const [open, setOpen] = useState(initial.open || alone);
  const [chosen, setChosen] = useState(initial.chosen);
  const [versus, setVersus] = useState<Versus | null>(initial.versus);
  const [subtract, setSubtract] = useState(initial.subtract);
  const [scale, setScale] = useState<Scale>(initial.scale);
  const [order, setOrder] = useState<Order>(initial.order);
  const [theme, setTheme] = useState<Theme>(isDark() ? "dark" : "light");
  const [bare, setBare] = useState(initial.bare);
  const [merged, setMerged] = useState(initial.merged);
  const [direction, setDirection] = useState<Pin["side"]>(initial.pinned?.side ?? "query");
  const [pinned, setPinned] = useState<Pin | null>(initial.pinned);
  const [region, setRegion] = useState<Region | null>(initial.region);
  const [lacking, setLacking] = useState(initial.lacking);
  const [hovered, setHovered] = useState<Cell | null>(null);
  const [long, setLong] = useState(false);
  const [search, setSearch] = useState("");
  const [help, setHelp] = useState(false);
  const [visited, setVisited] = useState(initial.open);
  const [known, setKnown] = useState<(Overview | null)[]>(() => page.layers.map(() => null));
  const [failed, setFailed] = useState("");
  const [saved, setSaved] = useState<Saved | null>(null);
  const camera = useMemo(() => new Camera(), []);
  const views = useRef<(View | null)[]>([null, null]);
  const root = useRef<HTMLDivElement>(null);
  const searched = useRef<HTMLInputElement>(null);
  const cache = useMemo(() => new Map<number, Promise<Weights>>(), [page]);
  const overviews = useMemo(() => new Overviews(page, fetch), [page, fetch]);
  const run = page.layers[items[chosen].layer].run;
  /** The same head in another run; null where there is none. */
  const counterpart = (number: number, to: number): number | null => {
    const { number: place, kind } = page.layers[items[number].layer];
    const layer = page.layers.findIndex((each) => each.run === to && each.number === place && each.kind === kind);
    return to === run || layer < 0 ? null : contents.ofLayer(layer).find((at) => items[at].head === items[number].head) ?? null;
  };
  const compared = versus === null ? null : "run" in versus ? counterpart(chosen, versus.run) : versus.item;
  const compare = (item: number | null): void => setVersus(item === null ? null : { item });
  const fail = (error: unknown): void => setFailed(String(error instanceof Error ? error.message : error));

  const matrixOf = useCallback(
    (number: number): Promise<Weights> => {
      if (!cache.has(number)) {
        if (cache.size > 24) cache.clear();
        const { layer, head } = items[number];
        const heads = contents.ofLayer(layer).filter((at) => items[at].head !== null);
        const made = head === null
          ? Promise.all(heads.map(matrixOf)).then((all) => loadMean(page, layer, all, overviews, fetch))
          : load(page, page.heads[number], overviews, fetch);
        cache.set(number, made);
        made.catch(() => cache.delete(number));
      }
      return cache.get(number)!;
    },
    [page, fetch],
  );
  const [matrices, setMatrices] = useState<{ numbers: number[]; all: Matrix[] } | null>(null);
  useEffect(() => {
    if (!open) return;
    let current = true;
    const numbers = compared === null ? [chosen] : [chosen, compared];
    Promise.all(numbers.map(matrixOf)).then((all) => current && setMatrices({ numbers, all }), fail);
    return () => void (current = false);
  }, [open, chosen, compared, matrixOf]);

  // Read the layers of the grid one after the other; behind a matrix, once that is there.
  const ready = !open || matrices !== null;
  useEffect(() => {
    let current = true;
    const read = async (): Promise<void> => {
      const wanted = contents.sections(run).flatMap((each) => each.layers);
      const found: [number, Overview][] = [];
      const show = (): void => setKnown((before) => {
        const next = [...before];
        for (const [layer, overview] of found) next[layer] = overview;
        return next;
      });
      for (const layer of wanted) {
        if (!current) return;
        found.push([layer, await overviews.of(layer)]);
        if (page.blocks === "served") show();
      }
      if (current) show();
    };
    if (ready) read().catch(fail);
    return () => void (current = false);
  }, [ready, page, overviews, run]);

  useEffect(() => {
    const parts: [string, string | false][] = [
      ["head", (open || chosen !== contents.sections(0)[0].layers.flatMap(contents.ofLayer)[0]) && String(chosen)],
      ["view", open && !alone && "matrix"], ["compare", versus !== null && ("run" in versus ? `run${versus.run}` : String(versus.item))], ["difference", subtract && "1"],
      ["scale", scale !== initial.usual && scale], ["order", order !== "layer" && order], ["hide", bare && "sinks"],
      ["words", merged && "1"], [pinned?.side ?? "query", pinned !== null && String(pinned.at)],
      ["region", region !== null && [region.side, region.image, ...region.box.map((each) => +each.toFixed(1)), ...(region.grain === undefined ? [] : [region.grain])].join()],
      ["without", lacking && "1"],
    ];
    address.write(Object.fromEntries(parts.filter(([, value]) => value !== false)) as State);
  }, [open, chosen, versus, subtract, scale, order, bare, merged, pinned, region, lacking]);
  useEffect(() => address.listen(() => {
    const state = readState(address.read(), page, contents);
    setOpen(state.open || alone);
    setChosen(state.chosen);
    setVersus(state.versus);
    setSubtract(state.subtract);
    setScale(state.scale);
    setOrder(state.order);
    setBare(state.bare);
    setMerged(state.merged);
    setPinned(state.pinned);
    setRegion(state.region);
    setLacking(state.lacking);
  }), [page]);

  const current = matrices?.numbers[0] ?? chosen;
  const item = items[current];
  const other = matrices && matrices.all.length > 1 ? items[matrices.numbers[1]] : null;
  const layer = page.layers[item.layer];
  const isPicture = layer.kind === "picture";
  const same = other !== null && String(layer.shape) === String(page.layers[other.layer].shape);
  const hides = !isPicture || page.texts.some((each) => each.special.length);
  const hasImages = page.texts[layer.queries].images !== undefined || page.texts[layer.keys].images !== undefined;
  const hasWords = page.texts.some((each) => each.words && each.words.length < each.tokens.length);
  const small = layer.shape[0] * layer.shape[1] <= MERGED;
  const whole = merged && hasWords && small;
  const sides = useMemo(() => new Map<string, Side>(), [page]);
  const side = (text: number): Side => {
    const name = `${text}${whole}`;
    if (!sides.has(name)) sides.set(name, sideOf(page.texts[text], whole));
    return sides.get(name)!;
  };
  const shownMatrices = useMemo(() => {
    if (!matrices) return [];
    const made = matrices.all.map((matrix, at) => {
      const of = page.layers[items[matrices.numbers[at]].layer];
      const groups = [side(of.queries).groups, side(of.keys).groups];
      return whole && (groups[0] || groups[1]) ? new Merged(matrix, groups[0], groups[1]) : matrix;
    });
    if (subtract && same) return [{ matrix: new Difference(made[0], made[1]) as Matrix, of: item }];
    return made.map((matrix, at) => ({ matrix, of: items[matrices.numbers[at]] }));
  }, [matrices, subtract, same, whole]);
  const first = shownMatrices[0]?.matrix ?? null;
  const signed = first?.signed ?? false;
  const [queries, keys] = [side(layer.queries), side(layer.keys)];
  const look = useMemo(() => ({ scale, theme, bare }), [scale, theme, bare]);
  const matches = useMemo(() => {
    const wanted = search.trim().toLowerCase();
    const of = (side: Side): Set<number> =>
      new Set(wanted ? side.labels.flatMap((label, at) => (label.toLowerCase().includes(wanted) ? [at] : [])) : []);
    const key = of(keys);
    return { key, query: queries === keys ? key : of(queries) };
  }, [search, queries, keys]);
  const matched = matches.key.size + (queries === keys ? 0 : matches.query.size);

  const fits = (pin: Pin | null): Pin | null =>
    first && pin && pin.at < (pin.side === "query" ? first.rows : first.cols) ? pin : null;
  const pin = fits(pinned);
  const hover = first && hovered && hovered.row < first.rows && hovered.col < first.cols ? hovered : null;
  const asked = pin ?? (hover && { side: direction, at: direction === "query" ? hover.row : hover.col });
  const [askedSide, askedAt] = [asked?.side ?? "query", asked?.at ?? -1];
  const values = useMemo(
    () => (first && askedAt >= 0 ? (askedSide === "query" ? first.row(askedAt).slice() : first.column(askedAt)) : null),
    [first, askedSide, askedAt],
  );
  const patches = useMemo(() => {
    if (!first || !region) return [];
    const count = region.side === "query" ? first.rows : first.cols;
    return patchesIn(region.side === "query" ? queries : keys, region).filter((at) => at < count);
  }, [first, queries, keys, region]);
  /** What each query gives to the patches of the region, or what these give to each key, on average. */
  const shares = useMemo(() => (first && region && patches.length ? sharesOf(first, region.side, patches) : null), [first, patches]);
  const tones = useMemo(() => {
    if (!first || !(values ?? shares)) return null;
    if (!values) return shares!.map((value) => along("absolute", value, { count: 1, max: 1, entropy: 0 }, signed));
    const used = scale === "entropy" ? "even" : scale;
    const facts = askedSide === "query" ? first.facts(askedAt, bare) : null;
    return values.map((value, at) => {
      if (value !== value || (bare && first.sinks.has(facts ? at : askedAt))) return NaN;
      return value && along(used, value, facts ?? first.facts(at, bare), signed);
    });
  }, [first, values, shares, scale, bare]);
  /** Whose weights are listed: those of the region before those of a query or a key. */
  const [listed, listedSide] = shares ? [shares, region!.side === "key" ? queries : keys] : [values, askedSide === "query" ? keys : queries];
  const toned = values ? askedSide : region?.side === "key" ? "key" : "query";
  const hidden = first && bare && listed && (shares ? region!.side : askedSide) === "query" ? first.sinks : null;

  const choose = (number: number): void => {
    const { shape } = page.layers[items[number].layer];
    if (String(shape) !== String(layer.shape)) {
      setPinned(null);
      setRegion(null);
      setHovered(null);
      const view = views.current[0];
      if (view) camera.fit(shape[0], shape[1], view.plot.width, view.plot.height);
    }
    setChosen(number);
  };
  const enter = (number: number): void => {
    choose(number);
    setOpen(true);
    setVisited(true);
    root.current?.focus();
  };
  const leave = (): void => {
    if (alone) return;
    setHovered(null);
    setOpen(false);
    requestAnimationFrame(() => root.current?.querySelector<HTMLElement>(`[data-head="${chosen}"]`)?.focus());
  };
  const setPin = (next: Pin | null): void => {
    setPinned(next);
    setHovered(null);
    if (next) views.current[0]?.reveal(next.side === "query" ? next.at : null, next.side === "key" ? next.at : null);
  };
  /** Pin a query or a key, or unpin it. */
  const toggle = (which: Pin["side"], at: number): void => {
    setDirection(which);
    setPin(pin?.side === which && pin.at === at ? null : { side: which, at });
  };
  const pick = (row: number | null, col: number | null): void => {
    if (row !== null && (col === null || direction === "query")) toggle("query", row);
    else if (col !== null) toggle("key", col);
  };
  const turn = (to: Pin["side"]): void => {
    setDirection(to);
    if (pin) setPin(queries === keys ? { side: to, at: pin.at } : null);
  };
  const step = (by: number, layers: boolean): void => {
    const all = contents.sections(run).flatMap((each) => each.layers);
    if (!layers) {
      const heads = all.flatMap((each) => contents.ofLayer(each));
      return choose(heads[(heads.indexOf(chosen) + by + heads.length) % heads.length]);
    }
    const to = contents.ofLayer(all[(all.indexOf(items[chosen].layer) + by + all.length) % all.length]);
    choose(to.find((at) => items[at].head === items[chosen].head) ?? to[0]);
  };
  const nextMatch = (): void => {
    // Keys come first where queries are other tokens.
    const sides: Pin["side"][] = queries === keys ? [direction] : ["key", "query"];
    const sorted = sides.flatMap((which) => [...matches[which]].map((at) => ({ side: which, at })));
    const order = (each: Pin): number => each.at + (queries !== keys && each.side === "query" ? keys.labels.length : 0);
    const after = sorted.find((each) => order(each) > (pin ? order(pin) : -1)) ?? sorted[0];
    if (after === undefined) return;
    if (!open) enter(chosen);
    setDirection(after.side);
    setPin(after);
  };
  const live = (): View[] => views.current.filter((view) => view !== null);
  const titleOf = (of: typeof item): string => (subtract && same ? `${item.title} minus ${other!.title}` : of.title);
  const caption = (of: typeof item): string => {
    const { name, kind } = page.layers[of.layer];
    return titleOf(of) + (of.head === null || kind === "picture" || isStacked(page.layers[of.layer]) || !name ? "" : ` · ${name}`);
  };
  const isMasked = useMemo(() => shownMatrices.some(({ matrix }) => {
    for (let row = 0; row < matrix.rows; row++) if (matrix.count(row) < matrix.cols) return true;
    return false;
  }), [shownMatrices]);
  const conceals = bare && shownMatrices.some(({ matrix }) => matrix.sinks.size);
  const striped = first?.partial ? "not among the largest" : [isMasked && "masked", conceals && "hidden"].filter(Boolean).join(" or ");
  /** The row in the middle of all, by what the colours follow from: the number of its keys, or its largest weight. */
  const middle = useMemo(() => {
    if (!first || !first.rows) return null;
    const sizes = Array.from({ length: first.rows }, (_, row) => (scale === "row" ? first.facts(row, bare).max : first.count(row)));
    const sorted = sizes.map((_, row) => row).sort((a, b) => sizes[a] - sizes[b] || a - b);
    const row = sorted[(sorted.length - 1) >> 1];
    return { row, alike: sizes[sorted[0]] === sizes[sorted[sorted.length - 1]] };
  }, [first, scale, bare]);
  const lookedRow = asked?.side === "query" ? asked.at : hover ? hover.row : null;
  const focusRow = lookedRow ?? middle?.row ?? null;
  const facts: RowFacts | null = first && focusRow !== null ? first.facts(focusRow, bare) : null;
  const nameless = (of: Side, at: number): string => `“${named(of, at)}” (${at})`;
  /** Whose numbers a row's colours have. */
  const whose = first && focusRow !== null && facts && !signed && (scale === "even" || scale === "row" || scale === "entropy")
    ? `The colour bar's numbers are for ${lookedRow === null && middle!.alike ? "every row: each" : `row ${nameless(queries, focusRow)}, which`} ${
      scale === "row" ? `has ${decimal(facts.max)} as its largest weight` : `sees ${facts.count.toLocaleString("en")} ${facts.count === 1 ? "key" : "keys"}`}${
      lookedRow === null && !middle!.alike ? " (the median)" : ""}.` : "";
  const evenness = scale === "entropy" && !signed && known[item.layer] ? spread(known[item.layer]!, item.at) : "";
  const entropy = evenness && `Here: ${evenness}.`;
  /** The share of a head's weight that is hidden, as a text; empty where it is not known. */
  const hiddenOf = (matrix: Matrix, of: typeof item): string => {
    if (matrix.signed || matrix.partial || !bare || !matrix.sinks.size) return "";
    if (!whole) return overviewOf(of)?.hidden[of.at].toFixed(2) ?? "";
    let sum = 0;
    for (let row = 0; row < matrix.rows; row++) for (const col of matrix.sinks) sum += matrix.weight(row, col) || 0;
    return (sum / Math.max(matrix.rows, 1)).toFixed(2);
  };
  const concealedNames = (most: number): string => {
    const names = [...first!.sinks].sort((a, b) => a - b).map((at) => named(keys, at));
    return names.slice(0, most).join(", ") + (names.length > most ? " …" : "");
  };
  const concealed = (): string => {
    const share = hiddenOf(first!, item);
    return `Hidden: ${concealedNames(6)}${share && `, with ${share} of all weight`}.`;
  };
  const addsUp = conceals ? "A row adds up to 1 with what is hidden." : "A row adds up to 1.";
  /** What a matrix says below its title, and how much of it is hidden. */
  const noted = (text: string, matrix: Matrix, of: typeof item): string => {
    const share = hiddenOf(matrix, of);
    if (!share) return text;
    return `${text}${text.endsWith(".") ? "" : "."} Stripes hide ${share} of the weight.`;
  };
  /** What has stripes in the grid. */
  const isMaskedAnywhere = known.some((each, at) => each?.counts.some((count) => count < page.layers[at].shape[1]));
  const masks = [isMaskedAnywhere && "masked", bare && "hidden"].filter(Boolean).join(" or ");
  const model = page.models[page.layers[item.layer].record];
  const drawing = { title: page.title, scale, theme, images: [] };
  /** What the grid of heads says, sentence by sentence. */
  const lead = [
    isPicture ? "Each picture shows what every output (row) attends to among the inputs (columns)."
      : "Each square is one attention head. Its rows are queries, the tokens that look; its columns are keys, the tokens they look at. Strong colour: much of a row's weight on one key.",
    ORDERS[order][1],
  ];
  const concealing = bare ? hiddenShares(known.filter((_, at) => page.layers[at].run === run && !isStacked(page.layers[at]))) : "";
  const overall = (): Figure => ({
    ...drawing, colors: colorsOf(root.current!), signed: false, facts: null, striped: masks,
    captions: [[model, isPicture ? "all pictures" : order === "like" ? "all heads" : `all heads, ${ORDERS[order][0]}`].filter(Boolean).join(", ")],
    notes: [...lead, says(scale, false), concealing].filter(Boolean),
  });
  const told = (of: Pin): string =>
    `what ${nameless(of.side === "query" ? queries : keys, of.at)} ${of.side === "query" ? "attends to" : "is attended to by"}`;
  /** What the colours behind words and over images are. */
  const toneOf = !tones ? "" : values && asked ? told(asked) : region!.side === "key" ? "what attends to the region" : "what the region attends to";
  const figure = (): Figure => {
    const over = pin ? told(pin) : "";
    const images = [...root.current!.querySelectorAll(".image")].map((each) => ({
      image: each.querySelector("img")!, over: each.querySelector("canvas")!,
      caption: [each.querySelector("figcaption")?.textContent ?? "image", tones ? `${toneOf || "weights"}; bright: the most` : ""].filter(Boolean).join(": "),
    }));
    const notes = [
      says(scale, signed), whose, entropy, item.summary && !subtract ? `The head ${item.summary.text}.` : "", over && `Outlined: ${over}.`,
      shares ? `Framed on the image: the ${patches.length === 1 ? "patch" : `${patches.length} patches`} of the region.` : "",
      bare && first!.sinks.size ? concealed() : "", whole ? "Whole words: rows of a word's tokens are averaged, columns added." : "",
      shares ? sentence() : "",
    ];
    return {
      ...drawing, colors: colorsOf(root.current!), signed, striped, images,
      captions: shownMatrices.map(({ of }) => (model ? `${model}, ${caption(of)}` : caption(of))),
      notes: notes.filter(Boolean) as string[], facts: facts ?? first!.facts(first!.rows - 1, bare),
    };
  };
  const overviewOf = (of: typeof item): Overview | null => known[of.layer];
  /** What the region has of the weight of a word, or of all. */
  const sentence = (): string => {
    const many = patches.length !== 1;
    const these = many ? `These ${patches.length} patches` : "This patch";
    const of = asked && asked.side !== region!.side ? asked.at : null;
    const value = of === null ? shares!.reduce((sum, each) => sum + each, 0) / shares!.length : shares![of];
    const share = `${first!.partial ? "at least " : ""}${value.toFixed(2)}`;
    if (region!.side === "query") return of === null ? `${these} attend to the keys below.`.replace("patch attend", "patch attends") : `${these} give${many ? "" : "s"} ${nameless(keys, of)} ${share} of ${many ? "their" : "its"} weight.`;
    if (of === null) return `${these} receive${many ? "" : "s"} ${share} of a query's weight, on average over all ${first!.rows} queries${queries.places.some(Boolean) ? ", patches included" : ""}.`;
    const visible = patches.filter((at) => first!.weight(of, at) === first!.weight(of, at)).length;
    const even = signed || first!.partial ? "" : ` An even split would give ${(visible / Math.max(first!.count(of), 1)).toFixed(2)}.`;
    return `${these} receive${many ? "" : "s"} ${share} of the weight of ${nameless(queries, of)}.${even}`;
  };
  const exporting = (save: typeof savePng): void => {
    const grid = root.current!.querySelector<HTMLElement>(".grid[data-state=complete]");
    const made = open ? first && first.rows && save(live(), figure()) : grid && save([drawn(grid, theme)], overall());
    if (made) made.then((file) => {
      // A frame may forbid downloads, and does not say so.
      if (self !== top) {
        root.current!.scrollTop = 0;
        setSaved(file);
      }
      setTimeout(() => URL.revokeObjectURL(file.address), 10_000);
    }, fail);
  };

  /** What a button does that goes away with it: the keys go on to work. */
  const away = (act: () => void) => (): void => {
    act();
    root.current?.focus();
  };

  const key = (event: KeyboardEvent): void => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.tagName === "INPUT" && (target as HTMLInputElement).type === "search") {
      if (event.key === "Escape") {
        event.preventDefault();
        root.current?.focus();
      }
      return;
    }
    if (target.tagName === "SELECT") {
      if (event.key === "Escape") root.current?.focus();
      return;
    }
    const view = open ? views.current[0] : null;
    const scales = Object.keys(SCALES) as Scale[];
    const commands: Record<string, () => void> = {
      "+": () => view?.zoom(1.5), "=": () => view?.zoom(1.5), "-": () => view?.zoom(1 / 1.5), "0": () => view?.fit(),
      "[": () => step(-1, false), "]": () => step(1, false), "{": () => step(-1, true), "}": () => step(1, true),
      "/": () => searched.current?.focus(), s: () => setScale(scales[(scales.indexOf(scale) + 1) % scales.length]),
      h: () => hides && setBare(!bare), w: () => hasWords && rewrite(), k: () => turn(direction === "query" ? "key" : "query"),
      d: () => setTheme(theme === "dark" ? "light" : "dark"),
      e: () => exporting(savePng), E: () => exporting(saveSvg), "?": () => setHelp(!help),
      Escape: () => (saved ? setSaved(null) : help ? setHelp(false) : open && region ? setRegion(null) : open && pin ? setPinned(null) : open && leave()),
    };
    const move = ARROWS[event.key];
    if (move && !open) root.current?.querySelector<HTMLElement>('[data-head][tabindex="0"]')?.focus();
    else if (move && first && pin && move[pin.side === "query" ? 1 : 0]) {
      const [by, count] = pin.side === "query" ? [move[1], first.rows] : [move[0], first.cols];
      setPin({ side: pin.side, at: Math.min(Math.max(pin.at + by, 0), count - 1) });
    } else if (move) camera.pan(-60 * move[0], -60 * move[1]);
    else if (commands[event.key]) commands[event.key]();
    else return;
    event.preventDefault();
  };
  const rewrite = (): void => {
    setMerged(!merged);
    setPinned(null);
    setHovered(null);
  };
  // What a matrix of another shape shows starts from the whole of it.
  const shape = first ? `${first.rows} × ${first.cols}` : "";
  useEffect(() => {
    if (first) views.current[0]?.fit();
  }, [shape]);

  const name = (of: Side, at: number) => <bdi>{named(of, at)}</bdi>;
  const spoken = (cell: Cell) => {
    const text = (matrix: Matrix): string => {
      const weight = matrix.weight(cell.row, cell.col);
      return weight === weight ? weight.toPrecision(4) : matrix.partial ? "not among the largest" : "masked";
    };
    const second = !signed && same && shownMatrices[1] ? ` and ${text(shownMatrices[1].matrix)}` : "";
    return <>{name(queries, cell.row)} ({cell.row}) → {name(keys, cell.col)} ({cell.col}): {first ? text(first) : ""}{second}</>;
  };
  /** With words there, patches that look at a region are not listed. */
  const isWord = (at: number): boolean => !listedSide.places[at] && !listedSide.special.has(at);
  const wordsAlone = shares !== null && region!.side === "key" && listedSide.labels.some((_, at) => isWord(at));
  const unlisted = (at: number): boolean => wordsAlone && Boolean(listedSide.places[at]);
  const listable = useMemo(() => {
    const found: number[] = [];
    listed?.forEach((value, at) => value && !hidden?.has(at) && !unlisted(at) && found.push(at));
    return found;
  }, [listed, hidden]);
  const largest = useMemo(() => {
    const found: number[] = [];
    const size = (at: number): number => Math.abs(listed![at]);
    if (long) return [...listable].sort((a, b) => size(b) - size(a)).slice(0, MOST);
    for (const at of listable) {
      if (found.length === LISTED && size(at) <= size(found[LISTED - 1])) continue;
      const behind = found.findIndex((each) => size(each) < size(at));
      found.splice(behind < 0 ? found.length : behind, 0, at);
      found.length = Math.min(found.length, LISTED);
    }
    return found;
  }, [listable, long]);
  const hiddenShare = listed && hidden ? [...hidden].reduce((sum, at) => sum + (listed[at] || 0), 0) : 0;
  /** The weight of a full bar: 1, unless effective weights are larger. */
  const most = Math.max(1, largest.length && listed ? Math.abs(listed[largest[0]]) : 1);
  /** With words there, a patch is pinned as a key: it shows its words. */
  const lookedAt = (at: number): boolean => Boolean(keys.places[at]) && keys.places.some((each, i) => !each && !keys.special.has(i));
  const onList = (at: number): void =>
    toggle(shares ? (region!.side === "key" ? "query" : "key") : askedSide === "query" && queries !== keys ? "key" : askedSide === "key" && queries !== keys ? "query" : direction, at);

  const plain = { signed, theme, toned: toneOf };
  const regional = (side: Pin["side"]) => ({
    marked: matches[side],
    region: region?.side === side || queries === keys ? region : null,
    onRegion: (image: number, box: Region["box"] | null, grain?: number) => setRegion(box && { side, image, box, grain }),
  });
  const sections = contents.sections(run);
  const strip = isPicture ? page.heads.map((_, at) => at) : contents.ofLayer(item.layer);
  const orders = (Object.keys(ORDERS) as Order[]).filter((each) => each !== "label" || items.some((of) => of.summary));
  const cells = { page, contents, run, overviews: known, scale, theme, bare, order, chosen, compared, visited, onCompare: compare };
  const runName = (at: number): string => {
    const { record, sequence, name } = runs[at];
    const parts = [page.records.length > 1 ? page.records[record] : "",
      runs.some((each) => each.sequence) ? `sequence ${sequence}` : "", name];
    return parts.filter(Boolean).join(", ");
  };
  const changeRun = (to: number): void => {
    const layers = page.layers.flatMap((each, at) => (each.run === to ? [at] : []));
    const number = page.layers[items[chosen].layer].number;
    const like = contents.ofLayer(layers.find((at) => page.layers[at].number === number) ?? layers[0]);
    choose(like.find((at) => items[at].head === items[chosen].head) ?? like[0]);
  };
  const explained = signed && subtract ? "Each cell is the weight in the first minus that in the second."
    : isPicture ? "Each row is one output, and each column one input: a row shows what the output attends to."
    : isStacked(layer) ? `${layer.name}.`
    : layer.kind === "cross" ? "Rows are queries: tokens of the output, which look. Columns are keys: tokens of the input, which they look at. " + addsUp
    : "Rows are queries: tokens that look. Columns are keys: tokens that they look at. " + addsUp;
  return (
    <div class="app" data-theme={theme} ref={root} tabIndex={-1} onKeyDown={key}>
      <header>
        <h1 title={page.title}>{page.title}</h1>
        <div class="tools">
          {runs.length > 1 && (
            <label>
              Show{" "}
              <select aria-label="Sequence and run" value={run} onChange={(event) => changeRun(Number(event.currentTarget.value))}>
                {runs.map((_, at) => <option key={at} value={at}>{runName(at)}</option>)}
              </select>
            </label>
          )}
          {!open && !isPicture && (
            <label>
              Order{" "}
              <select aria-label="Order of heads" value={order} onChange={(event) => setOrder(event.currentTarget.value as Order)}>
                {orders.map((each) => <option key={each} value={each}>{ORDERS[each][0]}</option>)}
              </select>
            </label>
          )}
          {open && !alone && (
            <label>
              Compare with{" "}
              <select aria-label="Compare with" value={versus === null ? "" : "run" in versus ? `run${versus.run}` : versus.item}
                onChange={(event) => setVersus(readVersus(event.currentTarget.value, page, items.length))}>
                <option value="">nothing</option>
                {runs.length > 1 && (
                  <optgroup label="The same head in">
                    {runs.map((_, at) => counterpart(chosen, at) !== null && <option key={at} value={`run${at}`}>{runName(at)}</option>)}
                  </optgroup>
                )}
                {page.layers.map((_, at) => (
                  <optgroup key={at} label={items[contents.ofLayer(at)[0]].title.replace(/, head.*/, "")}>
                    {contents.ofLayer(at).map((number) => <option key={number} value={number}>{items[number].title}</option>)}
                  </optgroup>
                ))}
              </select>
            </label>
          )}
          {open && other && (
            <label title={same ? "The first minus the second" : "These matrices differ in shape"}>
              <input type="checkbox" checked={subtract && same} disabled={!same} onChange={() => setSubtract(!subtract)} /> Difference
            </label>
          )}
          {open && hasWords && (
            <label title={small ? "The tokens of a word become one: rows averaged, columns added" : "This matrix is too large"}>
              <input type="checkbox" checked={whole} disabled={!small} onChange={rewrite} /> Whole words
            </label>
          )}
          {hides && (
            <Explained says={SINKS}>
              {(id) => (
                <label>
                  <input type="checkbox" aria-describedby={id} checked={bare} onChange={() => setBare(!bare)} /> Hide sinks and special tokens
                </label>
              )}
            </Explained>
          )}
          {open && conceals && first && <span class="concealed">hidden here: {concealedNames(4)}{hiddenOf(first, item) && ` (${hiddenOf(first, item)})`}</span>}
          <input ref={searched} type="search" placeholder="Find a token" aria-label="Search for a token" value={search}
            onInput={(event) => setSearch(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && nextMatch()} />
          {search && <span class="count" role="status">{matched} found{!open && matched > 0 && ": Enter opens"}</span>}
          <button type="button" title="Save what is shown as a picture" onClick={() => exporting(savePng)}>PNG</button>
          <button type="button" title="Save what is shown as a drawing, whose text can be edited" onClick={() => exporting(saveSvg)}>SVG</button>
          <button type="button" aria-label="Dark mode" aria-pressed={theme === "dark"} onClick={() => setTheme(theme === "dark" ? "light" : "dark")}>◐</button>
          <button type="button" aria-label="Keyboard shortcuts" aria-expanded={help} onClick={() => setHelp(!help)}>?</button>
        </div>
      </header>
      <Legend scale={scale} theme={theme} signed={open && signed} facts={open ? facts : null} striped={open ? striped : masks} onScale={setScale}
        whose={open ? [whose, entropy].filter(Boolean).join(" ") : ""} />
      {help && (
        <section class="help" aria-label="Keyboard shortcuts">
          <dl>{KEYS.flatMap(([keys, does]) => [<dt key={keys}>{keys}</dt>, <dd key={does}>{does}</dd>])}</dl>
        </section>
      )}
      {saved && (
        <section class="saved" aria-label="The saved picture">
          <button type="button" class="close" aria-label="Close" onClick={away(() => setSaved(null))}>×</button>
          <p role="status">Saved as {saved.name}. If there is no such file, this notebook forbids downloads: copy the picture from here.</p>
          <img src={saved.address} alt={saved.name} />
        </section>
      )}
      {failed && <p class="failed" role="alert">{failed}</p>}
      {!open ? (
        <main class="heads" aria-label="All heads">
          <p class="lead">{lead.filter(Boolean).join(" ")} <b>Click one to open it.</b> {concealing}</p>
          <Grid {...cells} onChoose={enter} />
        </main>
      ) : (
        <div class="body">
          {!alone && (
            <nav aria-label={isPicture ? "Pictures" : "Heads of this layer"}>
              <button type="button" class="back" onClick={leave}>‹ All {isPicture ? "pictures" : "heads"}</button>
                {!isPicture && (
            <>
              <label>
                <span class="hidden">Layer </span>
                <select aria-label="Layer" value={items[chosen].layer} onChange={(event) => {
                  const to = contents.ofLayer(Number(event.currentTarget.value));
                  choose(to.find((at) => items[at].head === items[chosen].head) ?? to[0]);
                }}>
                  {sections.map((each) => (
                    <optgroup key={each.title} label={each.title || "Layers"}>
                      {each.layers.map((at) => <option key={at} value={at}>{contents.layerName(at)}</option>)}
                    </optgroup>
                  ))}
                </select>
              </label>
              <label>
                <span class="hidden">Head </span>
                <select aria-label="Head" value={chosen} onChange={(event) => choose(Number(event.currentTarget.value))}>
                  {contents.ofLayer(items[chosen].layer).map((at) => (
                    <option key={at} value={at}>{items[at].head === null ? "mean of heads" : isStacked(layer) ? "all" : `head ${items[at].head}`}</option>
                  ))}
                </select>
              </label>
            </>
          )}
              <div class={isPicture ? "strip named" : "strip"}>
                {strip.map((at) => (
                  <HeadCell {...cells} key={at} at={at} item={items[at]} focused side={36} onChoose={choose}
                    labels={[isPicture ? items[at].title : items[at].head === null ? "mean" : isStacked(layer) ? layer.kind : `${items[at].head} ${items[at].summary?.label ?? ""}`.trim()]}
                    pressed={at === chosen ? "chosen" : at === compared ? "compared" : ""} />
                ))}
              </div>
            </nav>
          )}
          <main class={shownMatrices.length > 1 ? "two" : ""} aria-label="Attention weights">
            {shownMatrices.map(({ matrix, of }, at) => (
              <Plot key={at} matrix={matrix} queries={side(page.layers[of.layer].queries)} keys={side(page.layers[of.layer].keys)}
                camera={camera} look={look} title={caption(of)} zooms={at === 0}
                note={noted(of.summary?.text ?? explained, matrix, of)} pinned={pin} hovered={hover} marked={matches} onHover={setHovered} onPick={pick}
                onView={(view) => void (views.current[at] = view)} />
            ))}
          </main>
          <aside class="texts" aria-label="Text">
            {ask && item.head !== null && !isPicture && !isStacked(layer) && (lacking
              ? <Without key={current} layer={item.layer} head={item.head} title={item.title} ask={ask} onClose={away(() => setLacking(false))} />
              : (
                <Explained says="Runs the model once more without this head, and shows both answers.">
                  {(id) => <button type="button" aria-describedby={id} onClick={() => setLacking(true)}>Without this head</button>}
                </Explained>
              ))}
            <output role="status">
              {shares && <>{sentence()} </>}
              {hover ? spoken(hover)
                : shares ? ""
                : pin ? <>{name(pin.side === "query" ? queries : keys, pin.at)} ({pin.at}) is pinned{pin.side === "key" ? " as a key" : ""}</>
                : "Point at a cell for its weight. Click a word to see what it attends to." + (hasImages ? " Drag over an image to add up its patches." : "")}
            </output>
            <fieldset>
              <legend>{queries === keys ? "A click on a word shows" : "A click in the matrix pins"}</legend>
              <label><input type="radio" name="direction" checked={direction === "query"} onChange={() => turn("query")} /> {queries === keys ? "what it attends to" : "a cell pins its row"}</label>
              <label><input type="radio" name="direction" checked={direction === "key"} onChange={() => turn("key")} /> {queries === keys ? "what attends to it" : "its column"}</label>
            </fieldset>
            <section class="list">
              <h2>
                {shares ? (
                  <>
                    {patches.length === 1 ? "1 patch " : `${patches.length} patches `}
                    {region!.side === "key" ? (patches.length === 1 ? "is looked at by" : "are looked at by") : (patches.length === 1 ? "attends to" : "attend to")}
                    {" "}<button type="button" onClick={away(() => setRegion(null))} aria-label="Clear region">Clear</button>
                  </>
                ) : asked === null ? <span aria-hidden="true"> </span> : asked.side === "query"
                  ? <>“{name(queries, asked.at)}” ({asked.at}) attends to</> : <>“{name(keys, asked.at)}” ({asked.at}) is attended to by</>}
                {largest.length < listable.length && <small> · {largest.length.toLocaleString("en")} of {listable.length.toLocaleString("en")}</small>}
                {listable.length > LISTED && (
                  <button type="button" aria-expanded={long} onClick={() => setLong(!long)}>
                    {long ? `Show only ${LISTED}` : listable.length > MOST ? `Show ${MOST.toLocaleString("en")}` : "Show all"}
                  </button>
                )}
              </h2>
              <ol class="largest">
                {largest.map((at) => (
                  <li key={at}>
                    <button type="button" onClick={() => onList(at)}>
                      <b><bdi>{named(listedSide, at)}</bdi></b> <small>{at}</small>
                      <i style={Math.abs(listed![at]) < NIL ? { visibility: "hidden" } : { width: `${(100 * Math.abs(listed![at])) / most}%` }} aria-hidden="true" />
                      {" "}<span>{decimal(listed![at])}</span>
                    </button>
                  </li>
                ))}
              </ol>
              {hidden && hidden.size > 0 && listed && (
                <p class="share">Hidden: {[...hidden].slice(0, 4).map((at) => named(keys, at)).join(", ")}{hidden.size > 4 ? " …" : ""}, with {hiddenShare.toFixed(2)} of the weight</p>
              )}
            </section>
            {queries === keys ? (
              <Reading {...plain} {...regional(keys.places.some((_, at) => lookedAt(at)) ? "key" : direction)} heading="Text" side={keys} tones={tones}
                pinned={askedAt >= 0 ? askedAt : null} onPin={(at) => toggle(lookedAt(at) ? "key" : direction, at)} />
            ) : (
              <>
                <Reading {...plain} {...regional("query")} heading={layer.kind === "picture" ? "Output" : layer.kind === "cross" ? "Queries: the output" : "Queries"} side={queries}
                  tones={toned === "key" ? tones : null} pinned={askedSide === "query" && askedAt >= 0 ? askedAt : null} onPin={(at) => toggle("query", at)} />
                <Reading {...plain} {...regional("key")} heading={layer.kind === "picture" ? "Input" : layer.kind === "cross" ? "Keys: the input" : "Keys"} side={keys}
                  tones={toned === "query" ? tones : null} pinned={askedSide === "key" && askedAt >= 0 ? askedAt : null} onPin={(at) => toggle("key", at)} />
              </>
            )}
          </aside>
        </div>
      )}
      <footer>{page.note}</footer>
    </div>
  );
}

/** Whether a notebook around the page is dark, or else whether its reader prefers that. */
function isDark(): boolean {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  return vscodeThemeKind ? /dark|high-contrast$/.test(vscodeThemeKind) : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** What a head is compared with: another, or the same in another run. */
type Versus = { item: number } | { run: number };

function readVersus(text: string | undefined, page: Page, items: number): Versus | null {
  const found = /^(run)?(\d+)$/.exec(text ?? "");
  if (!found || Number(found[2]) >= (found[1] ? page.runs.length : items)) return null;
  return found[1] ? { run: Number(found[2]) } : { item: Number(found[2]) };
}

function readRegion(text: string | undefined): Region | null {
  const found = /^(query|key),(\d+),([\d.]+),([\d.]+),([\d.]+),([\d.]+)(?:,(\d+))?$/.exec(text ?? "");
  if (!found) return null;
  const [image, ...box] = found.slice(2, 7).map(Number);
  return box.some(isNaN) ? null : { side: found[1] as Region["side"], image, box: box as Region["box"], grain: found[7] === undefined ? undefined : Number(found[7]) };
}

/** Return what each query gives to some keys, or what each key is given by some queries, on average. */
function sharesOf(matrix: Matrix, side: Region["side"], patches: number[]): Float32Array {
  if (side === "key")
    return Float32Array.from({ length: matrix.rows }, (_, row) => patches.reduce((sum, col) => sum + (matrix.weight(row, col) || 0), 0));
  const shares = new Float32Array(matrix.cols);
  for (const row of patches) matrix.row(row).forEach((value, col) => (shares[col] += (value || 0) / patches.length));
  return shares;
}

/** Return how much weight heads hide, of the layers that are known. */
function hiddenShares(known: (Overview | null)[]): string {
  const all = known.flatMap((each) => (each ? [...each.hidden] : []));
  if (!all.length) return "";
  const mean = all.reduce((sum, each) => sum + each, 0) / all.length;
  return `Stripes hide ${mean.toFixed(2)} of all weight, from ${Math.min(...all).toFixed(2)} to ${Math.max(...all).toFixed(2)} of a head's.`;
}

/** Return what an address says to show; what it does not say, or says wrongly, is as usual. */
function readState(state: State, page: Page, contents: ReturnType<typeof contentsOf>) {
  const number = (text: string | undefined, below: number): number | null =>
    text !== undefined && /^\d+$/.test(text) && Number(text) < below ? Number(text) : null;
  const count = contents.items.length;
  const usual: Scale = "even";
  const first = contents.sections(0)[0].layers.flatMap(contents.ofLayer)[0];
  const most = Math.max(...page.texts.map((each) => each.tokens.length));
  const [query, key] = [number(state.query, most), number(state.key, most)];
  return {
    open: state.view === "matrix", chosen: number(state.head, count) ?? first, versus: readVersus(state.compare, page, count),
    region: readRegion(state.region), lacking: state.without === "1",
    subtract: state.difference === "1", usual, scale: state.scale in SCALES ? (state.scale as Scale) : usual,
    order: state.order in ORDERS ? (state.order as Order) : "layer" as Order, bare: state.hide === "sinks", merged: state.words === "1",
    pinned: query !== null ? { side: "query", at: query } as Pin : key !== null ? { side: "key", at: key } as Pin : null,
  };
}

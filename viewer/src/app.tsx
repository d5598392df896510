// The page: heads to choose from, one or two matrices, and the text.

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Fetch } from "./blocks";
import { Camera } from "./camera";
import { type Scale, SCALES, type Theme } from "./colors";
import { savePng, saveSvg } from "./export";
import { Heads, headTitle } from "./heads";
import { Difference, load, type Matrix } from "./matrix";
import { type Overview, Overviews } from "./overview";
import { Plot } from "./plot";
import { Reading } from "./reading";
import type { Head, Page } from "./schema";
import { label } from "./tokens";
import type { Cell, View } from "./view";

/** How many of the largest weights are listed. */
const LISTED = 8;

const KEYS: [string, string][] = [
  ["arrows", "move the pinned query, or the view"],
  ["+ −", "zoom; 0 fits the whole matrix"],
  ["[ ]", "previous or next head"],
  ["{ }", "previous or next layer"],
  ["/", "search for a token; Enter finds the next match"],
  ["s", "next scale"],
  ["h", "hide special tokens and sinks"],
  ["d", "dark mode on or off"],
  ["e E", "save the view as PNG or SVG"],
  ["Escape", "unpin"],
];

export function App({ page, fetch }: { page: Page; fetch: Fetch }) {
  const [chosen, setChosen] = useState(0);
  const [compared, setCompared] = useState<number | null>(null);
  const [subtract, setSubtract] = useState(false);
  const [scale, setScale] = useState<Scale>(page.layers[0].kind === "picture" ? "absolute" : "row");
  const [theme, setTheme] = useState<Theme>(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [bare, setBare] = useState(false);
  const [pinned, setPinned] = useState<number | null>(null);
  const [hovered, setHovered] = useState<Cell | null>(null);
  const [search, setSearch] = useState("");
  const [help, setHelp] = useState(false);
  const [known, setKnown] = useState<(Overview | null)[]>(() => page.layers.map(() => null));
  const [failed, setFailed] = useState("");
  const camera = useMemo(() => new Camera(), []);
  const views = useRef<(View | null)[]>([null, null]);
  const root = useRef<HTMLDivElement>(null);
  const searched = useRef<HTMLInputElement>(null);
  const cache = useMemo(() => new Map<number, Promise<Matrix>>(), [page]);
  const overviews = useMemo(() => new Overviews(page, fetch), [page, fetch]);

  const matrixOf = useCallback(
    (number: number) => {
      if (!cache.has(number)) {
        if (cache.size > 24) cache.clear();
        cache.set(number, load(page, page.heads[number], overviews, fetch));
      }
      return cache.get(number)!;
    },
    [page, fetch],
  );
  const fail = (error: unknown): void => setFailed(String(error instanceof Error ? error.message : error));
  const [matrices, setMatrices] = useState<{ numbers: number[]; all: Matrix[] } | null>(null);
  useEffect(() => {
    let current = true;
    const numbers = compared === null ? [chosen] : [chosen, compared];
    Promise.all(numbers.map(matrixOf)).then((all) => current && setMatrices({ numbers, all }), fail);
    return () => void (current = false);
  }, [chosen, compared, matrixOf]);

  // Load layers one after the other, so that requests for visible data do not wait for all of them.
  const ready = matrices !== null;
  useEffect(() => {
    let current = true;
    const read = async (): Promise<void> => {
      for (let layer = 0; layer < page.layers.length && current; layer++) {
        const found = await overviews.of(layer);
        if (page.blocks === "served" || layer % 16 === 15) await new Promise((done) => setTimeout(done));
        setKnown((before) => before.map((each, at) => (at === layer ? found : each)));
      }
    };
    if (ready) read().catch(fail);
    return () => void (current = false);
  }, [ready, page, overviews]);

  const head = page.heads[matrices ? matrices.numbers[0] : chosen];
  const other = matrices && matrices.all.length > 1 ? page.heads[matrices.numbers[1]] : null;
  const layer = page.layers[head.layer];
  const same = other !== null && String(layer.shape) === String(page.layers[other.layer].shape);
  const shownMatrices = useMemo(() => {
    if (!matrices) return [];
    if (subtract && same) return [{ matrix: new Difference(matrices.all[0], matrices.all[1]) as Matrix, head }];
    return matrices.all.map((matrix, i) => ({ matrix, head: page.heads[matrices.numbers[i]] }));
  }, [matrices, subtract, same]);
  const first = shownMatrices[0]?.matrix ?? null;
  const queries = page.texts[layer.queries];
  const keys = page.texts[layer.keys];
  const look = useMemo(() => ({ scale, theme, bare }), [scale, theme, bare]);
  const matches = useMemo(() => {
    const wanted = search.trim().toLowerCase();
    return new Set(wanted ? keys.tokens.flatMap((token, at) => (token.toLowerCase().includes(wanted) ? [at] : [])) : []);
  }, [search, keys]);

  const row = first && pinned !== null && pinned < first.rows ? pinned : null;
  const asked = row ?? hovered?.row ?? null;
  const values = useMemo(() => (first && asked !== null && asked < first.rows ? first.row(asked).slice() : null), [first, asked]);
  const hidden = first && bare ? first.sinks : null;

  const choose = (number: number): void => {
    const { shape } = page.layers[page.heads[number].layer];
    if (String(shape) !== String(layer.shape)) {
      setPinned(null);
      setHovered(null);
      camera.fit(shape[0], shape[1], ...plotSize(views.current[0]));
    }
    setChosen(number);
  };
  const pin = (at: number | null, col: number | null = null): void => {
    setPinned(at);
    if (at !== null) views.current[0]?.reveal(at, col);
  };
  const step = (by: number, layers: boolean): void => {
    const count = page.heads.length;
    let next = (chosen + by + count) % count;
    if (layers) {
      const from = page.heads[chosen].layer;
      while (page.heads[next].layer === from && next !== chosen) next = (next + by + count) % count;
      const to = page.heads[next].layer;
      const wanted = page.heads.findIndex((each) => each.layer === to && each.head === head.head);
      if (wanted >= 0) next = wanted;
    }
    choose(next);
  };
  const nextMatch = (): void => {
    const sorted = [...matches];
    const after = sorted.find((at) => at > (pinned ?? -1)) ?? sorted[0];
    if (after === undefined) return;
    if (queries === keys) pin(after);
    else views.current[0]?.reveal(pinned ?? 0, after);
  };
  const name = `${page.title} ${headTitle(page, head)}`;
  const live = (): View[] => views.current.filter((view) => view !== null);

  const key = (event: KeyboardEvent): void => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.tagName === "INPUT" || target.tagName === "SELECT") {
      if (event.key === "Escape") target.blur();
      return;
    }
    const view = views.current[0];
    const moves: Record<string, [number, number]> = {
      ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0],
    };
    const scales = Object.keys(SCALES) as Scale[];
    const commands: Record<string, () => void> = {
      "+": () => view?.zoom(1.5), "=": () => view?.zoom(1.5), "-": () => view?.zoom(1 / 1.5), "0": () => view?.fit(),
      "[": () => step(-1, false), "]": () => step(1, false), "{": () => step(-1, true), "}": () => step(1, true),
      "/": () => searched.current?.focus(), s: () => setScale(scales[(scales.indexOf(scale) + 1) % scales.length]),
      h: () => setBare(!bare), d: () => setTheme(theme === "dark" ? "light" : "dark"),
      e: () => savePng(live(), name), E: () => saveSvg(live(), name), "?": () => setHelp(!help),
      Escape: () => (help ? setHelp(false) : setPinned(null)),
    };
    const move = moves[event.key];
    if (move && row !== null && move[1]) pin(Math.min(Math.max(row + move[1], 0), layer.shape[0] - 1));
    else if (move) camera.pan(-60 * move[0], -60 * move[1]);
    else if (commands[event.key]) commands[event.key]();
    else return;
    event.preventDefault();
  };

  const spoken = (cell: Cell): string => {
    const [query, token] = [queries.tokens[cell.row] ?? "", keys.tokens[cell.col] ?? ""].map(label);
    const said = first && cell.row < first.rows && cell.col < first.cols ? first.weight(cell.row, cell.col) : 0;
    const text = (weight: number): string => (Number.isNaN(weight) ? "not among the largest" : weight.toPrecision(4));
    const second = !first?.signed && same && matrices ? ` and ${text(matrices.all[1].weight(cell.row, cell.col))}` : "";
    return `${query} (${cell.row}) → ${token} (${cell.col}): ${text(said)}${second}`;
  };
  const largest = useMemo(() => {
    if (!values) return [];
    const cols = Array.from(values.keys()).filter((at) => values[at] !== 0 && !hidden?.has(at));
    return cols.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, LISTED);
  }, [values, hidden]);

  const plain = { signed: first?.signed ?? false, scale, theme, marked: matches };
  const pinToken = (at: number): void => pin(at === pinned ? null : at);
  return (
    <div class="app" data-theme={theme} ref={root} tabIndex={-1} onKeyDown={key}>
      <header>
        <h1>{page.title}</h1>
        <div class="tools">
          <label>
            Scale{" "}
            <select aria-label="Scale" value={scale} onChange={(event) => setScale(event.currentTarget.value as Scale)}>
              {Object.entries(SCALES).map(([value, text]) => <option key={value} value={value}>{text}</option>)}
            </select>
          </label>
          {page.heads.length > 1 && (
            <label>
              Compare with{" "}
              <select aria-label="Compare with" value={compared ?? ""}
                onChange={(event) => setCompared(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}>
                <option value="">nothing</option>
                {page.heads.map((each, at) => <option key={at} value={at}>{headTitle(page, each)}</option>)}
              </select>
            </label>
          )}
          {same && (
            <label><input type="checkbox" checked={subtract} onChange={() => setSubtract(!subtract)} /> Difference</label>
          )}
          <label title="Special tokens, and the key that receives most of the attention">
            <input type="checkbox" checked={bare} onChange={() => setBare(!bare)} /> Hide sinks
          </label>
          <input ref={searched} type="search" placeholder="Search for a token" aria-label="Search for a token" value={search}
            onInput={(event) => setSearch(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && nextMatch()} />
          {search && <span class="count">{matches.size}</span>}
          <button type="button" onClick={() => savePng(live(), name)}>PNG</button>
          <button type="button" onClick={() => saveSvg(live(), name)}>SVG</button>
          <button type="button" aria-label="Dark mode" onClick={() => setTheme(theme === "dark" ? "light" : "dark")}>◐</button>
          <button type="button" aria-label="Keyboard shortcuts" aria-expanded={help} onClick={() => setHelp(!help)}>?</button>
        </div>
      </header>
      {help && (
        <dl class="help">
          {KEYS.flatMap(([keys, does]) => [<dt key={keys}>{keys}</dt>, <dd key={does}>{does}</dd>])}
        </dl>
      )}
      {failed && <p class="failed" role="alert">{failed}</p>}
      <div class="body">
        <Heads page={page} overviews={known} theme={theme} chosen={chosen} compared={compared} onChoose={choose}
          onCompare={setCompared} />
        <main class={shownMatrices.length > 1 ? "two" : ""}>
          {shownMatrices.map(({ matrix, head: of }, at) => (
            <Plot key={at} matrix={matrix} queries={page.texts[page.layers[of.layer].queries]}
              keys={page.texts[page.layers[of.layer].keys]} camera={camera} look={look}
              title={subtract && same ? `${headTitle(page, head)} minus ${headTitle(page, other!)}` : plotTitle(page, of)}
              pinned={row} hovered={hovered} marked={matches} onHover={setHovered}
              onPin={(cell) => pin(cell.row === pinned ? null : cell.row)} onView={(view) => void (views.current[at] = view)} />
          ))}
        </main>
        <div class="texts">
          <output role="status">{hovered ? spoken(hovered) : row !== null ? `${label(queries.tokens[row] ?? "")} (${row}) is pinned` : "Point at a cell; click to pin its query"}</output>
          <ol class="largest">
            {largest.map((col) => (
              <li key={col}><b>{label(keys.tokens[col] ?? "")}</b> <small>{col}</small> <span>{values![col].toFixed(4)}</span></li>
            ))}
          </ol>
          {queries === keys ? (
            <Reading {...plain} heading="Text" text={keys} values={values} hidden={hidden} pinned={asked} onPin={pinToken} />
          ) : (
            <>
              <Reading {...plain} heading={layer.kind === "picture" ? "Output" : "Queries"} text={queries} values={null} hidden={null} pinned={asked} onPin={pinToken} />
              <Reading {...plain} heading={layer.kind === "picture" ? "Input" : "Keys"} text={keys} values={values} hidden={hidden} pinned={null} onPin={null} />
            </>
          )}
        </div>
      </div>
      <footer>{page.note}</footer>
    </div>
  );
}

function plotTitle(page: Page, head: Head): string {
  const { kind, name } = page.layers[head.layer];
  return headTitle(page, head) + (kind === "picture" || !name ? "" : ` · ${name}`);
}

function plotSize(view: View | null): [number, number] {
  return view ? [view.plot.width, view.plot.height] : [600, 600];
}

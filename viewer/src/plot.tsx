// A head's matrix as part of the page.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Camera } from "./camera";
import type { Matrix } from "./matrix";
import type { Side } from "./text";
import type { Look } from "./tiles";
import { type Cell, type Pin, View } from "./view";

interface Props {
  title: string;
  /** What the head does, in words, or what rows and columns are. */
  note: string;
  matrix: Matrix;
  queries: Side;
  keys: Side;
  camera: Camera;
  look: Look;
  pinned: Pin | null;
  hovered: Cell | null;
  marked: Record<Pin["side"], Set<number>>;
  /** Whether it has the buttons that zoom; views are linked. */
  zooms: boolean;
  onHover(cell: Cell | null): void;
  onPick(row: number | null, col: number | null): void;
  /** Gets the view once it is there, and null when it goes. */
  onView(view: View | null): void;
}

export function Plot(props: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const view = useRef<View | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [hint, setHint] = useState(false);
  const timer = useRef(0);
  const { matrix, queries, keys, camera, look, pinned, hovered, marked } = props;
  useEffect(() => {
    const made = new View(canvas.current!, camera, matrix, queries, keys, latest.current.look, {
      hover: (cell) => latest.current.onHover(cell),
      pick: (row, col) => latest.current.onPick(row, col),
      scroll: () => {
        setHint(true);
        clearTimeout(timer.current);
        timer.current = setTimeout(() => setHint(false), 1500);
      },
    });
    view.current = made;
    latest.current.onView(made);
    return () => {
      made.close();
      latest.current.onView(null);
    };
  }, [matrix, queries, keys, camera]);
  useEffect(() => view.current?.setLook(look), [look, matrix]);
  useEffect(() => {
    Object.assign(view.current!, { pinned, hovered, marked });
    view.current!.refresh();
  }, [pinned, hovered, marked, matrix]);
  return (
    <figure class="plot">
      <div class="top">
        <figcaption title={props.title}>{props.title}</figcaption>
        {props.zooms && (
          <div class="zoom" role="group" aria-label="Zoom">
            <button type="button" aria-label="Zoom out" onClick={() => view.current!.zoom(1 / 1.5)}>−</button>
            <button type="button" aria-label="Zoom in" onClick={() => view.current!.zoom(1.5)}>+</button>
            <button type="button" onClick={() => view.current!.fit()}>Reset zoom</button>
          </div>
        )}
      </div>
      <p class="note">{props.note}</p>
      <div class="room">
        {hint && <p class="hint">Hold Ctrl or ⌘ and turn the wheel to zoom</p>}
        <canvas ref={canvas} role="img" aria-label={`Attention weights of ${props.title}: ${matrix.rows} queries, ${matrix.cols} keys`} />
      </div>
    </figure>
  );
}

// A head's matrix as part of the page.

import { useEffect, useRef } from "preact/hooks";
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
  marked: Set<number>;
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
  const { matrix, queries, keys, camera, look, pinned, hovered, marked } = props;
  useEffect(() => {
    const made = new View(canvas.current!, camera, matrix, queries, keys, latest.current.look, {
      hover: (cell) => latest.current.onHover(cell),
      pick: (row, col) => latest.current.onPick(row, col),
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
      <figcaption>{props.title}</figcaption>
      <p class="note">{props.note}</p>
      <div class="room">
        <canvas ref={canvas} role="img" aria-label={`Attention weights of ${props.title}: ${matrix.rows} queries, ${matrix.cols} keys`} />
      </div>
    </figure>
  );
}

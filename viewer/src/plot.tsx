// A head's matrix as part of the page.

import { useEffect, useRef } from "preact/hooks";
import type { Camera } from "./camera";
import type { Matrix } from "./matrix";
import type { Text } from "./schema";
import type { Look } from "./tiles";
import { type Cell, View } from "./view";

interface Props {
  title: string;
  matrix: Matrix;
  queries: Text;
  keys: Text;
  camera: Camera;
  look: Look;
  pinned: number | null;
  hovered: Cell | null;
  marked: Set<number>;
  onHover(cell: Cell | null): void;
  onPin(cell: Cell): void;
  /** Told of the view when it is there, and of null when it goes. */
  onView(view: View | null): void;
}

export function Plot(props: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const view = useRef<View | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const { matrix, queries, keys, camera, look, pinned, hovered, marked } = props;
  useEffect(() => {
    const made = new View(canvas.current!, camera, matrix, queries.tokens, keys.tokens, latest.current.look, {
      hover: (cell) => latest.current.onHover(cell),
      pin: (cell) => latest.current.onPin(cell),
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
      <div class="room">
        <canvas ref={canvas} role="img" aria-label={`Attention weights: ${props.title}`} />
      </div>
    </figure>
  );
}

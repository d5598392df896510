// Which part of a matrix is in view: shared by views that are linked.

/** The most pixels of a cell when the whole matrix is fitted, and the most at all. */
const FITTED = 56;
const MOST = 120;
/** Sides of a matrix may differ by this factor before its cells are stretched to fill the view. */
const STRETCHED = 2.5;

export class Camera {
  /** Pixels of a cell across and down, and where the first cell's corner is in the plot. */
  scaleX = 8;
  scaleY = 8;
  x = 0;
  y = 0;
  #fitted = true;
  #listeners = new Set<() => void>();

  /** Call a function after each change; return what ends that. */
  listen(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Fit the whole matrix; repeat when sizes change until the user moves the view. */
  fit(rows: number, cols: number, width: number, height: number): void {
    [this.scaleX, this.scaleY] = [Math.min(width / Math.max(cols, 1), FITTED), Math.min(height / Math.max(rows, 1), FITTED)];
    const square = Math.min(this.scaleX, this.scaleY);
    const long = Math.max(rows, cols) > STRETCHED * Math.min(rows, cols);
    if (!long || square === FITTED) this.scaleX = this.scaleY = square;
    this.x = 0;
    this.y = 0;
    this.#fitted = true;
    this.#notify();
  }

  refit(rows: number, cols: number, width: number, height: number): void {
    if (this.#fitted) this.fit(rows, cols, width, height);
  }

  pan(dx: number, dy: number): void {
    this.x += dx;
    this.y += dy;
    this.#fitted = false;
    this.#notify();
  }

  /** Zoom so that what is at (x, y) stays there. */
  zoom(factor: number, x: number, y: number, least: [number, number]): void {
    const zoomed = (scale: number, low: number): number => Math.min(Math.max(scale * factor, low), Math.max(MOST, low));
    const [scaleX, scaleY] = [zoomed(this.scaleX, least[0]), zoomed(this.scaleY, least[1])];
    this.x = x - ((x - this.x) * scaleX) / this.scaleX;
    this.y = y - ((y - this.y) * scaleY) / this.scaleY;
    [this.scaleX, this.scaleY] = [scaleX, scaleY];
    this.#fitted = false;
    this.#notify();
  }

  /** Move just as far as needed to have a row and a column in view, if not everything is. */
  reveal(row: number | null, col: number | null, width: number, height: number): void {
    if (this.#fitted) return this.#notify();
    const inside = (at: number, room: number): number => {
      const margin = Math.min(room / 4, 60);
      return at < margin ? margin - at : at > room - margin ? room - margin - at : 0;
    };
    const dy = row === null ? 0 : inside(this.y + (row + 0.5) * this.scaleY, height);
    const dx = col === null ? 0 : inside(this.x + (col + 0.5) * this.scaleX, width);
    if (dx || dy) this.pan(dx, dy);
    else this.#notify();
  }

  #notify(): void {
    for (const listener of this.#listeners) listener();
  }
}

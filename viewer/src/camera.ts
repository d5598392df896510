// Which part of a matrix is in view: shared by views that are linked.

export class Camera {
  /** Pixels of a cell, and where the first cell's corner is in the plot. */
  scale = 8;
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
    this.scale = Math.min(width / cols, height / rows, 56);
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
  zoom(factor: number, x: number, y: number, least: number): void {
    const scale = Math.min(Math.max(this.scale * factor, least), 120);
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.#fitted = false;
    this.#notify();
  }

  /** Move just as far as needed to have a cell in view, if not everything is. */
  reveal(row: number, col: number | null, width: number, height: number): void {
    if (this.#fitted) return this.#notify();
    const inside = (at: number, room: number): number => {
      const margin = Math.min(room / 4, 60);
      return at < margin ? margin - at : at > room - margin ? room - margin - at : 0;
    };
    const dy = inside(this.y + (row + 0.5) * this.scale, height);
    const dx = col === null ? 0 : inside(this.x + (col + 0.5) * this.scale, width);
    if (dx || dy) this.pan(dx, dy);
    else this.#notify();
  }

  #notify(): void {
    for (const listener of this.#listeners) listener();
  }
}

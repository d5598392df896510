// Where arrow keys lead.

export type Move = [dx: number, dy: number];

/** The direction of each arrow key. */
export const ARROWS: Record<string, Move | undefined> = {
  ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
};

/** Return which of some things is nearest to one of them in a direction, or that one where none is there. */
export function nearest<T>(from: T, all: T[], place: (each: T) => [number, number], [dx, dy]: Move): T {
  const [x, y] = place(from);
  let [best, least] = [from, Infinity];
  for (const each of all) {
    const [toX, toY] = place(each);
    const ahead = (toX - x) * dx + (toY - y) * dy;
    const distance = ahead + 4 * Math.abs(dx ? toY - y : toX - x);
    if (ahead > 0.5 && distance < least) [best, least] = [each, distance];
  }
  return best;
}

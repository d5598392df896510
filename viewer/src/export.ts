// The view as a file.

import type { View } from "./view";

/** Save the views, side by side, as one PNG file. */
export function savePng(views: View[], name: string): void {
  const canvas = document.createElement("canvas");
  canvas.width = views.reduce((sum, view) => sum + view.canvas.width, 0);
  canvas.height = Math.max(...views.map((view) => view.canvas.height));
  const context = canvas.getContext("2d")!;
  let left = 0;
  for (const view of views) {
    context.drawImage(view.canvas, left, 0);
    left += view.canvas.width;
  }
  canvas.toBlob((blob) => blob && save(blob, `${name}.png`));
}

/** Save the first view as an SVG file. */
export function saveSvg(views: View[], name: string): void {
  save(new Blob([views[0].svg()], { type: "image/svg+xml" }), `${name}.svg`);
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\p{L}\p{N}.]+/gu, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

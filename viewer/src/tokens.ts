// Tokens as they are written on a page: data, whose control characters become signs.

/** Letters of a token that a label shows, at most: a token may be as long as a page, and labels are drawn in each frame. */
const LONGEST = 100;

/** Return a token by itself, as labels and lists show it: without blanks around it. */
export function label(token: string): string {
  const found = shown(token.trim().slice(0, 4 * LONGEST)).trim() || "␣";
  const letters = [...found];
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : found;
}

/** Return a token with visible signs for what would not be seen, or would change what is. */
export function shown(token: string): string {
  return token.replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (each) => {
    const code = each.charCodeAt(0);
    if (each === "\n") return "⏎";
    if (each === "\t") return "⇥";
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "�";
  });
}

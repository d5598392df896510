// What the page shows, in its address: so that it can be bookmarked and sent.

export type State = Record<string, string>;

/** Where a state is kept. */
export interface Address {
  read(): State;
  write(state: State): void;
  /** Call a function when the user changes the address; return what ends that. */
  listen(changed: () => void): () => void;
}

/** The part of the document's address behind "#". */
export const hash: Address = {
  read: () => Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
  write(state) {
    const text = new URLSearchParams(state).toString();
    // A frame without an address of its own has none to keep a state in.
    if (!/^(https?|file):$/.test(location.protocol) || text === location.hash.slice(1)) return;
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  },
  listen(changed) {
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  },
};

/** No address: a widget shares the document with others. */
export const none: Address = { read: () => ({}), write: () => {}, listen: () => () => {} };

// A control with a sentence about it.

import { useId } from "preact/hooks";

interface Props {
  says: string;
  /** Gets what the control refers to the sentence by. */
  children(described: string): preact.VNode;
}

/** Shows the sentence while the control is pointed at or has the focus; screen readers read it, too. */
export function Explained({ says, children }: Props) {
  const id = useId();
  return (
    <span class="explained">
      {children(id)}
      <span class="tip" role="tooltip" id={id}>{says}</span>
    </span>
  );
}

// What the model answers without a head: asked of the server that the page came from.

import { useEffect, useState } from "preact/hooks";
import type { Effect } from "./schema";

/** Return what a model answers without a head of a layer. */
export type Ask = (layer: number, head: number) => Promise<Effect>;

/** Ask the server. */
export async function asked(layer: number, head: number): Promise<Effect> {
  const answer = await fetch(`without/${layer}/${head}`);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `the server answered ${answer.status}`);
  return answer.json();
}

interface Props {
  layer: number;
  head: number;
  title: string;
  ask: Ask;
  onClose(): void;
}

/** Both answers, side by side. */
export function Without({ layer, head, title, ask, onClose }: Props) {
  const [found, setFound] = useState<Effect | Error | null>(null);
  useEffect(() => {
    let current = true;
    setFound(null);
    ask(layer, head).then((effect) => current && setFound(effect), (error: Error) => current && setFound(error));
    return () => void (current = false);
  }, [layer, head, ask]);
  const effect = found instanceof Error ? null : found;
  const sentence = found instanceof Error ? found.message : effect ? effect.text : "The model runs without this head …";
  return (
    <section class="without" aria-label={`Without ${title}`}>
      <button type="button" class="close" aria-label="Close" onClick={onClose}>×</button>
      <p role="status">{sentence[0].toUpperCase() + sentence.slice(1)}.</p>
      {effect && effect.before.length > 0 && (
        <div class="answers">
          <Answers title="with this head" answers={effect.before} />
          <Answers title="without" answers={effect.after} />
        </div>
      )}
      {effect && effect.before.length > 0 && (
        <p class="share">{(100 * effect.change).toFixed(1)} % of all probability moves to other answers.</p>
      )}
    </section>
  );
}

function Answers({ title, answers }: { title: string; answers: [string, number][] }) {
  return (
    <table>
      <caption>{title}</caption>
      <tbody>
        {answers.map(([answer, share], at) => (
          <tr key={at}>
            <th scope="row"><bdi>{answer}</bdi></th>
            <td>{share.toFixed(2)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

// The page as a document of its own.

import { render } from "preact";
import { hash } from "./address";
import { App } from "./app";
import { fetcher } from "./blocks";
import type { Page } from "./schema";
import { asked } from "./without";

const root = document.getElementById("app")!;
const page = JSON.parse(document.getElementById("page")!.textContent!) as Page;
render(<App page={page} fetch={fetcher(page, document)} address={hash} ask={page.without ? asked : null} />, root);
(root.firstElementChild as HTMLElement | null)?.focus({ preventScroll: true });
